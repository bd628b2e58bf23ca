"""What the tiers hold, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from app.core.lanes import OwnerLanes
from app.tiers.leases import Lease

if TYPE_CHECKING:
    from app.tiers.hicache import HiCache

AGES_S: Final = (1.0, 10.0, 60.0, 600.0)
"""Bounds of the ages by which pins are counted."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Pages that copies may still touch."""

    reason: str
    age_s: float
    l1_pages: int = 0
    l2_pages: int = 0


def holds(cache: HiCache) -> list[Held]:
    """Everything on which bytes may still move, oldest first."""
    now_s, backups, loads = cache.clock(), cache.backups, cache.loads
    found = [
        Held(
            reason="an ended request's pages are being backed up",
            age_s=now_s - min(of.since_s for of in reading),
            l1_pages=len(pages),
        )
        for pages, reading in cache.late
    ]
    found += [
        Held(
            reason="a backup is written" if of.open else "a backup that failed may still land",
            age_s=now_s - of.since_s,
            l2_pages=len(of.l2),
        )
        for of in backups.open
        if of.moving
    ]
    found += [
        Held(
            reason="a load is written" if load.failed is None else "a load that failed may still land",
            age_s=now_s - load.since_s,
            l1_pages=0 if load.pairs is None else len(load.pairs),
        )
        for load in loads.open
        if load.moving
    ]
    return sorted(found, key=lambda held: -held.age_s)


def report(cache: HiCache) -> dict[str, Any]:
    """Occupancy, hits by tier, pins by age, fragmentation, what copies did and what is held."""
    stats = cache.tree.stats()
    pending = sum(len(of.l2) for of in cache.backups.open)
    loading = sum(len(l1) for load in cache.loads.open for part in load.parts for l1, _ in part.nodes)
    backups, loads = cache.backups.counters, cache.loads.counters
    return {
        "l1": tier(cache.lanes, cache.pages, stats.l1_pages, loading, stats.evictable_l1_pages)
        | {"evicted_pages": cache.evicted_pages, "leases": cache.leases},
        "l2": tier(cache.host.lanes, cache.host.pages, stats.l2_pages, pending, stats.evictable_l2_pages)
        | {"evicted_pages": cache.host.evicted_pages},
        "tokens": {
            "looked_up": cache.looked_up_tokens,
            "l1_hits": cache.hit_tokens,
            "l2_hits": cache.l2_hit_tokens,
        },
        "nodes": stats.nodes,
        "namespaces": stats.namespaces,
        "pins": stats.pins,
        "pins_by_age_s": ages(cache.live, cache.clock()),
        "write_policy": cache.writes.policy,
        "eviction": cache.eviction,
        "backups": asdict(backups),
        "loads": asdict(loads),
        "holds": [asdict(held) for held in cache.holds()],
    }


def ages(leases: Iterable[Lease], now_s: float) -> dict[str, int]:
    """How many leases pin something, by age in seconds."""
    found = dict.fromkeys([*(f"<{bound:g}" for bound in AGES_S), f">={AGES_S[-1]:g}"], 0)
    for lease in leases:
        if lease.node:
            age = now_s - lease.since_s
            below = next((f"<{bound:g}" for bound in AGES_S if age < bound), f">={AGES_S[-1]:g}")
            found[below] += 1
    return found


def tier(lanes: OwnerLanes, pages: int, held: int, moving: int, evictable: int) -> dict[str, Any]:
    free = lanes.free_pages
    largest = max(lanes.largest_extent(lane) for lane in range(lanes.lanes))
    roomiest = max(lanes.free_in(lane) for lane in range(lanes.lanes))
    return {
        "pages": pages,
        "free_pages": free,
        "resident_pages": held - moving,
        "in_flight_pages": moving,
        "evictable_pages": evictable,
        "largest_extent": largest,
        "fragmentation": round(1 - largest / roomiest, 4) if roomiest else 0.0,
    }
