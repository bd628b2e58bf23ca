"""What an operator sees of a node's tiers, and how they are emptied."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from app.service.context import NodeContext
from app.tiers.hicache_report import ages, tier

Which = Literal["all", "l1"]


def cache_report(context: NodeContext) -> dict[str, Any]:
    """Occupancy resident and in flight, hits by tier, pins by age, extents, what copies do. Plain values."""
    cache, tiers = context.cache, context.tiers
    shown: dict[str, Any] = {
        "instance": context.instance,
        "persistent": False,
        "reuse": context.settings.cache.reuse,
        "host_bytes": tiers.host_bytes,
        "pinned_bytes": tiers.pinned_bytes,
    }
    if tiers.hicache is not None:
        return shown | tiers.hicache.report()
    stats = cache.tree.stats()
    return shown | {
        "l1": tier(cache.lanes, cache.pages, stats.l1_pages, 0, stats.evictable_l1_pages)
        | {"evicted_pages": cache.evicted_pages, "leases": cache.leases},
        "l2": None,
        "tokens": {"looked_up": cache.looked_up_tokens, "l1_hits": cache.hit_tokens, "l2_hits": 0},
        "nodes": stats.nodes,
        "namespaces": stats.namespaces,
        "pins": stats.pins,
        "pins_by_age_s": ages(cache.live, cache.clock()),
        "write_policy": None,
        "eviction": cache.eviction,
        "holds": [],
    }


def flush(context: NodeContext, *, which: Which, salt: str | None, rooms: int) -> dict[str, Any]:
    """Forget what nobody holds, of one salt or of all; what stayed, and why, is in the answer.

    `which="l1"` makes room in L1 alone: what is in L2 too stays a hit. Pages of active rooms are never touched.
    """
    cache = context.cache
    freed = cache.flush(l1_only=which == "l1") if salt is None else cache.purge(context.space(salt))
    done = asdict(freed)
    context.gate.serve()
    stayed = done["l1_stayed"] if which == "l1" else done["l1_stayed"] + done["l2_stayed"]
    complete = not (stayed or done["leases"] or done["copies"])
    status = "flushed" if complete else "partial"
    return {"status": status, "rooms": rooms, **done}
