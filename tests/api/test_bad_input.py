"""Bad input over real processes: a typed problem with the right status, and free = initial."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import psutil
import pytest

from demo.cluster import Cluster, cluster, free_port
from tests.support.legs import body_for, both_legs, held, new_room, wait_free

JSON = {"content-type": "application/json"}
PEER_ROUTES = (
    ("POST", "/v1/peer/handshake"),
    ("PUT", "/v1/peer/rooms/1"),
    ("POST", "/v1/peer/rooms/1/abort"),
    ("POST", "/v1/peer/rooms/1/ahead"),
    ("POST", "/v1/peer/rooms/1/complete"),
    ("POST", "/v1/peer/rooms/1/failed"),
)
REQUEST_ROUTES = (("POST", "/generate"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill node and three decode nodes; the second has another page size, the third other digests."""
    flags = ["--model.name", "toy", "--prefill.max-input-tokens", "1024", "--prefill.chunk-tokens", "128"]
    own = ([], ["--cache.page-size", "32"], ["--transfer.digests", "full"])
    folder = tmp_path_factory.mktemp("nodes")
    with cluster(folder, flags=flags, decode_flags=own, router=False) as running:
        yield running


def require_problem(answer: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    """The answer is a problem document of that kind."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["type"] == f"urn:kvferry:problem:{slug}"
    assert document["status"] == status
    assert document["detail"]
    return document


async def require_serving(nodes: Cluster) -> None:
    """The next valid request works."""
    body = body_for(nodes.prefill[0], list(b"still here"), new_tokens=3)
    pair = await both_legs(nodes.prefill[0], nodes.decode[0], body)
    assert pair.decode.status_code == 200, pair.decode.text
    await wait_free(nodes.prefill[0], nodes.decode[0])


BAD_BODIES = {
    "pickle": pickle.dumps({"room": 7}),
    "truncated json": b'{"text": "x"',
    "not an object": b"[1, 2]",
    "bad utf-8": b'{"text": "\xff\xfe"}',
    "empty": b"",
    "wrong types": b'{"input_ids": "abc", "bootstrap_room": {}}',
}


@pytest.mark.case("O1")
@pytest.mark.contract(126)
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_bytes_on_every_route(nodes: Cluster, name: str) -> None:
    """Garbage on any route is refused and counted, and the next valid message works."""
    for node in (nodes.prefill[0], nodes.decode[0]):
        before = node.get("/stats")["counters"].get("bad_messages", 0)
        async with httpx.AsyncClient(base_url=node.url, timeout=10) as client:
            for method, path in (*PEER_ROUTES, *REQUEST_ROUTES):
                answer = await client.request(method, path, content=BAD_BODIES[name], headers=JSON)
                assert answer.status_code in (400, 422), (path, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
        counted = node.get("/stats")["counters"]["bad_messages"] - before
        assert counted == len(PEER_ROUTES) + len(REQUEST_ROUTES)
    await require_serving(nodes)


@pytest.mark.case("O1")
async def test_frames_too_large(nodes: Cluster) -> None:
    """A 10 MB body is refused by its declared length, and by its real one when it declares none."""
    node = nodes.prefill[0]
    big = b" " * (10 << 20)

    async def undeclared() -> Any:
        for at in range(0, len(big), 1 << 20):
            yield big[at : at + (1 << 20)]

    async with httpx.AsyncClient(base_url=node.url, timeout=30) as client:
        for method, path in (*PEER_ROUTES, *REQUEST_ROUTES):
            require_problem(await client.request(method, path, content=big, headers=JSON), 413, "too-large")
        answer = await client.post("/generate", content=undeclared(), headers=JSON)
        require_problem(answer, 413, "too-large")
    await require_serving(nodes)


@pytest.mark.case("O1")
async def test_bytes_that_are_no_http(nodes: Cluster) -> None:
    """Raw pickle bytes on the port end that connection only."""
    node = nodes.decode[0]
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as raw:
        raw.sendall(pickle.dumps(list(range(100))))
        assert b"200" not in raw.recv(4096)
    await require_serving(nodes)


@pytest.mark.case("O1")
def test_loopback_only(nodes: Cluster) -> None:
    """Every listening socket of a node, the transfer engine's included, serves 127.0.0.1 and nothing else."""
    for node in (nodes.prefill[0], nodes.decode[0]):
        connections = psutil.Process(node.pid).net_connections("tcp")
        ports = [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]
        assert len(ports) >= 3, "http, engine rpc and engine data"
        for port in ports:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            with pytest.raises(OSError, match=r"timed out|refused"):
                socket.create_connection(("127.0.0.2", port), timeout=0.3)


@pytest.mark.case("B1")
async def test_prompt_over_the_limit(nodes: Cluster) -> None:
    """Prefill refuses a prompt over its limit, and decode ends with the same reason and no token."""
    body = body_for(nodes.prefill[0], [65] * 1025)
    pair = await both_legs(nodes.prefill[0], nodes.decode[0], body, timeout_s=10)
    require_problem(pair.prefill, 413, "prompt-too-long")
    require_problem(pair.decode, 413, "prompt-too-long")
    await wait_free(nodes.prefill[0], nodes.decode[0])


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"input_ids": []}, "invalid-request"),
        ({"input_ids": [9999]}, "invalid-request"),
        ({"text": "both"}, "invalid-request"),
        ({"bootstrap_room": None}, "invalid-request"),
        ({"bootstrap_room": 2**64}, "invalid-request"),
        ({"sampling_params": {"n": 2}}, "invalid-request"),
        ({"sampling_params": {"regex": "a+"}}, "invalid-request"),
    ],
)
async def test_requests_that_cannot_be_served(nodes: Cluster, change: dict[str, Any], slug: str) -> None:
    """Each leg answers an unservable request with 422 and says what is wrong."""
    body = body_for(nodes.prefill[0], [65, 66]) | change
    pair = await both_legs(nodes.prefill[0], nodes.decode[0], body, timeout_s=10)
    require_problem(pair.decode, 422, slug)
    if pair.prefill.status_code == 502:
        # decode was quicker, and has told prefill what it found
        require_problem(pair.prefill, 502, "peer-aborted")
        assert pair.prefill.json()["detail"] == pair.decode.json()["detail"]
    else:
        require_problem(pair.prefill, 422, slug)
    await wait_free(nodes.prefill[0], nodes.decode[0])
    await require_serving(nodes)


