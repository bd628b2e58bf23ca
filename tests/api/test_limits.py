"""What one client or peer can take of a node: hosts that it names, rooms, pages, answers."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.errors import HostDenied, InvalidRequest, PeerFault, PeerRefused, PeerUnavailable, TooManyRooms
from app.hosts import AllowedHosts, Rule, allowed_hosts, base_url, networks_of
from app.transfer.client import HttpControlClient
from app.transfer.messages import Abort, Destination
from tests.api.test_bad_input import require_problem
from tests.conftest import Track
from tests.support.harness import PAGE, Cluster, eventually, prompt_of


@pytest.fixture
async def cluster(track: Track) -> AsyncIterator[Cluster]:
    made: Cluster = track(Cluster())
    yield made
    await made.close()


def rules(*entries: str) -> AllowedHosts:
    return AllowedHosts(Rule.parse(entry) for entry in entries)


# ---------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("10.1.0.0/16", "10.1.2.3", 80, True),
        ("10.1.0.0/16", "10.2.0.1", 80, False),
        ("10.1.2.3", "10.1.2.3", 80, True),
        ("10.1.2.3", "10.1.2.4", 80, False),
        ("10.1.2.3:8001", "10.1.2.3", 8001, True),
        ("10.1.2.3:8001", "10.1.2.3", 8002, False),
        ("10.1.2.3", "::ffff:10.1.2.3", 80, True),
        ("10.1.2.3", "::ffff:10.1.2.4", 80, False),
        ("fd00::/8", "fd12::1", 80, True),
        ("fd00::/8", "[fd12::1]", 80, True),
        ("[fd00::/8]:8001", "fd12::1", 8002, False),
        ("prefill-0", "prefill-0", 80, True),
        ("prefill-0", "PREFILL-0", 80, True),
        ("prefill-0:8001", "prefill-0", 8001, True),
        ("prefill-0:8001", "prefill-0", 8002, False),
        ("prefill-0", "prefill-1", 80, False),
        ("prefill-0", "prefill-0.example", 80, False),
        ("prefill-0", "127.0.0.1", 80, False),
    ],
)
def test_rules(entry: str, host: str, port: int, allowed: bool) -> None:
    """A host is allowed by its name or network, and on the port that goes with it."""
    if allowed:
        rules("192.0.2.0/24:1", entry).require(host, port) if "." in host else rules(entry).require(
            host, port
        )
        return
    with pytest.raises(HostDenied, match=r"limits\.bootstrap_hosts") as denied:
        rules(entry).require(host, port)
    assert denied.value.status == 403


@pytest.mark.parametrize(
    "host",
    ["2130706433", "127.1", "0x7f000001", "0x7f.1", "0177.0.0.1", "1.2.3.4.5", "a@b", "a/b", "a?b", "a#b",
     "a:80", "a b", "", "a\n", "é", "[::1", "-a", "a" * 254, "::1%lo", "//a", "a\\b"],
)  # fmt: skip
def test_what_is_no_host(host: str) -> None:
    """An address in a spelling that only some readers know, and whatever would change a url, is refused as input."""
    with pytest.raises(InvalidRequest):
        base_url("http", host, 80)
    with pytest.raises(InvalidRequest):
        rules("0.0.0.0/0", "::/0").require(host, 80)


@pytest.mark.parametrize(
    "entry", ["10.0.0.1/8", "a/b", "10.0.0.0/33", "a:0", "a:65536", "a:b", "[::1", "127.1", "", "a b"]
)
def test_bad_rules(entry: str) -> None:
    """An entry that is no name, address or network is refused at the start."""
    with pytest.raises(ValueError, match=r"is no|has no"):
        Rule.parse(entry)


def test_default_rules() -> None:
    """A node on loopback is told of loopback only; any other one of the networks that it listens on, never loopback."""
    own = allowed_hosts((), "127.0.0.1")
    own.require("127.0.0.9", 1)
    own.require("::1", 1)
    own.require("localhost", 1)
    for host in ("10.0.0.1", "192.0.2.1", "169.254.169.254"):
        with pytest.raises(HostDenied):
            own.require(host, 1)
    for network in networks_of("0.0.0.0"):
        assert not network.overlaps(
            ipaddress.ip_network("127.0.0.0/8" if network.version == 4 else "::1/128")
        )
        assert network.prefixlen > 0
    with pytest.raises(HostDenied):
        allowed_hosts((), "0.0.0.0").require("127.0.0.1", 1)
    with pytest.raises(HostDenied):
        allowed_hosts((), "0.0.0.0").require("169.254.169.254", 1)


@pytest.mark.case("O2")
@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_decode_calls_no_other_host(cluster: Cluster, route: str) -> None:
    """A request that names a foreign host is 403, opens no room, and not one message leaves the node."""
    await cluster.start()
    opened = cluster.decode_rooms.table.opened
    wanted = {"bootstrap_port": 80, "bootstrap_room": 7, "input_ids": [1], "prompt": [1]}
    wanted["messages"] = [{"role": "user", "content": "x"}]
    for host, status, slug in (
        ("169.254.169.254", 403, "host-denied"),
        ("::ffff:10.0.0.1", 403, "host-denied"),
        ("a@127.0.0.1", 422, "invalid-request"),
        ("2130706433", 422, "invalid-request"),
    ):
        body = json.dumps(wanted | {"bootstrap_host": host}).encode()
        require_problem(await cluster.call(cluster.decode, "POST", route, body), status, slug)
        # and neither does the word that a refused request gets
        body = json.dumps(wanted | {"bootstrap_host": host, "stop": 7, "sampling_params": 3}).encode()
        require_problem(await cluster.call(cluster.decode, "POST", route, body), 422, "invalid-request")
    assert cluster.wire.log == []
    assert cluster.decode_rooms.table.opened == opened
    assert not cluster.decode._tasks


# ---------------------------------------------------------------------- the client that calls peers


@asynccontextmanager
async def server(answer: Callable[[bytes], bytes]) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A port on loopback that gives one answer a connection, and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(asked[-1]))
        writer.close()

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with made:
        yield made.sockets[0].getsockname()[1], asked


def reply(status: str, body: bytes, *more: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *more, "", ""]
    return "\r\n".join(head).encode() + body


async def send(client: HttpControlClient, url: str) -> dict[str, Any]:
    try:
        return await client.send("POST", url, Abort(reason="x"), timeout_s=5)
    finally:
        await client.close()


async def test_names_count_by_their_addresses() -> None:
    """A name that resolves into an allowed network is called; another one gets no connection, so no token."""
    async with server(lambda _: reply("200 OK", b'{"fine": 1}')) as (port, asked):
        url = f"http://localhost:{port}/v1/peer/handshake"
        assert await send(HttpControlClient(hosts=rules("127.0.0.0/8", "::1")), url) == {"fine": 1}
        assert await send(HttpControlClient(hosts=rules("localhost")), url) == {"fine": 1}
        assert len(asked) == 2
        for denied in (rules("10.0.0.0/8"), rules("prefill-0"), rules("127.0.0.1:1", "[::1]:1")):
            with pytest.raises(HostDenied):
                await send(HttpControlClient(hosts=denied, token="secret"), url)
        with pytest.raises(HostDenied):
            await send(HttpControlClient(hosts=rules("10.0.0.0/8")), f"http://127.0.0.1:{port}/")
        assert len(asked) == 2


async def test_redirects_are_not_followed() -> None:
    """A peer that answers with a redirect is refused, and where it points to hears nothing."""
    async with server(lambda _: reply("200 OK", b"{}")) as (target, heard):
        location = f"Location: http://127.0.0.1:{target}/"
        async with server(lambda _: reply("307 Go", b"{}", location)) as (port, asked):
            with pytest.raises(PeerRefused, match="307"):
                await send(HttpControlClient(token="secret"), f"http://127.0.0.1:{port}/")
    assert len(asked) == 1
    assert heard == []


@pytest.mark.parametrize("body", [b"{" * 5000, b"[" * 100_000, b"\xff\xfe", b"", b"[1]", b"7"])
async def test_answers_that_are_no_object(body: bytes) -> None:
    """Whatever a peer answers in place of a JSON object is that peer's fault."""
    async with server(lambda _: reply("200 OK", body)) as (port, _):
        with pytest.raises((PeerFault, PeerUnavailable)):
            await send(HttpControlClient(), f"http://127.0.0.1:{port}/")


