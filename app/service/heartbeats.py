"""Heartbeats between nodes that share rooms, and the leases of a prefill node's writes.

A node asks each peer that it shares live rooms with, once an interval. No answer for some intervals, or an
answer of another instance, ends the rooms shared with it, and no others.

Prefill names its rooms in the question, and decode says which of them it has given up. Prefill writes only
into rooms that decode has confirmed within `deadlines.lease_s`, measured from the question: an abort that is
lost for good ends the writes none the less, before decode's quarantine does.

    question       answer           lease over        last submit ends     late landing
    |--------------|----------------|-----------------|--------------------|
    '-- lease_s --------------------'-- deadline_s ---'-- late_landing_s --'   < quarantine_s
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from pydantic import ValidationError

from app.core.ids import InstanceId
from app.core.rooms import RoomTable
from app.errors import KvferryError, LeaseExpired, PeerAborted, PeerUnavailable
from app.service.context import NodeContext
from app.service.jobs import Job
from app.transfer.messages import Alive, Heartbeat
from app.transfer.peers import Peer

log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class _Pulse:
    """What is known of one peer's answers."""

    peer: Peer
    heard_s: float
    misses: int = 0
    asking: bool = False


J = TypeVar("J", bound=Job)


class Heartbeats(Generic[J]):
    """Of one node. `other` is the leg that its peers run, for messages."""

    def __init__(self, node: NodeContext, rooms: RoomTable[J], *, other: str) -> None:
        self._node = node
        self._rooms = rooms
        self._other = other
        self._limits = node.settings.deadlines
        self._pulses: dict[InstanceId, _Pulse] = {}
        self.asked = 0
        self.missed = 0
        self.lost = 0
        self.replaced = 0
        self.expired = 0

    async def run(self) -> None:
        """Ask for ever; cancelled with the node. A fault with one peer must not end it."""
        while True:
            await asyncio.sleep(self._limits.heartbeat_s)
            shared: dict[Peer, list[J]] = defaultdict(list)
            for job in self._rooms:
                # a parked room has no coroutine that could end it: its own deadline does
                if (
                    job.peer is not None
                    and job.request is not None
                    and job.life.reason is None
                    and not job.life.ended
                ):
                    shared[job.peer].append(job)
            known = {peer.instance for peer in shared}
            self._pulses = {i: p for i, p in self._pulses.items() if i in known or p.asking}
            for peer, jobs in shared.items():
                if not self._pulse(peer).asking:
                    self._node.spawn(self._beat(peer, jobs), f"heartbeat {peer.url}")

    def _pulse(self, peer: Peer) -> _Pulse:
        return self._pulses.setdefault(peer.instance, _Pulse(peer=peer, heard_s=time.monotonic()))

    async def _beat(self, peer: Peer, jobs: Collection[J]) -> None:
        """The question of an interval: the only one whose misses count, however many rooms begin in it."""
        pulse = self._pulse(peer)
        pulse.asking = True
        try:
            silence = await self._question(peer, jobs)
        finally:
            pulse.asking = False
        if silence is not None:
            self._missed(pulse, silence)

    async def ask(self, peer: Peer, jobs: Collection[J]) -> None:
        """Ask about rooms out of turn, when both halves of them are there. The next interval asks again."""
        await self._question(peer, jobs)

    async def _question(self, peer: Peer, jobs: Collection[J]) -> str | None:
        """One question and what its answer means; why there was none, else None."""
        pulse = self._pulse(peer)
        asked_s = time.monotonic()
        message = Heartbeat(
            instance=self._node.instance, rooms=tuple(use for job in jobs if (use := job.use) is not None)
        )
        self.asked += 1
        try:
            answer = await self._node.client.send(
                "POST",
                f"{peer.url}/v1/peer/heartbeat",
                message,
                timeout_s=min(self._limits.message_s, self._limits.lease_s),
            )
            alive = Alive.model_validate(answer)
        except (KvferryError, ValidationError) as error:
            return str(error)
        pulse.misses, pulse.heard_s = 0, time.monotonic()
        if alive.instance != peer.instance:
            self.replaced += 1
            self._end(peer, f"instance {peer.instance} is gone, {alive.instance} answers")
            return None
        gone = set(alive.gone)
        for job in jobs:
            if job.use in gone:
                job.given_up = True
                job.fail(PeerAborted(f"{self._other} has given the room up", room=job.room))
            else:
                job.confirm(asked_s)
        return None

    def _missed(self, pulse: _Pulse, why: str) -> None:
        self.missed += 1
        pulse.misses += 1
        if pulse.misses < self._limits.heartbeat_misses:
            return
        self.lost += 1
        silent_s = time.monotonic() - pulse.heard_s
        reason = f"no answer to {pulse.misses} heartbeats in {silent_s:.1f} s: {why}"
        self._node.breakers.lost(pulse.peer.url, reason)
        self._end(pulse.peer, reason)

    def _end(self, peer: Peer, reason: str) -> None:
        """Fail the rooms shared with this instance; the next contact with its url shakes hands again."""
        log.warning("peer.lost", peer=peer.url, instance=peer.instance, reason=reason)
        self._pulses.pop(peer.instance, None)
        self._node.peers.forget(peer)
        for job in list(self._rooms):
            if job.peer is peer and job.request is not None and not job.life.ended:
                job.fail(
                    PeerUnavailable(f"{self._other} at {peer.url}: {reason}", room=job.room, peer=peer.url)
                )

    # ------------------------------------------------------------------ leases

    async def permit(self, job: J) -> None:
        """Return while the room's lease lasts, waiting for a confirmation if need be. LeaseExpired without."""
        lease_s = self._limits.lease_s
        until = time.monotonic() + lease_s
        while time.monotonic() - job.confirmed_s > lease_s:
            if job.life.reason is not None:
                raise job.life.reason
            left = until - time.monotonic()
            if left <= 0:
                self.expired += 1
                raise LeaseExpired(
                    f"{self._other} at {job.peer_url} has not confirmed the room within {lease_s:g} s "
                    "(deadlines.lease_s)",
                    room=job.room,
                    peer=job.peer_url,
                )
            job.confirmed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await job.confirmed.wait()

    def snapshot(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "asked": self.asked,
            "missed": self.missed,
            "lost": self.lost,
            "replaced": self.replaced,
            "leases_expired": self.expired,
            "peers": {
                p.peer.url: {"heard_s_ago": round(now - p.heard_s, 3), "misses": p.misses}
                for p in self._pulses.values()
            },
        }
