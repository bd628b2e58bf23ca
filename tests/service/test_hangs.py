"""Nothing waits for ever, and one bad request costs nobody else."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.core.lifecycle import State
from app.errors import (
    ClientGone,
    DeadlineExceeded,
    IllegalTransition,
    NoCapacity,
    PeerUnavailable,
    SettingsError,
    TransferFailed,
)
from app.service.awake import within
from app.settings.sections import DeadlineSettings, TransferSettings
from app.transfer.base import Block, Status
from app.transfer.fake import Fault
from tests.support.harness import (
    PAGE,
    Cluster,
    Legs,
    eventually,
    is_slot,
    node_settings,
    page_list,
    prompt_of,
)


@pytest.mark.case("F2")
async def test_a_queued_receiver_that_fails_leaves_the_queue_at_once(cluster: Cluster) -> None:
    """It waits for pages and fails: out of the queue, out of the table, and the next in line is served."""
    await cluster.start()
    gate = cluster.decode.context.gate
    taken = await gate.take(62, timeout_s=1)
    large = cluster.start_decode(cluster.request(prompt_of(10 * PAGE)))
    small = cluster.start_both(prompt_of(PAGE, salt=1))
    await eventually(lambda: gate.waiting == 2)
    assert large.fail(ClientGone("gone"))
    await large.answered.wait()
    assert large.room not in cluster.decode_rooms.table
    await cluster.expect_local(small)  # two pages were free all along, behind the large one
    gate.give(taken)
    await cluster.free()
    assert large.pages is None


@pytest.mark.case("F3")
async def test_one_raising_write_fails_one_room(cluster: Cluster) -> None:
    """The engine raises on room 1: it fails at both ends; rooms 2..4 succeed through the same worker."""
    await cluster.start()
    raising = iter([Fault(error=RuntimeError("broken"))])
    cluster.writer.plan = lambda session, block: next(raising, Fault())
    reasons = await cluster.start_both(prompt_of(40)).failed()
    for reason in reasons:
        assert isinstance(reason, TransferFailed)
        assert reason.message == "a write did not start: broken"
    for salt in (2, 3, 4):
        await cluster.serve(prompt_of(40, salt=salt))
    await cluster.free()


@pytest.mark.case("F4")
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_unexpected_state_has_a_defined_end(cluster: Cluster, side: str) -> None:
    """A room found in a state that its next event does not fit fails on both sides; it is not tried again."""
    await cluster.start()
    cluster.writer.hold(is_slot)
    legs = cluster.start_both(prompt_of(40))
    await eventually(lambda: cluster.writer.in_flight() == 1)
    if side == "prefill":
        legs.prefill.life.state = State.WAITING
    else:
        legs.decode.life.state = State.DECODING
    cluster.writer.let_go()
    mine, theirs = await legs.failed()
    if side == "prefill":
        assert isinstance(mine, IllegalTransition) and mine.message == "landed in state waiting"
        assert theirs is not None and "landed in state waiting" in theirs.message
    else:
        assert isinstance(theirs, IllegalTransition) and theirs.message == "landed in state decoding"
        assert isinstance(mine, IllegalTransition) and mine.message == theirs.message
    assert len(cluster.wire.sent("complete", legs.room)) == (0 if side == "prefill" else 1)
    await cluster.free()


@pytest.mark.case("F5")
async def test_a_request_that_is_never_scheduled_times_out(cluster: Cluster) -> None:
    """No turn comes within the queue's deadline: the client gets 504 and decode is told."""
    await cluster.start(prefill={"deadlines": {"queue_s": 0.2}})
    async with cluster.prefill.context.forwards.turn(timeout_s=5):
        legs = cluster.start_both(prompt_of(40))
        mine, theirs = await legs.failed()
    for reason in (mine, theirs):
        assert isinstance(reason, DeadlineExceeded) and reason.status == 504
        assert reason.message == "not scheduled within 0.2 s (deadlines.queue_s)"
    await cluster.free()


