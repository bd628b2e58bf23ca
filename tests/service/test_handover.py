"""A request through both nodes: which bytes move, in which mode, what is counted and what is logged."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from structlog.testing import capture_logs

from app.core.digests import page_digests
from app.core.pages import pages_for
from app.errors import ClientGone, FingerprintMismatch, PageMismatch
from app.transfer.fake import Fault
from app.transfer.messages import Destination
from tests.support.faults import MessageFault
from tests.support.harness import PAGE, Cluster, Legs, eventually, is_slot, page_list, prompt_of

ITEM = PAGE * 64
LAYERS = 12


@pytest.mark.parametrize("mode", ["per_layer", "monolithic"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 130, 300])
async def test_equals_a_run_without_transfer(cluster: Cluster, tokens: int, mode: str) -> None:
    """Pages at both ends, logits and tokens are those of a local run, in one chunk or several."""
    await cluster.start(prefill={"transfer": {"mode": mode}})
    await cluster.serve(prompt_of(tokens))
    await cluster.free()


async def test_twenty_at_once_to_two_decode_nodes(cluster: Cluster) -> None:
    """Twenty requests at once to two decode nodes are all answered as by a local run."""
    await cluster.start(prefill={"cache": {"pages": 128, "slots": 32}}, decode={"cache": {"slots": 32}})
    second = await cluster.add("decode", cache={"slots": 32})
    nodes = (cluster.decode, second)
    legs = [cluster.start_both(prompt_of(20 + 9 * i, salt=i), decode=nodes[i % 2]) for i in range(20)]
    for each in legs:
        await cluster.expect_local(each)
    await cluster.free()


@pytest.mark.contract(110)
@pytest.mark.parametrize("mode", ["per_layer", "monolithic"])
async def test_contexts_come_before_the_forward_and_bytes_once(cluster: Cluster, mode: str) -> None:
    """All chunks are registered at the first layer's end; each (layer, page) and one record are sent once."""
    await cluster.start(prefill={"transfer": {"mode": mode}})
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(0, start=0)
    legs = cluster.start_both(prompt_of(3 * 8 * PAGE - 5))
    await eventually(brake.reached.is_set)
    fifos = cluster.prefill_rooms.fifos
    assert [context.start for context in fifos.active(legs.request.room)] == [0, 128, 256]
    assert cluster.writer.submitted == []
    brake.release()
    await cluster.expect_local(legs)
    blocks = [block for block in cluster.writer.blocks() if not is_slot(block)]
    written = [address for b in blocks for address in range(b.destination, b.destination + b.length, ITEM)]
    assert len(written) == len(set(written)) == 24 * LAYERS
    assert len([b for b in cluster.writer.blocks() if is_slot(b)]) == 1
    await cluster.free()


async def test_both_modes_send_the_same(cluster: Cluster) -> None:
    """Bytes, pages and the record are equal in per-layer and in monolithic mode; only the grouping differs."""
    await cluster.start()
    monolithic = await cluster.add("prefill", transfer={"mode": "monolithic"})
    prompt = prompt_of(300)
    first = await cluster.serve(prompt)
    request = cluster.request(prompt, bootstrap_url=monolithic.url)
    job = cluster.start_prefill(request, monolithic)
    decode = cluster.start_decode(request)
    second = Legs(request=request, prefill=job, decode=decode)
    await cluster.expect_local(second)
    for fact in ("sent_bytes", "page_digest", "chunks"):
        assert first.prefill.facts[fact] == job.facts[fact], fact
    assert (first.prefill.facts["groups"], job.facts["groups"]) == (9, 36)
    await cluster.free()


