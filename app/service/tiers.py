"""From settings to the tiers of a node: the prefix cache over L1 alone, or both tiers with their copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import structlog

from app.core.pairings import require_pairing
from app.obs.cgroups import cgroup_limit
from app.settings import NodeSettings
from app.tiers.copiers import LayerCopier, backend_of
from app.tiers.copy_queue import CopyQueue
from app.tiers.device import DevicePool
from app.tiers.hicache import HiCache
from app.tiers.host import HostPool, host_pages
from app.tiers.page_checks import PageChecks
from app.tiers.prefix import PrefixCache
from app.tiers.registration import registrar_for

log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class Tiers:
    """The cache, and what lies behind it: host pools and copy queues, none without an L2."""

    cache: PrefixCache
    hosts: tuple[HostPool, ...] = ()
    queues: tuple[CopyQueue, ...] = ()

    @property
    def hicache(self) -> HiCache | None:
        """None without an L2."""
        return self.cache if isinstance(self.cache, HiCache) else None

    @property
    def host_bytes(self) -> int:
        return sum(host.total_bytes for host in self.hosts)

    @property
    def pinned_bytes(self) -> int:
        return sum(host.pinned_bytes for host in self.hosts)

    def keep_house(self, lost_s: float) -> None:
        """In the background: restore the free room of both tiers, take back what lost copies hold."""
        self.cache.make_room()
        if self.hicache is None:
            return
        lost = self.hicache.give_up(lost_s)
        if lost:
            log.warning("copies.lost", copies=lost, after_s=lost_s)

    def close(self) -> None:
        """Stop the copies, then let go of host memory. The L1 pools are closed after this."""
        for queue in self.queues:
            queue.close()
        for host in self.hosts:
            host.close()

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        for host in self.hosts:
            host.check_integrity()
        for queue in self.queues:
            queue.check_integrity()


def _poster(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], None]:
    def post(callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody is left to decide anything
            loop.call_soon_threadsafe(callback)

    return post


def make_tiers(settings: NodeSettings, pools: Sequence[DevicePool], *, freed: Callable[[], None]) -> Tiers:
    """Validate pairings, size and pin L2, start its queues. SettingsError names the key.

    `freed` is called, on the loop, when pages have come back by themselves.
    """
    tier, cache = settings.hicache, settings.cache
    layout, backend, _ = require_pairing(
        layout=tier.layout,
        copy_backend=tier.copy_backend,
        storage=tier.storage,
        shared_kv=settings.cp.shared_kv,
    )
    reuse = cache.reuse != "off"
    grid = settings.prefill.chunk_tokens if cache.reuse == "exact" else None
    if not tier.enabled:
        only = PrefixCache(
            page_size=cache.page_size,
            pages=cache.pages,
            ranks=len(pools),
            reuse=reuse,
            grid=grid,
            free_room=tier.l1_room,
            eviction=cache.eviction,
        )
        return Tiers(cache=only)
    size = host_pages(
        pools[0].geometry,
        layout,
        device_pages=cache.pages,
        ranks=len(pools),
        bytes_per_rank=tier.host_bytes,
        ratio=tier.host_ratio,
        limit_bytes=cgroup_limit(),
        used_bytes=psutil.Process().memory_info().rss,
    )
    hosts: list[HostPool] = []
    queues: list[CopyQueue] = []
    try:
        for rank, pool in enumerate(pools):
            registrar = registrar_for(pool.device)
            hosts.append(HostPool(pool.geometry, size.pages, layout, registrar, rank=rank))
        copier = LayerCopier(pools, hosts, backend_of(backend))
        queues += [CopyQueue(copier, name="backups"), CopyQueue(copier, name="loads")]
        both = HiCache(
            backups=queues[0],
            loads=queues[1],
            post=_poster(asyncio.get_running_loop()),
            reuse=reuse,
            grid=grid,
            eviction=cache.eviction,
            policy=tier.write_policy,
            selective_hits=tier.selective_hits,
            l1_room=tier.l1_room,
            l2_room=tier.l2_room,
            load_deadline_s=tier.load_s,
            strict=tier.strict,
            checks=PageChecks(pools) if tier.checks == "full" else None,
            freed=freed,
        )
    except BaseException:
        for queue in queues:
            queue.close()
        for host in hosts:
            host.close()
        raise
    log.info("tiers.l2", pages=size.pages, ranks=len(pools), host_bytes=size.total_bytes, layout=layout)
    return Tiers(cache=both, hosts=tuple(hosts), queues=tuple(queues))