@pytest.mark.case("F5")
@pytest.mark.parametrize("phase", ["bootstrap", "parked", "forward", "transfer", "decode", "pages"])
async def test_each_phase_has_its_deadline(cluster: Cluster, phase: str) -> None:
    """Whatever a room waits for, its own deadline ends it with 504 on this side and the other hears of it."""
    late = {"deadlines": {f"{'queue' if phase == 'pages' else phase}_s": 0.4}}
    here = "decode" if phase in ("transfer", "decode", "pages") else "prefill"
    await cluster.start(**{here: late})
    request = cluster.request(prompt_of(40))
    legs = Legs(request=request)
    if phase == "bootstrap":
        legs.prefill = cluster.start_prefill(request)
    elif phase == "parked":
        legs.decode = cluster.start_decode(request)
    elif phase == "pages":
        gate = cluster.decode.context.gate
        pages = await gate.take(64, timeout_s=1)
        legs = cluster.start_both(request.prompt)
    else:
        brake = cluster.brake(cluster.decode if phase == "decode" else cluster.prefill)
        brake.at(lambda step, layer: layer == 4)
        legs = cluster.start_both(request.prompt)
        await eventually(brake.reached.is_set)
        job = legs.prefill if phase == "forward" else legs.decode
        await eventually(lambda: job.life.failing)
        assert cluster.held(cluster.prefill if phase == "forward" else cluster.decode)["pages"]
        brake.release()
    if phase == "pages":
        await legs.answered()
        gate.give(pages)
    mine, theirs = await legs.failed()
    expected = legs.decode if here == "decode" or phase == "parked" else legs.prefill
    assert expected is not None and isinstance(expected.life.reason, DeadlineExceeded)
    assert expected.life.reason.status == 504
    if phase == "forward":
        assert isinstance(theirs, DeadlineExceeded)
    elif phase in ("transfer", "pages"):
        assert mine is not None and mine.slug == "peer-aborted"
    await cluster.free()


@pytest.mark.case("F6")
async def test_a_dead_peer_does_not_touch_the_living(cluster: Cluster) -> None:
    """One request to a dead prefill node, one to a live one: 503 for the first, the second is served."""
    await cluster.start()
    alive = cluster.start_both(prompt_of(40))
    dead = cluster.start_decode(cluster.request(prompt_of(40, salt=1), bootstrap_url="http://127.0.0.1:1"))
    await dead.answered.wait()
    assert isinstance(dead.life.reason, PeerUnavailable)
    assert (dead.life.reason.status, dead.life.reason.retry_after_s) == (503, 1)
    await cluster.expect_local(alive)
    await cluster.free()


@pytest.mark.case("F9")
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_full_queue_refuses_arrivals_only(cluster: Cluster, side: str) -> None:
    """Arrivals beyond the queue get 503 with Retry-After and the other leg hears of it; the admitted are served."""
    await cluster.start(**{side: {"limits": {"queued_requests": 2}}})
    node = cluster.prefill if side == "prefill" else cluster.decode
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(3)
    served = [cluster.start_both(prompt_of(40))]
    await eventually(brake.reached.is_set)
    if side == "decode":
        gate = node.context.gate
        pages = await gate.take(gate.cache.free_pages, timeout_s=1)
    served += [cluster.start_both(prompt_of(40, salt=salt)) for salt in (1, 2)]
    refused = cluster.request(prompt_of(40, salt=3))
    other = cluster.start_decode(refused) if side == "prefill" else cluster.start_prefill(refused)
    body = {
        "input_ids": refused.prompt,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": int(cluster.prefill.url.rpartition(":")[2]),
        "bootstrap_room": refused.room,
    }
    answer = await cluster.call(node, "POST", "/generate", json.dumps(body).encode())
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    detail = "2 requests wait already (limits.queued_requests)"
    assert (answer.json()["type"], answer.json()["detail"]) == ("urn:kvferry:problem:no-capacity", detail)
    await within(other.answered.wait(), 10)
    assert other.life.reason is not None and other.life.reason.message == detail
    if side == "prefill":
        assert isinstance(other.life.reason, NoCapacity)
    else:
        gate.give(pages)
    brake.release()
    for legs in served:
        await cluster.expect_local(legs)
    await cluster.free()


