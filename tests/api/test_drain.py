"""SIGTERM over real processes: no new work, live rooms finish or are aborted by protocol, and the exit is 0."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import psutil
import pytest

from demo.cluster import Cluster, NodeProcess, cluster
from tests.api.test_bad_input import require_problem
from tests.support.harness import Cluster as InProcess
from tests.support.harness import eventually, prompt_of
from tests.support.legs import Pair, body_for, both_legs, wait_free

LONG = list(range(250)) * 4


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three prefill nodes whose forwards take a second or two, and two decode nodes; each test stops its own."""
    flags = ["--model.name", "toy", "--prefill.max-input-tokens", "1024", "--prefill.chunk-tokens", "128"]
    slow = ["--model.layer-delay-s", "0.02"]
    impatient = [*slow, "--deadlines.shutdown-s", "0.1"]
    own = (slow, impatient, impatient)
    folder = tmp_path_factory.mktemp("nodes")
    with cluster(folder, flags=flags, prefill_flags=own, decode_flags=([], []), router=False) as running:
        yield running


def ended(node: NodeProcess, *, within_s: float = 30) -> int:
    """The exit status of a node that is about to end."""
    return node._child.wait(within_s)


async def until_live(*nodes: NodeProcess) -> None:
    with anyio.fail_after(30):
        while not all(node.get("/rooms")["live"] for node in nodes):
            await anyio.sleep(0.01)


async def draining(
    prefill: NodeProcess, decode: NodeProcess, stopped: NodeProcess, *, asked: bool = True
) -> tuple[Pair, list[Any]]:
    """A long request whose one node gets SIGTERM meanwhile; both its answers, and what others were told then."""
    found: list[Any] = []
    told: list[Any] = []

    async def request() -> None:
        found.append(await both_legs(prefill, decode, body_for(prefill, LONG), timeout_s=60))

    async with anyio.create_task_group() as group:
        group.start_soon(request)
        await until_live(prefill, decode)
        psutil.Process(stopped.pid).send_signal(signal.SIGTERM)
        if asked:
            told += await answers(stopped, body_for(prefill, [65]))
    return found[0], told


async def answers(stopped: NodeProcess, body: dict[str, Any]) -> list[httpx.Response]:
    """What a node says of its health while it drains, and to a new request."""
    async with httpx.AsyncClient(base_url=stopped.url, timeout=10) as client:
        with anyio.fail_after(10):
            while (ready := await client.get("/readyz")).status_code == 200:
                await anyio.sleep(0.01)
        return [ready, await client.get("/livez"), await client.post("/generate", json=body)]


async def test_live_rooms_finish(nodes: Cluster) -> None:
    """A node that is told to stop is not ready, refuses new work with Retry-After, ends its rooms well, and exits 0."""
    prefill, decode = nodes.prefill[0], nodes.decode[1]
    for stopped, other in ((decode, prefill), (prefill, nodes.decode[0])):
        pair, told = await draining(prefill, decode if stopped is decode else other, stopped)
        ready, live, refused = told
        assert require_problem(ready, 503, "not-ready")["detail"] == "the node is draining"
        assert live.status_code == 200
        require_problem(refused, 503, "not-ready")
        assert refused.headers["retry-after"] == "1"
        assert (pair.prefill.status_code, pair.decode.status_code) == (200, 200), pair.decode.text
        assert pair.decode.json()["meta_info"]["completion_tokens"] == 8
        assert ended(stopped) == 0
        log = stopped.log.read_text()
        assert '"node.stopped"' in log and '"node.rooms_left"' not in log
        await wait_free(other)


async def test_what_does_not_finish_is_aborted(nodes: Cluster) -> None:
    """After the set time rooms fail by protocol: both clients are told, pages come back by proof, the exit is 0."""
    prefill, decode = nodes.prefill[1], nodes.decode[0]
    pair, _ = await draining(prefill, decode, prefill, asked=False)
    assert require_problem(pair.prefill, 503, "not-ready")["detail"] == "the node is stopping"
    assert require_problem(pair.decode, 503, "not-ready")["detail"] == "the node is stopping"
    assert ended(prefill) == 0
    await wait_free(decode)
    assert decode.get("/stats")["holds_expired"] == 0


async def test_a_second_signal_ends_it_at_once(nodes: Cluster) -> None:
    """A node that is draining ends by the second SIGTERM, as if it handled none, and decode survives that."""
    prefill, decode = nodes.prefill[2], nodes.decode[0]
    process = psutil.Process(prefill.pid)
    found: list[Any] = []

    async def leg(node: NodeProcess, body: Any) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            try:
                found.append(await client.post(f"{node.url}/generate", json=body))
            except httpx.HTTPError:
                found.append(None)

    async with anyio.create_task_group() as group:
        body = body_for(prefill, LONG)
        group.start_soon(leg, prefill, body)
        group.start_soon(leg, decode, body)
        await until_live(prefill, decode)
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(10):
            while '"node.draining"' not in prefill.log.read_text():
                await anyio.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        started_s = time.monotonic()
        assert ended(prefill) == -signal.SIGTERM
        assert time.monotonic() - started_s < 5
        # nobody is left to say that it has drained: the room waits for its deadline, its client does not
        async with httpx.AsyncClient() as client:
            for record in decode.get("/rooms")["live"]:
                await client.post(f"{decode.url}/abort/{record['room']}")
    assert any(answer is not None and answer.status_code >= 400 for answer in found)
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{decode.url}/livez")).status_code == 200


async def test_parked_rooms_end_and_new_ones_are_refused() -> None:
    """A prefill node that begins to drain gives up pages that wait for their request, and tells decode at once."""
    made = await InProcess().start()
    try:
        await made.serve(prompt_of(40))
        waiting = made.start_decode(made.request(prompt_of(40, salt=1)))
        await eventually(lambda: len(made.prefill_rooms.table) == 1)
        assert await made.prefill.drain(finish_s=5)
        await waiting.answered.wait()
        assert waiting.life.reason is not None
        assert (waiting.life.reason.slug, waiting.life.reason.message) == (
            "not-ready",
            "the node is draining",
        )
        late = made.start_decode(made.request(prompt_of(40, salt=2)))
        await late.answered.wait()
        assert late.life.reason is not None and late.life.reason.slug == "not-ready"
        await made.free()
        drivers = made.ranks[made.prefill]
        assert all(driver.regions for driver in drivers)
        await made.prefill.stop()
        assert not any(driver.regions for driver in drivers), "memory is still registered"
    finally:
        await made.close()
    made.check_integrity()