@pytest.mark.case("B4")
async def test_decode_refuses_what_prefill_accepts(nodes: Cluster) -> None:
    """A request that only decode refuses ends at prefill within a second, holding nothing."""
    body = body_for(nodes.prefill[0], [65, 66])
    refused = body | {"sampling_params": {"max_new_tokens": -3}}
    pair = await both_legs(nodes.prefill[0], nodes.decode[0], body, decode_body=refused, timeout_s=10)
    require_problem(pair.decode, 422, "invalid-request")
    require_problem(pair.prefill, 502, "peer-aborted")
    await wait_free(nodes.prefill[0], nodes.decode[0])


async def test_unknown_rooms(nodes: Cluster) -> None:
    """Messages about rooms that nobody has are 404, and leave no entry."""
    room = new_room()
    instance = nodes.prefill[0].get("/stats")["instance"]
    nothing = {"rank": 0, "positions": [], "sent_bytes": 0}
    complete = {"instance": instance, "generation": 1, "sent_bytes": 0, "ranks": [nothing]}
    failed = {"instance": instance, "generation": 1, "slug": "x", "reason": "y"}
    async with httpx.AsyncClient(base_url=nodes.decode[0].url) as client:
        require_problem(
            await client.post(f"/v1/peer/rooms/{room}/complete", json=complete), 404, "unknown-room"
        )
        require_problem(await client.post(f"/v1/peer/rooms/{room}/failed", json=failed), 404, "unknown-room")
        require_problem(await client.post(f"/abort/{room}"), 404, "unknown-room")
        require_problem(await client.post("/abort/seven"), 422, "invalid-request")
    assert not any(held(nodes.decode[0]).values())


@pytest.mark.contract(135)
@pytest.mark.case("I1", "C14")
async def test_peer_of_another_page_size(nodes: Cluster) -> None:
    """The handshake shows the parts that differ, both legs fail, and both nodes stay up."""
    body = body_for(nodes.prefill[0], [65] * 70)
    pair = await both_legs(nodes.prefill[0], nodes.decode[1], body, timeout_s=20)
    document = require_problem(pair.decode, 409, "fingerprint-mismatch")
    assert "page_size" in document["detail"]
    assert pair.prefill.status_code >= 400
    await wait_free(nodes.prefill[0], nodes.decode[1])
    await require_serving(nodes)


@pytest.mark.contract(135)
async def test_peer_of_another_digest_mode(nodes: Cluster) -> None:
    """A difference in the digest mode alone is a different contract."""
    body = body_for(nodes.prefill[0], [65])
    pair = await both_legs(nodes.prefill[0], nodes.decode[2], body, timeout_s=20)
    document = require_problem(pair.decode, 409, "fingerprint-mismatch")
    assert "digest_mode: ours" in document["detail"]


@pytest.mark.case("F6")
async def test_dead_peer(nodes: Cluster) -> None:
    """A request to a prefill node that is not there fails with 503; another one is unaffected."""
    body = body_for(nodes.prefill[0], [65, 66]) | {"bootstrap_port": free_port()}
    async with httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(f"{nodes.decode[0].url}/generate", json=body)
    require_problem(answer, 503, "peer-unavailable")
    assert answer.headers["retry-after"]
    await require_serving(nodes)