@pytest.mark.case("F9")
async def test_decoding_requests_are_never_refused_a_turn(cluster: Cluster) -> None:
    """With room for one in the queue, requests that were admitted share the forward thread to their end."""
    await cluster.start()
    brake = cluster.brake(cluster.decode)
    brake.at(lambda step, layer: layer == 0)
    legs = [cluster.start_both(prompt_of(20, salt=salt), new_tokens=6) for salt in range(5)]
    await eventually(lambda: cluster.decode.context.forwards.waiting == 4)
    cluster.decode.context.gate._max_waiting = 1
    brake.release()
    for each in legs:
        await cluster.expect_local(each)
    await cluster.free()


@pytest.mark.case("F9")
async def test_a_missing_staging_slot_is_found_before_the_forward(cluster: Cluster) -> None:
    """With every slot of prefill in use an arrival is refused unserved; those at work are served."""
    await cluster.start(prefill={"cache": {"slots": 1}})
    cluster.writer.hold(is_slot)
    first = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    second = cluster.start_both(prompt_of(40, salt=1))
    for reason in await second.failed():
        assert isinstance(reason, NoCapacity)
        assert reason.message == "no metadata slot is free (cache.slots)"
    assert second.prefill.phases.forward_start == 0
    cluster.writer.let_go()
    await cluster.expect_local(first)
    await cluster.free()


@pytest.mark.case("F10")
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("name", sorted(DeadlineSettings.model_fields))
def test_no_deadline_is_infinite(role: str, name: str) -> None:
    """Each deadline has a finite default; zero, infinity and nonsense stop the start and name the key."""
    default = getattr(node_settings(role).deadlines, name)
    assert 0 < default <= 86_400
    assert 0 < DeadlineSettings.model_fields[name].default <= 86_400
    for value in (0, float("inf"), float("nan"), -1, "never", None):
        with pytest.raises(SettingsError, match=f"deadlines.{name}"):
            node_settings(role, deadlines={name: value})


@pytest.mark.case("F10")
@pytest.mark.parametrize("name", ["retry_after_s", "progress_timeout_s", "deadline_s", "late_landing_s"])
def test_no_timeout_of_the_engine_is_infinite(name: str) -> None:
    """The transfer engine's times are finite by default and cannot be switched off either."""
    assert 0 < TransferSettings.model_fields[name].default <= 86_400
    for value in (0, float("inf")):
        with pytest.raises(SettingsError, match=f"transfer.{name}"):
            node_settings("prefill", transfer={name: value})


@pytest.mark.case("F11")
@pytest.mark.contract(111)
async def test_a_write_that_does_not_start_fails_the_receiver_at_once(cluster: Cluster) -> None:
    """The engine refuses the first group: the forward ends at a next layer and decode fails, without waiting."""
    await cluster.start(prefill={"transfer": {"group_layers": 2}, "model": {"layer_delay_s": 0.05}})
    brake = cluster.brake(cluster.prefill)
    cluster.writer.plan = lambda session, block: Fault(refuse=True)
    legs = cluster.start_both(prompt_of(3 * 8 * PAGE))
    mine, theirs = await legs.failed()
    for reason in (mine, theirs):
        assert isinstance(reason, TransferFailed) and reason.message == "the engine refused a write"
    assert legs.prefill.phases.forward_end == 0
    assert [step.start for step in brake.steps] == [0]
    assert brake.layers < 12
    await cluster.free()