async def test_answers_too_large() -> None:
    """An answer over the limit is given up after as many bytes."""
    async with server(lambda _: reply("200 OK", b" " * 70_000 + b"{}")) as (port, _):
        url = f"http://127.0.0.1:{port}/"
        with pytest.raises(PeerFault, match="more than 65536 bytes"):
            await send(HttpControlClient(most_bytes=65_536), url)
        assert await send(HttpControlClient(most_bytes=80_000), url) == {}


# ---------------------------------------------------------------------- rooms and pages


async def test_rooms_of_one_peer_at_prefill(cluster: Cluster) -> None:
    """A decode node over its share gets 429 with Retry-After, told to its client, while another one is served."""
    await cluster.start(prefill={"limits": {"rooms_per_peer": 1}})
    other = await cluster.add("decode")
    cluster.writer.hold()
    first = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    second = cluster.start_both(prompt_of(40, salt=1))
    mine, theirs = await second.failed()
    assert isinstance(theirs, TooManyRooms)
    assert (theirs.status, theirs.retry_after_s) == (429, 1)
    assert "limits.rooms_per_peer" in theirs.message
    assert mine is not None
    third = cluster.start_both(prompt_of(40, salt=2), decode=other)
    cluster.writer.let_go()
    await cluster.expect_local(first)
    await third.answered()
    await cluster.free()


async def test_rooms_of_one_peer_at_decode(cluster: Cluster) -> None:
    """Requests that all name one prefill node get 429 over its share."""
    await cluster.start(decode={"limits": {"rooms_per_peer": 1}})
    cluster.writer.hold()
    first = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    port = int(cluster.prefill.url.rpartition(":")[2])
    body = {"input_ids": [1, 2], "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 9}
    answer = await cluster.call(cluster.decode, "POST", "/generate", json.dumps(body).encode())
    require_problem(answer, 429, "too-many-rooms")
    assert answer.headers["retry-after"] == "1"
    cluster.writer.let_go()
    await cluster.expect_local(first)
    await cluster.free()


async def test_more_pages_than_a_prompt_can_have(cluster: Cluster) -> None:
    """A list of more pages than the model has positions is refused before it is kept for a request to come."""
    await cluster.start()
    await cluster.serve(prompt_of(40))
    cluster.prefill.context.engine.max_positions = 4 * PAGE
    message = Destination(
        instance=cluster.decode.instance,
        prefill_instance=cluster.prefill.instance,
        prompt_tokens=4 * PAGE,
        first_position=0,
        pages=tuple(range(5)),
        slot=0,
        generation=1 << 40,
    )
    assert await cluster.post(cluster.prefill, "/v1/peer/rooms/9", message, "PUT") == (409, "page-mismatch")
    assert len(cluster.prefill_rooms.table) == 0
    await cluster.free()
