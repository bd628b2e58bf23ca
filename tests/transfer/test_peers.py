"""The handshake: who is served, who is refused, and what a restart does. Clients and engines are fakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.core.fingerprint import build_fingerprint
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.slots import SlotFormat
from app.errors import FingerprintMismatch, KvferryError, PageMismatch, PeerFault, PeerRefused, RoomInUse
from app.transfer.base import Region
from app.transfer.blocks import BufferLayout, Layouts
from app.transfer.messages import CAPABILITIES, BufferPlace, Introduction, Message, RankEndpoint
from app.transfer.peers import Peers


def geometry(
    *, page_size: int = 64, dtype: str = "bfloat16", state: tuple[int, ...] = (0, 1)
) -> CacheGeometry:
    return CacheGeometry(
        page_size=page_size,
        buffers=(
            BufferSpec(owner="target", kind="kv", layer_ids=(0, 1, 2), item_bytes=1024, dtype=dtype),
            BufferSpec(owner="target", kind="index", layer_ids=state, item_bytes=12, dtype="uint8"),
        ),
    )


def layouts(built: CacheGeometry, base: int) -> Layouts:
    return {
        b.name: BufferLayout(spec=b, base=base + i * (1 << 20), layer_stride=16 * b.item_bytes, pages=16)
        for i, b in enumerate(built.buffers)
    }


def introduction(
    role: Any,
    name: str,
    *,
    built: CacheGeometry | None = None,
    told: CacheGeometry | None = None,
    base: int = 1 << 30,
    url: str = "",
    capabilities: tuple[str, ...] = CAPABILITIES,
) -> Introduction:
    """`told` is the geometry of the fingerprint when it is not that of the buffers."""
    built = built or geometry()
    parts = build_fingerprint(
        geometry=told or built,
        model="toy",
        model_revision="1",
        compute_dtype="bfloat16",
        draft=None,
        digest_mode="full",
        slots=SlotFormat(),
        hidden_size=64,
    ).parts
    places = tuple(BufferPlace.of(layout) for layout in layouts(built, base).values())
    return Introduction(
        instance=name * 8,
        role=role,
        url=url or f"http://{name}",
        capabilities=capabilities,
        fingerprint=dict(parts),
        ranks=(RankEndpoint(rank=0, session=f"{name}:1", buffers=places, slots_base=base, slots_bytes=512),),
    )


@dataclass(eq=False)
class Sessions:
    """The part of an engine that peers use."""

    known: dict[str, list[Region]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def add_peer(self, session: str, regions: Sequence[Region]) -> None:
        self.known[session] = list(regions)

    def drop_peer(self, session: str) -> None:
        self.known.pop(session, None)
        self.dropped.append(session)


@dataclass(eq=False)
class Wire:
    """Answers each url with what a test has put there."""

    answers: dict[str, Any] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)

    async def send(self, method: str, url: str, message: Message, *, timeout_s: float) -> dict[str, Any]:
        self.sent.append(url)
        answer = self.answers[url.removesuffix("/v1/peer/handshake")]
        if isinstance(answer, KvferryError):
            raise answer
        found: dict[str, Any] = answer.model_dump(mode="json") if isinstance(answer, Message) else answer
        return found

    async def close(self) -> None: ...


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def peers(wire: Wire, sessions: Sessions) -> Peers:
    """Those of a decode node."""
    me = introduction("decode", "d", base=1 << 20)
    return Peers(
        lambda: me,
        lambda: layouts(geometry(), 1 << 20),
        wire,
        [sessions],  # type: ignore[list-item]
        timeout_s=1.0,
    )


async def test_a_peer_is_met_once(peers: Peers, wire: Wire, sessions: Sessions) -> None:
    """The first contact shakes hands and makes the peer's memory known; later ones ask nobody."""
    wire.answers["http://p"] = introduction("prefill", "p")
    peer = await peers.meet("http://p")
    assert await peers.meet("http://p") is peer
    assert peers.of("p" * 8) is peer
    assert wire.sent == ["http://p/v1/peer/handshake"]
    assert [r.name for r in sessions.known["p:1"]] == ["target.kv", "target.index", "slots"]
    assert (len(peers), peers.handshakes, peers.refused) == (1, 1, 0)