@pytest.mark.case("F11")
@pytest.mark.contract(115)
async def test_a_wedged_engine_fails_the_room(cluster: Cluster) -> None:
    """The engine's thread blocks in a call and keeps no deadline: the finish has its own, and pages stay held."""
    await cluster.start(prefill={"transfer": {"deadline_s": 1.0, "late_landing_s": 0.1}})
    cluster.writer.works.clear()
    legs = cluster.start_both(prompt_of(40))
    mine, theirs = await legs.failed()
    for reason in (mine, theirs):
        assert isinstance(reason, DeadlineExceeded)
        assert reason.message == (
            "the engine gave no answer within 1.1 s: "
            "3 of 3 submits of the chunk at token 0, the metadata record"
        )
    await asyncio.sleep(0.1)
    assert (cluster.held(cluster.prefill)["pages"], cluster.held(cluster.decode)["pages"]) == (3, 3)
    cluster.writer.works.set()
    await cluster.free()
    await cluster.serve(prompt_of(40, salt=1))
    await cluster.free()


@pytest.mark.case("F11", "J6")
async def test_a_peer_out_of_reach_gets_a_new_engine_while_rooms_with_others_go_on(cluster: Cluster) -> None:
    """Writes to one decode fail although it answers: a new driver serves it, another decode's room never notices."""
    quick = {"retries": 2, "retry_after_s": 0.05, "late_landing_s": 0.1}
    await cluster.start(prefill={"transfer": quick})
    other = await cluster.add("decode")
    unreachable = cluster.decode.context.transfer.session
    rebuilt = cluster.prefill.context.transfer.counters

    def plan(session: str, block: Block) -> Fault:
        wedged = session == unreachable and not rebuilt["rebuilds"]
        return Fault(status=Status.FAILED) if wedged else Fault()

    cluster.writer.plan = plan
    cluster.writer.hold(lambda block: is_slot(block) and not rebuilt["rebuilds"])
    request = cluster.request(prompt_of(40, salt=1))
    theirs = Legs(
        request=request,
        prefill=cluster.start_prefill(request),
        decode=cluster.start_decode(request, other),
    )
    await eventually(lambda: theirs.prefill.metadata is not None)
    legs = cluster.start_both(prompt_of(40))
    await cluster.expect_local(legs)
    await cluster.expect_local(theirs)
    assert rebuilt["rebuilds"] == 1
    assert rebuilt["retries"] >= 2
    await cluster.free()


@pytest.mark.case("N2")
async def test_one_failed_write_fails_one_room(cluster: Cluster) -> None:
    """One -1 among five rooms at once: that room fails at both ends, the others succeed."""
    await cluster.start()
    failing = iter([Fault(status=Status.FAILED)])
    cluster.writer.plan = lambda session, block: next(failing, Fault())
    legs = [cluster.start_both(prompt_of(40, salt=salt)) for salt in range(5)]
    reasons = [await each.failed() for each in legs]
    failed = [pair for pair in reasons if pair != (None, None)]
    assert [[type(r) for r in pair] for pair in failed] == [[TransferFailed, TransferFailed]]
    await cluster.free()
    await cluster.serve(prompt_of(40, salt=9))
    await cluster.free()


@pytest.mark.case("N3")
async def test_one_flipped_byte_fails_the_request_on_both_sides(cluster: Cluster) -> None:
    """With full digests a destination that differs from its source is Corruption at both ends, with the place."""
    await cluster.start()
    flips = iter([Fault(), Fault(), Fault(), Fault(flip_byte=True)])
    cluster.writer.plan = lambda session, block: next(flips, Fault())
    legs = cluster.start_both(prompt_of(40))
    reasons = await legs.failed()
    page = page_list(legs.decode)[0]
    for reason, node in zip(reasons, (cluster.prefill, cluster.decode), strict=True):
        assert reason is not None and reason.slug == "corruption"
        assert reason.message == (
            f"page digest differs: target.kv layer 3 position 0, which is page {page} here, sent by rank 0"
        )
        place = {"rank": 0, "layer": 3, "position": 0, "page": page, "buffer": "target.kv"}
        assert reason.fields().items() >= {"room": legs.room, "leg": "decode", **place}.items()
        assert node.statistics()["corrupt"] == {"target.kv": 1}
    assert await legs.tokens() == []
    assert cluster.wire.sent("abort", legs.room) == []
    await cluster.free()