@pytest.mark.case("C1")
@pytest.mark.contract(127)
async def test_only_the_missing_position_moves(cluster: Cluster) -> None:
    """Decode holds 31 of the 32 pages of 2,048 tokens: position 31 goes to its own page, nothing else moves."""
    cache = {"page_size": 64, "pages": 64}
    common = {"cache": cache, "prefill": {"chunk_tokens": 512, "max_input_tokens": 2048}}
    await cluster.start(prefill=common, decode=common)
    prompt = prompt_of(2048)
    await cluster.serve(prompt, new_tokens=2)
    await cluster.free()
    pool = cluster.decode.context.pool.host_arrays()
    pool["target.kv"][:, 31] = 0
    geometry = cluster.decode.context.engine.geometry
    before = page_digests(geometry, dict(pool), np.arange(31), "full")
    submitted = len(cluster.writer.submitted)
    legs = cluster.start_both(prompt, new_tokens=2, first_position=31)
    await cluster.expect_local(legs)
    assert page_list(legs.decode) == list(range(33))
    sent = cluster.writer.blocks()[submitted:]
    assert cluster.pages_in(cluster.decode, sent) == {31}
    assert len(sent) == LAYERS + 1
    assert page_digests(geometry, dict(pool), np.arange(31), "full") == before
    assert legs.prefill.facts["sent_bytes"] == LAYERS * 64 * 64
    assert legs.decode.facts["received_bytes"] == LAYERS * 64 * 64
    await cluster.free()


@pytest.mark.contract(98, 127)
@pytest.mark.parametrize("tokens", [40, 3 * 8 * PAGE])
async def test_a_final_chunk_without_new_pages_sends_its_metadata(cluster: Cluster, tokens: int) -> None:
    """Decode holds every page already: only the record is written, and decode goes on from it."""
    await cluster.start()
    prompt = prompt_of(tokens)
    await cluster.serve(prompt)
    await cluster.free()
    submitted = len(cluster.writer.submitted)
    sent_before = cluster.prefill.statistics()["sent"][cluster.decode.url]
    legs = cluster.start_both(prompt, first_position=pages_for(tokens, PAGE))
    await cluster.expect_local(legs)
    assert [is_slot(block) for block in cluster.writer.blocks()[submitted:]] == [True]
    assert legs.prefill.facts["sent_bytes"] == 0
    # who sends no byte of KV reports nothing
    assert cluster.prefill.statistics()["sent"][cluster.decode.url] == sent_before
    await cluster.free()


@pytest.mark.case("C8")
async def test_the_sampled_token_takes_no_page_of_the_transfer(cluster: Cluster) -> None:
    """128 prompt tokens and one sampled at page 64: both sides count 2 pages; a list of 3 fails that room only."""
    common = {
        "cache": {"page_size": 64, "pages": 16},
        "prefill": {"chunk_tokens": 512, "max_input_tokens": 1024},
    }
    await cluster.start(prefill=common, decode=common)
    legs = await cluster.serve(prompt_of(128), new_tokens=1)
    (sent,) = cluster.wire.sent("destine", legs.room)
    assert isinstance(sent.message, Destination)
    assert len(sent.message.pages) == len(legs.decode.prompt_pages(64)) == 2
    assert len(page_list(legs.prefill)) == 2
    assert legs.prefill.facts["sent_bytes"] == 2 * LAYERS * 64 * 64
    await cluster.free()
    request = cluster.request(prompt_of(128, salt=1))
    job = cluster.start_prefill(request)
    message = sent.message.model_copy(update={"pages": (0, 1, 2), "generation": 99})
    answer = await cluster.call(
        cluster.prefill,
        "PUT",
        f"/v1/peer/rooms/{request.room}",
        message.model_dump_json().encode(),
    )
    assert answer.status_code == 409
    assert "need 2 pages and 0 look-ahead, the destination has 3" in answer.json()["detail"]
    await job.answered.wait()
    assert isinstance(job.life.reason, PageMismatch)
    await cluster.serve(prompt_of(128, salt=2), new_tokens=1)
    await cluster.free()


@pytest.mark.contract(127)
async def test_reported_bytes_are_pages_times_item_bytes(cluster: Cluster) -> None:
    """The statistics of a peer add up what was sent for it, exactly."""
    await cluster.start()
    for tokens in (1, 16, 17, 300):
        await cluster.serve(prompt_of(tokens))
    await cluster.free()
    pages = sum(pages_for(tokens, PAGE) for tokens in (1, 16, 17, 300))
    sent = cluster.prefill.statistics()["sent"][cluster.decode.url]["ranks"]["0"]
    assert (sent["rooms"], sent["bytes"]) == (4, pages * LAYERS * ITEM)
    assert sent["transfer_s"]["p50"] <= sent["transfer_s"]["p99"] <= sent["transfer_s"]["max"]