async def test_page_list_of_the_wrong_length(nodes: Cluster) -> None:
    """A destination whose pages do not fit the prompt fails that room with a page summary."""
    prefill, decode = nodes.prefill[0], nodes.decode[0]
    await require_serving(nodes)  # both have shaken hands
    room = new_room()
    message = {
        "instance": decode.get("/stats")["instance"],
        "prefill_instance": prefill.get("/stats")["instance"],
        "prompt_tokens": 130,
        "first_position": 0,
        "pages": [1, 2],
        "slot": 0,
        "generation": 1 << 40,
    }
    async with httpx.AsyncClient(timeout=20) as client:
        accepted = await client.put(f"{prefill.url}/v1/peer/rooms/{room}", json=message)
        assert accepted.status_code == 202
        answer = await client.post(f"{prefill.url}/generate", json=body_for(prefill, [65] * 130, room=room))
        document = require_problem(answer, 409, "page-mismatch")
        assert "need 3 pages" in document["detail"]
        assert "[1..2] (2)" in document["detail"]
        outside = message | {"pages": [1, 2, 10_000]}
        answer = await client.put(f"{prefill.url}/v1/peer/rooms/{new_room()}", json=outside)
        require_problem(answer, 409, "page-mismatch")
    await wait_free(prefill, decode)


@pytest.mark.case("E3")
async def test_two_requests_with_one_room(nodes: Cluster) -> None:
    """While room 7 is live, a second request for it gets a 4xx, and the first one completes."""
    prefill, decode = nodes.prefill[0], nodes.decode[0]
    body = body_for(prefill, [65] * 700)
    first: dict[str, httpx.Response] = {}

    async with httpx.AsyncClient(timeout=60) as client, anyio.create_task_group() as group:

        async def send() -> None:
            first["answer"] = await client.post(f"{decode.url}/generate", json=body)

        group.start_soon(send)
        while not decode.get("/rooms")["live"]:
            await anyio.sleep(0.01)
        answer = await client.post(f"{decode.url}/generate", json=body)
        require_problem(answer, 409, "room-in-use")
        assert (await client.post(f"{prefill.url}/generate", json=body)).status_code == 200
    assert first["answer"].status_code == 200, first["answer"].text
    await wait_free(prefill, decode)


@pytest.mark.contract(134)
@pytest.mark.case("L4")
def test_probes_leave_nothing(nodes: Cluster) -> None:
    """Health, readiness, statistics and model routes answer, and open no room."""
    for node in (nodes.prefill[0], nodes.decode[0]):
        opened = node.get("/stats")["rooms"]["opened"]
        for path in ("/health", "/livez", "/readyz", "/rooms", "/fingerprint", "/server_info", "/model_info"):
            assert node.get(path)
        assert node.get("/v1/models")["data"][0]["id"] == "toy"
        assert node.get("/stats")["rooms"]["opened"] == opened


@pytest.mark.case("O2")
async def test_a_live_route_is_not_overwritten(nodes: Cluster) -> None:
    """A known instance that claims another place is refused with 409, and the table is unchanged."""
    await require_serving(nodes)
    prefill, decode = nodes.prefill[0], nodes.decode[0]
    spoofed = {
        "instance": decode.get("/stats")["instance"],
        "role": "decode",
        "url": "http://127.0.0.1:9",
        "capabilities": ["drain-ack", "page-digest-xxh3", "absolute-positions"],
        "fingerprint": prefill.get("/fingerprint")["parts"],
        "ranks": [
            {
                "rank": 0,
                "session": "127.0.0.1:9",
                "buffers": [
                    {
                        "owner": "target",
                        "kind": "kv",
                        "layer_ids": list(range(12)),
                        "item_bytes": 4096,
                        "dtype": "uint8",
                        "base": 0,
                        "layer_stride": 4096,
                        "pages": 1,
                    }
                ],
                "slots_base": 0,
                "slots_bytes": 512,
            }
        ],
    }
    before = prefill.get("/stats")["peers"]["known"]
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{prefill.url}/v1/peer/handshake", json=spoofed)
    require_problem(answer, 409, "room-in-use")
    assert prefill.get("/stats")["peers"]["known"] == before
    await require_serving(nodes)


async def test_streams_end_truthfully(nodes: Cluster) -> None:
    """A stream of a good request ends with [DONE]; a refused one has its status instead of a stream."""
    prefill, decode = nodes.prefill[0], nodes.decode[0]
    good = body_for(prefill, list(b"stream me"), new_tokens=5, stream=True)
    pair = await both_legs(prefill, decode, good)
    events = [line.removeprefix("data: ") for line in pair.decode.text.splitlines() if line]
    assert len(events) == 6
    assert events[-1] == "[DONE]"
    bad = body_for(prefill, [65] * 1025, stream=True)
    pair = await both_legs(prefill, decode, bad, timeout_s=10)
    require_problem(pair.decode, 413, "prompt-too-long")
    await wait_free(prefill, decode)
