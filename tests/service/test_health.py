"""What a node says of itself, and that talk never harms it."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from app.core.lifecycle import State
from app.errors import NotReady
from app.transfer.messages import Introduction
from tests.support.harness import Cluster, Legs, eventually, prompt_of


@pytest.mark.case("K1")
async def test_a_handshake_before_the_start_is_answered_with_503(cluster: Cluster) -> None:
    """Every peer route of a node that still loads answers 503 with Retry-After, and decode passes that on."""
    unstarted = cluster.build("prefill")
    decode = await cluster.add("decode")
    body = decode.introduction().model_dump_json().encode()
    answer = await cluster.call(unstarted, "POST", "/v1/peer/handshake", body)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json()["type"] == "urn:kvferry:problem:not-ready"
    for path in ("/health", "/readyz"):
        assert (await cluster.call(unstarted, "GET", path)).status_code == 503
    job = cluster.start_decode(cluster.request(prompt_of(20)))
    await job.answered.wait()
    assert isinstance(job.life.reason, NotReady) and job.life.reason.retry_after_s == 1
    await cluster.free()
    await unstarted.start()
    answer = await cluster.call(unstarted, "POST", "/v1/peer/handshake", body)
    assert Introduction.model_validate(answer.json()).instance == unstarted.instance
    await cluster.serve(prompt_of(20))
    await cluster.free()


@pytest.mark.case("K5")
async def test_pages_that_come_before_their_request_are_held(cluster: Cluster) -> None:
    """Decode names its pages before prefill knows the room: held briefly, and served when the request comes."""
    await cluster.start()
    request = cluster.request(prompt_of(40))
    decode = cluster.start_decode(request)
    await eventually(lambda: cluster.wire.answered("destine", request.room))
    assert cluster.wire.answered("destine")[0][1]["state"] == State.PARKED
    legs = Legs(request=request, prefill=cluster.start_prefill(request), decode=decode)
    await cluster.expect_local(legs)
    await cluster.free()


@pytest.mark.case("L1")
async def test_a_slow_forward_is_live_and_a_stalled_one_is_not(cluster: Cluster) -> None:
    """A forward far longer than the stall limit is live while layers end; one that stands still is not."""
    stall_s = 0.8
    await cluster.start(prefill={"deadlines": {"stall_s": stall_s}, "model": {"layer_delay_s": 0.1}})
    legs = cluster.start_both(prompt_of(40))
    await eventually(lambda: legs.prefill.phases.forward_start)
    while not legs.prefill.phases.forward_end:
        answer = await cluster.call(cluster.prefill, "GET", "/livez")
        assert (answer.status_code, answer.json()) == (200, {"status": "live"})
        await asyncio.sleep(0.02)
    await cluster.expect_local(legs)
    record = cluster.prefill.ended_rooms()[0]
    assert record["forward_s"] > stall_s

    brake = cluster.brake(cluster.prefill)
    brake.at_layer(1)
    legs = cluster.start_both(prompt_of(40, salt=1))
    await eventually(brake.reached.is_set)
    await eventually(lambda: not cluster.prefill.live)
    for path in ("/livez", "/readyz", "/health"):
        answer = await cluster.call(cluster.prefill, "GET", path)
        assert (answer.status_code, answer.json()["detail"]) == (503, "a forward makes no progress")
    brake.release()
    await cluster.expect_local(legs)
    assert (await cluster.call(cluster.prefill, "GET", "/livez")).status_code == 200
    await cluster.free()


@pytest.mark.case("L2")
async def test_a_node_without_its_control_task_is_not_ready(cluster: Cluster) -> None:
    """Deadlines are no longer watched: /readyz and /health say 503 with the reason."""
    await cluster.start()
    assert (await cluster.call(cluster.prefill, "GET", "/readyz")).json() == {"status": "ready"}
    control = cluster.prefill._control
    assert control is not None
    control.cancel()
    await asyncio.wait([control])
    for path in ("/readyz", "/health"):
        answer = await cluster.call(cluster.prefill, "GET", path)
        assert (answer.status_code, answer.json()["detail"]) == (503, "the control task has died")
    assert (await cluster.call(cluster.decode, "GET", "/readyz")).status_code == 200


@pytest.mark.case("L3")
async def test_the_worst_rank_decides_readiness(cluster: Cluster) -> None:
    """Of four ranks one's engine stands still: the node is not ready, by that rank's number, until it goes on."""
    stands = {
        "deadlines": {"stall_s": 0.2},
        "cp": {"size": 4, "shared_kv": True},
        "model": {"name": "toy-dsa"},
    }
    await cluster.start(prefill=stands, decode={"model": {"name": "toy-dsa"}})
    third = cluster.ranks[cluster.prefill][2]
    third.works.clear()
    legs = cluster.start_both(prompt_of(80))
    await eventually(lambda: cluster.prefill.why_not_ready())
    for path in ("/readyz", "/health"):
        answer = await cluster.call(cluster.prefill, "GET", path)
        assert answer.status_code == 503
        reason = "rank 2: the transfer engine has not looked for work for 0.2 s"
        assert answer.json()["detail"] == reason
    assert (await cluster.call(cluster.prefill, "GET", "/livez")).status_code == 200
    third.works.set()
    await cluster.expect_local(legs)
    await eventually(lambda: not cluster.prefill.why_not_ready())
    await cluster.free()
    await cluster.prefill.context.transfers[3].close()
    assert cluster.prefill.why_not_ready() == "rank 3: the transfer engine has ended"


async def test_a_fault_in_one_hold_does_not_end_the_control_task(cluster: Cluster) -> None:
    """A hold whose clean-up raises is counted; the control task goes on to the next one."""
    await cluster.start()
    context, freed = cluster.decode.context, asyncio.Event()

    def broken() -> None:
        raise RuntimeError("broken")

    request = cluster.request(prompt_of(1))
    context.hold(request.room, "test", None, broken, 0.01)
    await eventually(lambda: cluster.decode.counters["task_faults"] == 1)
    context.hold(request.room, "test", None, freed.set, 0.01)
    await eventually(freed.is_set)
    assert cluster.decode.why_not_ready() is None


@pytest.mark.case("L4")
@pytest.mark.contract(134)
async def test_probes_are_answered_while_queues_hold_work(cluster: Cluster) -> None:
    """With requests waiting for pages and for a transfer, /health answers at once and opens no room."""
    await cluster.start()
    gate = cluster.decode.context.gate
    async with cluster.prefill.context.forwards.turn(timeout_s=10):
        first = cluster.start_both(prompt_of(40))
        await eventually(lambda: cluster.prefill.context.forwards.waiting == 1)
        pages = await gate.take(gate.cache.free_pages, timeout_s=1)
        second = cluster.start_both(prompt_of(40, salt=1))
        await eventually(lambda: gate.waiting == 1)
        before = [node.statistics()["rooms"] for node in cluster.nodes]
        for node in cluster.nodes:
            for path in ("/health", "/livez", "/readyz", "/stats", "/rooms", "/server_info", "/v1/models"):
                async with asyncio.timeout(10):
                    assert (await cluster.call(node, "GET", path)).status_code == 200
        assert [node.statistics()["rooms"] for node in cluster.nodes] == before
        gate.give(pages)
    await cluster.expect_local(first)
    await cluster.expect_local(second)
    await cluster.free()
    assert [node.statistics()["rooms"]["opened"] for node in cluster.nodes] == [2, 2]


_BAD = [
    b"",
    b"\x80\x04\x95\x0b\x00\x00\x00",
    b"{",
    b"[]",
    b"null",
    b'"\xff\xfe"',
    b'{"instance": 7}',
    b'{"instance": "x", "pages": "all", "slot": -1}',
    json.dumps({"reason": "x" * 5000}).encode(),
    b'{"instance": NaN, "generation": 1e400}',
    json.dumps({"role": "decode", "url": None, "ranks": []}).encode(),
    b"[" * 5000,
]
_ROUTES = [
    ("POST", "/v1/peer/handshake"),
    ("PUT", "/v1/peer/rooms/1"),
    ("POST", "/v1/peer/rooms/1/abort"),
    ("POST", "/v1/peer/rooms/1/ahead"),
    ("POST", "/v1/peer/rooms/1/complete"),
    ("POST", "/v1/peer/rooms/1/failed"),
    ("PUT", "/v1/peer/rooms/-1"),
    ("POST", "/v1/peer/rooms/99999999999999999999999/abort"),
]


@pytest.mark.contract(126)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_malformed_message_ends_no_task(cluster: Cluster, role: str) -> None:
    """Every peer route answers nonsense with 4xx: the control task lives and the next request is served."""
    await cluster.start()
    node = cluster.prefill if role == "prefill" else cluster.decode
    for method, path in _ROUTES:
        for body in _BAD:
            answer = await cluster.call(node, method, path, body)
            assert 400 <= answer.status_code < 500, (path, body[:40], answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
    assert node.counters["bad_messages"] > 0
    assert node._control is not None and not node._control.done()
    assert node.statistics()["rooms"]["opened"] == 0
    await cluster.serve(prompt_of(40))
    await cluster.free()


@pytest.mark.contract(126)
async def test_a_bad_answer_of_a_peer_fails_one_request(cluster: Cluster) -> None:
    """A peer that answers an abort or a handshake with nonsense costs the request at hand and no task."""
    await cluster.start()

    class Nonsense:
        async def send(self, method: str, url: str, message: object, *, timeout_s: float) -> dict[str, int]:
            return {"drained": 7}

        async def close(self) -> None:
            pass

    context = cluster.decode.context
    real, context.peers._client = context.peers._client, Nonsense()
    context.client = Nonsense()
    job = cluster.start_decode(cluster.request(prompt_of(40)))
    await job.answered.wait()
    assert job.life.reason is not None and job.life.reason.slug == "peer-fault"
    context.peers._client = context.client = real
    await cluster.serve(prompt_of(40, salt=1))
    await cluster.free()


async def test_a_stopping_node_fails_its_rooms_and_leaves_no_task(cluster: Cluster) -> None:
    """Stopping in the middle of a forward and a transfer ends both legs, and within the grace."""
    await cluster.start()
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(5)
    legs = cluster.start_both(prompt_of(40))
    await eventually(brake.reached.is_set)
    started_s = time.monotonic()
    stopping = asyncio.create_task(cluster.prefill.stop(grace_s=5))
    await asyncio.sleep(0.05)
    brake.release()
    mine, theirs = await legs.failed()
    await stopping
    assert time.monotonic() - started_s < 5
    assert isinstance(mine, NotReady) and mine.message == "the node is stopping"
    assert theirs is not None
    assert not cluster.prefill._tasks