@pytest.mark.contract(129)
async def test_phases_that_were_not_reached_last_zero(cluster: Cluster) -> None:
    """A room that failed in its queue shows 0 for every later phase; no duration is ever negative."""
    await cluster.start()
    async with cluster.prefill.context.forwards.turn(timeout_s=5):
        legs = cluster.start_both(prompt_of(40))
        await eventually(lambda: cluster.prefill.context.forwards.waiting == 1)
        legs.prefill.fail(ClientGone("gone"))
        await legs.answered()
    await cluster.serve(prompt_of(40, salt=1))
    await cluster.free()
    failed, served = cluster.prefill.ended_rooms()
    assert {k: failed[k] for k in ("queue_s", "forward_s", "transfer_s", "exposed_s")} == {
        "queue_s": 0,
        "forward_s": 0,
        "transfer_s": 0,
        "exposed_s": 0,
    }
    assert all(served[k] > 0 for k in ("queue_s", "forward_s", "transfer_s", "exposed_s", "total_s"))
    assert served["transfer_s"] <= served["total_s"]


@pytest.mark.case("L6")
async def test_transfer_latency_ends_with_the_transfer(cluster: Cluster) -> None:
    """Decode answers prefill's last word late: the transfer's time does not grow, the request's does."""
    await cluster.start()
    cluster.wire.rule = lambda sent: MessageFault(delay_s=0.5) if sent.kind == "complete" else None
    await cluster.serve(prompt_of(40))
    await cluster.free()
    (record,) = cluster.prefill.ended_rooms()
    reported = cluster.prefill.statistics()["sent"][cluster.decode.url]["ranks"]["0"]["transfer_s"]["max"]
    assert record["total_s"] >= record["transfer_s"] + 0.5
    assert 0 < reported <= record["transfer_s"]


@pytest.mark.contract(123)
async def test_success_is_quiet_and_failure_is_told_once(cluster: Cluster) -> None:
    """Success leaves DEBUG lines only; a failed finish leaves one WARNING a side, with the room."""
    await cluster.start()
    with capture_logs() as quiet:
        await cluster.serve(prompt_of(300))
        await cluster.free()
    assert {line["log_level"] for line in quiet} == {"debug"}
    cluster.writer.plan = lambda session, block: Fault(refuse=True)
    with capture_logs() as told:
        legs = cluster.start_both(prompt_of(40))
        await legs.answered()
        await cluster.free()
    warnings = [line for line in told if line["log_level"] == "warning" and line["event"] == "room.failed"]
    assert [(w["room"], w["error"], w["reason"]) for w in warnings] == [
        (legs.room, "TransferFailed", "the engine refused a write")
    ] * 2
    assert not [line for line in told if line["log_level"] == "info"]


@pytest.mark.contract(135)
async def test_another_runtime_contract_is_refused_with_its_difference(cluster: Cluster) -> None:
    """Nodes that digest differently do not exchange a byte: both legs fail, and the part that differs is shown."""
    await cluster.start(decode={"transfer": {"digests": "sampled"}})
    legs = cluster.start_both(prompt_of(40))
    mine, theirs = await legs.failed()
    assert isinstance(theirs, FingerprintMismatch)
    assert theirs.status == 409
    assert theirs.message.endswith("digest_mode: ours full, theirs sampled")
    assert mine is not None and mine.message == theirs.message
    assert cluster.prefill.context.peers.refused == 1
    assert cluster.writer.submitted == []
    await cluster.free()
    same = await cluster.add("decode")
    await cluster.serve(prompt_of(40), decode=same)  # the refusing side stays up
    await cluster.free()


@pytest.mark.contract(107)
async def test_chunks_leave_the_fifo_as_they_finish(cluster: Cluster) -> None:
    """The front chunk leaves when it is finished, beside the next one's forward; a second finish is harmless."""
    await cluster.start()
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(0, start=2 * 8 * PAGE)
    legs = cluster.start_both(prompt_of(3 * 8 * PAGE))
    await eventually(brake.reached.is_set)
    fifos = cluster.prefill_rooms.fifos
    await eventually(lambda: [c.start for c in fifos.active(legs.request.room)] == [256])
    brake.release()
    await cluster.expect_local(legs)
    assert await asyncio.gather(*(fifos.finish(legs.request.room) for _ in range(2))) == [0, 0]
    await cluster.free()