REFUSED = [
    pytest.param(
        introduction("prefill", "p", built=geometry(page_size=16)),
        FingerprintMismatch,
        "page_size: ours 64, theirs 16",
        marks=[pytest.mark.contract(135), pytest.mark.case("I1"), pytest.mark.case("C14")],
        id="page-size",
    ),
    pytest.param(
        introduction("prefill", "p", built=geometry(dtype="float8_e4m3fn")),
        FingerprintMismatch,
        "buffer.target.kv.dtype: ours bfloat16, theirs float8_e4m3fn",
        marks=[pytest.mark.contract(135), pytest.mark.case("I2")],
        id="dtype",
    ),
    pytest.param(
        introduction("prefill", "p", built=geometry(state=(0, 2)), told=geometry()),
        PageMismatch,
        "buffer target.index differs",
        marks=pytest.mark.case("D4"),
        id="state-ids-that-are-not-those-told",
    ),
    pytest.param(
        introduction("prefill", "p", capabilities=("absolute-positions",)),
        PeerRefused,
        "the peer lacks drain-ack: pages could not be freed safely",
        marks=pytest.mark.case("A4"),
        id="no-drain-acknowledgement",
    ),
    pytest.param(introduction("decode", "p"), PeerRefused, "both nodes are decode nodes", id="role"),
]


@pytest.mark.parametrize(("other", "kind", "message"), REFUSED)
async def test_a_peer_that_cannot_be_served_is_refused(
    peers: Peers, wire: Wire, sessions: Sessions, other: Introduction, kind: type, message: str
) -> None:
    """Whoever asks first, the refusal shows the reason, nothing is remembered, and a good peer still works."""
    wire.answers["http://p"] = other
    with pytest.raises(kind) as met:
        await peers.meet("http://p")
    with pytest.raises(kind) as welcomed:
        peers.welcome(other)
    assert message in met.value.message
    assert message in welcomed.value.message
    assert (len(peers), peers.refused, sessions.known) == (0, 2, {})
    wire.answers["http://p"] = introduction("prefill", "p")
    assert (await peers.meet("http://p")).url == "http://p"


async def test_a_stranger_is_refused(peers: Peers) -> None:
    """An instance that has not shaken hands is told to do so."""
    with pytest.raises(PeerRefused, match="has not shaken hands with this node"):
        peers.of("x" * 8)


@pytest.mark.contract(126)
@pytest.mark.parametrize("answer", [{}, {"instance": 7}, {"instance": "p" * 8, "role": "prefill"}])
async def test_a_bad_introduction_is_the_peers_fault(peers: Peers, wire: Wire, answer: Any) -> None:
    """A malformed answer to a handshake is a peer fault, and the node remembers nothing of it."""
    wire.answers["http://p"] = answer
    with pytest.raises(PeerFault, match="introduces itself badly"):
        await peers.meet("http://p")
    assert len(peers) == 0


async def test_a_live_instance_keeps_its_routes(peers: Peers, sessions: Sessions) -> None:
    """A known instance that claims another place is refused, and the table is unchanged."""
    first = introduction("prefill", "p")
    peers.welcome(first)
    before = dict(sessions.known)
    with pytest.raises(RoomInUse, match="its routes stay as they are"):
        peers.welcome(introduction("prefill", "p", base=1 << 31))
    assert sessions.known == before
    assert peers.of("p" * 8).introduction == first
    peers.welcome(first)
    assert peers.handshakes == 1


@pytest.mark.case("J4")
async def test_a_restarted_peer_replaces_its_old_self(peers: Peers, wire: Wire, sessions: Sessions) -> None:
    """A new instance at a known url drops the old one and its memory; another peer is unaffected."""
    wire.answers |= {"http://p": introduction("prefill", "p"), "http://o": introduction("prefill", "o")}
    old, other = await peers.meet("http://p"), await peers.meet("http://o")
    peers.welcome(introduction("prefill", "q", url="http://p"))
    assert (await peers.meet("http://p")).instance == "q" * 8
    with pytest.raises(PeerRefused):
        peers.of(old.instance)
    assert sessions.dropped == ["p:1"]
    assert set(sessions.known) == {"q:1", "o:1"}
    assert peers.of(other.instance) is other
    assert len(peers) == 2


async def test_a_forgotten_peer_shakes_hands_again(peers: Peers, wire: Wire, sessions: Sessions) -> None:
    """Forgetting drops the peer's memory, once; the next contact is a new handshake."""
    wire.answers["http://p"] = introduction("prefill", "p")
    peer = await peers.meet("http://p")
    peers.forget(peer)
    peers.forget(peer)
    assert (len(peers), sessions.dropped) == (0, ["p:1"])
    await peers.meet("http://p")
    assert len(wire.sent) == 2
