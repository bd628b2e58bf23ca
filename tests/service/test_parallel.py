"""Context-parallel prefill: each rank sends what it owns, decode gets every page once."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from app.core.pages import pages_for
from app.errors import PageMismatch, SettingsError
from app.service.node import Node
from app.tiers.device import readable
from app.transfer.fake import FakeDriver
from app.transfer.messages import Complete, RankSent
from tests.support.harness import PAGE, Cluster, eventually, node_settings, prompt_of

MODELS = ("toy", "toy-dsa")


def parallel(ranks: int, **more: Any) -> dict[str, Any]:
    cp = {"size": ranks, "shared_kv": True} if ranks > 1 else {}
    return {"cp": cp, **more}


@pytest.mark.contract(3, 7, 8, 97)
@pytest.mark.case("D12")
@pytest.mark.parametrize("mode", ["per_layer", "monolithic"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
async def test_every_rank_sends_what_it_owns(cluster: Cluster, model: str, ranks: int, mode: str) -> None:
    """Over all ranks decode receives every page once, at its absolute position; a rank without a page ends too."""
    common = {"model": {"name": model}, "transfer": {"mode": mode}}
    await cluster.start(parallel(ranks, **common), common)
    item = cluster.prefill.context.engine.geometry.page_bytes()
    for tokens in (1, PAGE, PAGE + 1, 5 * PAGE - 1, 20 * PAGE):
        legs = await cluster.serve(prompt_of(tokens))
        pages = pages_for(tokens, PAGE)
        assert legs.prefill.facts["sent_bytes"] == pages * item
        parts = legs.prefill.by_rank()
        assert [part.rank for part in parts] == list(range(ranks))
        counts = [sum(count for _, count in part.positions) for part in parts]
        assert sum(counts) == pages
        assert max(counts) - min(counts) <= 1
        assert [part.sent_bytes for part in parts] == [count * item for count in counts]
    await cluster.free()
    sessions = {rank.session for rank in cluster.prefill.introduction().ranks}
    assert len(sessions) == ranks


@pytest.mark.contract(2, 3)
@pytest.mark.parametrize("ranks", [2, 8])
async def test_the_ranks_hold_one_copy(cluster: Cluster, ranks: int) -> None:
    """What the ranks hold together is what one rank would hold, byte for byte; each stores its share of the pages."""
    await cluster.start(parallel(ranks, cache={"reuse": "page"}))
    prompt = prompt_of(16 * PAGE)
    legs = await cluster.serve(prompt)
    await cluster.free()
    context = cluster.prefill.context
    lease = context.cache.find(context.space(), prompt, most=len(prompt))
    assert len(lease.prefix) == 16
    assert (
        np.bincount(lease.prefix // context.cache.lanes.pages, minlength=ranks).tolist()
        == [16 // ranks] * ranks
    )
    assert legs.decode.pages is not None
    ours, places = readable(context.pools, lease.prefix)
    theirs, landed = readable(cluster.decode.context.pools, legs.decode.pages[:16])
    for name, array in ours.items():
        assert array[:, places].any()
        assert (array[:, places] == theirs[name][:, landed]).all()
    context.cache.end(lease)


@pytest.mark.contract(4)
async def test_ownership_does_not_depend_on_chunks(cluster: Cluster) -> None:
    """Two prefill nodes that cut a prompt differently give its pages to the same ranks."""
    await cluster.start(parallel(4, prefill={"chunk_tokens": 2 * PAGE}))
    other = await cluster.add("prefill", **parallel(4, prefill={"chunk_tokens": 64 * PAGE}))
    prompt = prompt_of(13 * PAGE + 3)
    by_node = []
    for node in (cluster.prefill, other):
        request = cluster.request(prompt, bootstrap_url=node.url)
        decode, prefill = cluster.start_decode(request), cluster.start_prefill(request, node)
        await asyncio.gather(decode.answered.wait(), prefill.answered.wait())
        assert prefill.life.reason is None
        by_node.append([(part.rank, part.positions) for part in prefill.by_rank()])
    assert by_node[0] == by_node[1]
    await cluster.free()


@pytest.mark.contract(10)
async def test_a_valid_tail_is_one_page(cluster: Cluster) -> None:
    """A prompt that ends inside its page sends that one page, not one for every rank."""
    await cluster.start(parallel(8))
    legs = await cluster.serve(prompt_of(3))
    assert sum(sum(c for _, c in part.positions) for part in legs.prefill.by_rank()) == 1
    await cluster.free()


@pytest.mark.case("D1")
@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0], r"ranks \[0\] have sent, not \[0, 1\]"),
        ([0, 0], r"ranks \[0, 0\] have sent"),
        ([1, 0], r"ranks \[1, 0\] have sent"),
    ],
)
async def test_one_sender_alone_is_not_done(cluster: Cluster, ranks: list[int], message: str) -> None:
    """All chunks of one rank are not the prompt: decode refuses the word that leaves a rank out."""
    await cluster.start(parallel(2, prefill={"chunk_tokens": 2 * PAGE}))
    legs = await _told(cluster, [RankSent(rank=r, positions=((0, 5),), sent_bytes=0) for r in ranks])
    assert isinstance(legs.decode.life.reason, PageMismatch)
    assert legs.decode.life.reason is not None
    assert re.search(message, legs.decode.life.reason.message)
    await cluster.free()


@pytest.mark.contract(8)
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((((0, 2),), ((3, 2),)), "position 2 is in no rank's part"),
        ((((0, 3),), ((2, 3),)), "position 2 is in the parts of two ranks"),
        ((((0, 2),), ((2, 2),)), "the ranks' parts end at position 4"),
        ((((1, 2),), ((3, 2),)), "position 0 is in no rank's part"),
    ],
)
async def test_gaps_and_overlaps_are_refused(cluster: Cluster, parts: Any, message: str) -> None:
    """Parts that leave a position out, or bring one twice, fail the room at both ends."""
    await cluster.start(parallel(2, prefill={"chunk_tokens": 2 * PAGE}))
    legs = await _told(
        cluster, [RankSent(rank=r, positions=part, sent_bytes=0) for r, part in enumerate(parts)]
    )
    assert isinstance(legs.decode.life.reason, PageMismatch)
    assert message in legs.decode.life.reason.message
    assert legs.prefill.life.reason is not None
    await cluster.free()


async def _told(cluster: Cluster, ranks: list[RankSent]) -> Any:
    """A request of five pages whose end is told with these parts, while its bytes are under way."""
    for driver in cluster.ranks[cluster.prefill]:
        driver.hold()
    legs = cluster.start_both(prompt_of(5 * PAGE))
    await eventually(lambda: legs.decode.announced and legs.decode.generation)
    await eventually(lambda: any(d.in_flight() for d in cluster.ranks[cluster.prefill]))
    message = Complete(
        instance=cluster.prefill.instance,
        generation=legs.decode.generation,
        sent_bytes=0,
        ranks=tuple(ranks),
        digests=(),
    )
    status, _ = await cluster.post(cluster.decode, f"/v1/peer/rooms/{legs.room}/complete", message)
    assert status >= 400
    for driver in cluster.ranks[cluster.prefill]:
        driver.let_go()
    await legs.failed()
    return legs


@pytest.mark.contract(111)
@pytest.mark.case("D8")
async def test_an_abort_drains_every_rank(cluster: Cluster) -> None:
    """An abort is acknowledged when the writes of all ranks have ended; then none of them holds anything of it."""
    await cluster.start(parallel(4))
    slow = cluster.ranks[cluster.prefill][3]
    slow.hold()
    legs = cluster.start_both(prompt_of(20 * PAGE))
    await eventually(slow.in_flight)
    legs.decode.fail(PageMismatch("enough"))
    await legs.decode.answered.wait()
    await eventually(lambda: legs.prefill.life.reason is not None)
    await asyncio.sleep(0.05)
    assert cluster.held(cluster.decode)["pages"] > 0
    slow.let_go()
    await cluster.free()
    context = cluster.prefill.context
    assert [context.cache.lanes.free_in(rank) for rank in range(4)] == [context.cache.lanes.pages] * 4
    assert all(not queue["queued"] for t in context.transfers for queue in t.statistics()["peers"].values())


@pytest.mark.contract(141)
async def test_tails_are_kept_by_rank(cluster: Cluster) -> None:
    """Each rank that has sent something has its own tail of transfer times."""
    await cluster.start(parallel(2))
    await cluster.serve(prompt_of(8 * PAGE))
    await cluster.free()
    sent = cluster.prefill.statistics()["sent"][cluster.decode.url]["ranks"]
    assert set(sent) == {"0", "1"}
    assert all({"p50", "p95", "p99", "max"} <= set(rank["transfer_s"]) for rank in sent.values())


@pytest.mark.contract(9)
async def test_a_backend_without_addresses_is_refused(cluster: Cluster) -> None:
    """Shared KV over a transfer engine that cannot place single pages stops the start and names the setting."""

    class Whole(FakeDriver):
        addressed = False

    node = Node(
        node_settings("prefill", cp={"size": 2, "shared_kv": True}), url="http://127.0.0.1:1", driver=Whole
    )
    with pytest.raises(SettingsError, match=r"cp\.shared_kv: the transfer engine \(fake\) cannot send"):
        await node.start()
    alone = Node(node_settings("prefill"), url="http://127.0.0.1:1", driver=Whole)
    await alone.start()
    await alone.stop()


@pytest.mark.contract(5, 6, 7)
@pytest.mark.parametrize(
    ("role", "cp", "message"),
    [
        ("decode", {"size": 2, "shared_kv": True}, r"cp\.size \(2\): a decode node has one rank"),
        ("prefill", {"size": 2}, r"cp\.shared_kv is off: cp\.size \(2\) needs it"),
        ("prefill", {"shared_kv": True}, r"cp\.shared_kv is on: it needs a cp\.size above 1"),
        ("prefill", {"size": 2, "shared_kv": True, "split": "round_robin"}, r"cp\.split \(round_robin\)"),
    ],
)
def test_combinations_that_do_not_go_together(role: str, cp: dict[str, Any], message: str) -> None:
    """Shared KV is off by default; each invalid combination fails at the start and names its setting."""
    assert not node_settings("prefill").cp.shared_kv
    with pytest.raises(SettingsError, match=message):
        node_settings(role, cp=cp)
