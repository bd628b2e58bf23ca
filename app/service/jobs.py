"""What both legs of a request have in common: a room, a lifecycle, a scope that its failure cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anyio
import structlog

from app.core.ids import PageArray, RoomId
from app.core.lifecycle import Lifecycle
from app.core.phases import Phases
from app.engine.sampling import Sampling
from app.errors import DeadlineExceeded, KvferryError, LegName, PeerFault
from app.obs.logging import log_once
from app.tiers.prefix import Lease
from app.transfer.messages import RoomUse
from app.transfer.peers import Peer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One leg's request, after parsing. `bootstrap_url` is the prefill node's base url (decode only)."""

    room: RoomId
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    bootstrap_url: str = ""
    request_id: str = ""
    salt: str | None = None
    """Of a tenant: prompts under different salts never share a page."""
    store: bool = True
    """Whether what is computed for it may be kept for later requests."""


@dataclass(frozen=True, kw_only=True)
class TokenOut:
    """One output token. The digests of main and draft logits are bit-exact, and there when tracing is on."""

    token: int
    log_probability: float
    logits: str | None = None
    draft_logits: str | None = None


@dataclass(eq=False, kw_only=True)
class Job:
    """A live room of this node."""

    leg: ClassVar[LegName]
    other_leg: ClassVar[LegName]

    room: RoomId
    life: Lifecycle
    phases: Phases = field(default_factory=Phases)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    request: Request | None = None
    lease: Lease | None = None
    """What the room holds of L1, from the look-up to the end of its drain."""
    pages: PageArray | None = None
    """Its page table: reused pages, then its own."""
    peer_url: str = ""
    peer: Peer | None = None
    """The instance that runs the other leg, once it is known."""
    given_up: bool = False
    """By the other leg itself, which needs no word from here."""
    confirmed_s: float = float("-inf")
    """When (monotonic) the question was sent to which the other leg last said that it wants the room."""
    confirmed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at each confirmation, and when the room fails."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request's outcome is known; pages may still be draining."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing of the room is held or in flight any more."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the record and the answer show: bytes, groups, digests."""

    def fail(self, reason: KvferryError) -> bool:
        """End this room with its first failure, logged once. False when it had failed or ended before."""
        if not self.life.fail(reason):
            return False
        reason.room = reason.room if reason.room is not None else self.room
        reason.leg = reason.leg or (self.other_leg if isinstance(reason, PeerFault) else self.leg)
        log_once(log, "room.failed", reason, room=self.room, peer=self.peer_url or None)
        self.scope.cancel()
        self.confirmed.set()
        return True

    def answer(self) -> None:
        """The request's outcome is known."""
        self.answered.set()

    @property
    def use(self) -> RoomUse | None:
        """What the other leg is asked about. None where it is only asked whether it is there."""
        return None

    def confirm(self, asked_s: float) -> None:
        """The other leg wants the room, or did when it was asked."""
        self.confirmed_s = max(self.confirmed_s, asked_s)
        self.confirmed.set()

    @contextmanager
    def deadline(self, seconds: float, what: str) -> Iterator[None]:
        """Fail the room when the block outlives `seconds`.

        A timeout around an await cannot end a running forward; a failed room does, at its next layer.
        """
        late = DeadlineExceeded(f"{what} {seconds} s", room=self.room)
        timer = asyncio.get_running_loop().call_later(seconds, self.fail, late)
        try:
            yield
        finally:
            timer.cancel()

    def record(self) -> dict[str, Any]:
        """Plain values for GET /rooms."""
        request, reason = self.request, self.life.reason
        return {
            "room": self.room,
            "state": str(self.life.state),
            "peer": self.peer_url,
            "request_id": request.request_id if request else "",
            "prompt_tokens": len(request.prompt) if request else 0,
            "pages": 0 if self.pages is None else len(self.pages),
            "cached_pages": 0 if self.lease is None else len(self.lease.prefix),
            "error": None
            if reason is None
            else {"type": reason.slug, "leg": reason.leg, "reason": reason.message},
            **{k: round(v, 6) for k, v in self.phases.durations().items()},
            **self.facts,
        }
