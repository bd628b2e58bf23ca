"""Who the other nodes are: one handshake per peer instance, on both sides.

A peer is its instance id. A new instance under a known url replaces the old one (a restart); a known
instance that suddenly claims another place is refused, since that would redirect live rooms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog
from pydantic import ValidationError

from app.core.fingerprint import Fingerprint
from app.core.ids import InstanceId
from app.errors import KvferryError, PeerFault, PeerRefused, RoomInUse
from app.transfer.base import TransferEngine
from app.transfer.blocks import Layouts, require_same_buffers
from app.transfer.client import ControlClient
from app.transfer.messages import CAPABILITIES, REQUIRED, Introduction, RankEndpoint

log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class Peer:
    """Another node. `layouts` are its buffers, one mapping per rank."""

    introduction: Introduction
    layouts: tuple[Layouts, ...] = field(default=())

    @property
    def instance(self) -> InstanceId:
        return InstanceId(self.introduction.instance)

    @property
    def url(self) -> str:
        return self.introduction.url

    @property
    def rank(self) -> RankEndpoint:
        """The only rank of a decode node."""
        return self.introduction.ranks[0]


class Peers:
    """The peers of one node. `me` builds this node's own introduction; `engines` are its ranks'."""

    def __init__(
        self,
        me: Callable[[], Introduction],
        layouts: Callable[[], Layouts],
        client: ControlClient,
        engines: Sequence[TransferEngine],
        *,
        timeout_s: float,
    ) -> None:
        self._me = me
        self._layouts = layouts
        self._client = client
        self._engines = tuple(engines)
        self._timeout_s = timeout_s
        self._by_instance: dict[InstanceId, Peer] = {}
        self._by_url: dict[str, Peer] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.handshakes = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._by_instance)

    def of(self, instance: str) -> Peer:
        """A peer that has shaken hands. PeerRefused otherwise: it has to introduce itself first."""
        peer = self._by_instance.get(InstanceId(instance))
        if peer is None:
            raise PeerRefused(f"instance {instance} has not shaken hands with this node")
        return peer

    async def meet(self, url: str) -> Peer:
        """The peer at a url, after a handshake when it is not known yet."""
        known = self._by_url.get(url)
        if known is not None:
            return known
        # held weakly: a lock lives as long as somebody is in it, so asked urls leave nothing behind
        lock = self._locks.setdefault(url, asyncio.Lock())
        async with lock:
            known = self._by_url.get(url)
            return known if known is not None else await self._shake(url)

    async def _shake(self, url: str) -> Peer:
        answer = await self._client.send(
            "POST", f"{url}/v1/peer/handshake", self._me(), timeout_s=self._timeout_s
        )
        try:
            introduction = Introduction.model_validate(answer)
        except ValidationError as error:
            raise PeerFault(f"{url} introduces itself badly: {error.error_count()} errors") from error
        return self._accept(introduction, url)

    def welcome(self, introduction: Introduction) -> Introduction:
        """Answer a handshake; raises, and changes nothing, when the peer cannot be served."""
        self._accept(introduction, introduction.url)
        return self._me()

    def forget(self, peer: Peer) -> None:
        """Drop a peer; the next contact shakes hands again."""
        if self._by_instance.pop(peer.instance, None) is None:
            return
        self._by_url = {u: p for u, p in self._by_url.items() if p is not peer}
        for endpoint in peer.introduction.ranks:
            for engine in self._engines:
                engine.drop_peer(endpoint.session)

    def _accept(self, introduction: Introduction, url: str) -> Peer:
        try:
            self._check(introduction)
        except KvferryError as error:
            self.refused += 1
            log.warning("peer.refused", peer=url, reason=error.message)
            raise
        instance = InstanceId(introduction.instance)
        known = self._by_instance.get(instance)
        if known is not None:
            if known.introduction != introduction:
                raise RoomInUse(f"instance {instance} is known at {known.url}; its routes stay as they are")
            self._by_url[url] = known
            return known
        peer = Peer(introduction=introduction, layouts=tuple(r.layouts() for r in introduction.ranks))
        for old in {p for u, p in self._by_url.items() if u in (url, introduction.url)}:
            log.info("peer.replaced", peer=url, old=old.instance, new=instance)
            self.forget(old)
        for endpoint in introduction.ranks:
            for engine in self._engines:
                engine.add_peer(endpoint.session, endpoint.regions())
        self._by_instance[instance] = peer
        self._by_url[url] = self._by_url[introduction.url] = peer
        self.handshakes += 1
        return peer

    def _check(self, introduction: Introduction) -> None:
        me = self._me()
        if introduction.role == me.role:
            raise PeerRefused(f"both nodes are {me.role} nodes")
        lacking = [c for c in REQUIRED if c not in introduction.capabilities]
        if lacking:
            raise PeerRefused(f"the peer lacks {', '.join(lacking)}: pages could not be freed safely")
        ours = Fingerprint(parts=me.fingerprint)
        ours.require_equal(Fingerprint(parts=introduction.fingerprint), introduction.url)
        ranks = [endpoint.rank for endpoint in introduction.ranks]
        if ranks != list(range(len(ranks))):
            raise PeerRefused(f"ranks are 0..n-1 in order, not {ranks}")
        if introduction.role == "decode" and len(ranks) > 1:
            raise PeerRefused(f"a decode node has one rank, not {len(ranks)}")
        if len({endpoint.session for endpoint in introduction.ranks}) < len(ranks):
            raise PeerRefused("two ranks have one transfer session")
        for endpoint in introduction.ranks:
            require_same_buffers(self._layouts(), endpoint.layouts())


__all__ = ["CAPABILITIES", "Peer", "Peers"]
