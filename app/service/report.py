"""A node's statistics: one snapshot of every pool, table and counter, as GET /stats shows it."""

from __future__ import annotations

import resource
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil

from app import __version__

if TYPE_CHECKING:
    from app.service.node import Node


def snapshot(node: Node) -> dict[str, Any]:
    """Plain values. NotReady while the node is starting."""
    context, now = node.context, time.monotonic()
    cache, table = context.cache, node.table()
    return {
        "version": __version__,
        "instance": node.instance,
        "role": node.settings.role,
        "uptime_s": round(now - node.started_s, 3),
        "ready": node.why_not_ready() is None,
        "pages": {
            "total": cache.pages,
            "free": cache.free_pages,
            "cached": cache.cached_pages,
            "free_by_rank": [cache.lanes.free_in(rank) for rank in range(cache.ranks)],
            "largest_extent": cache.largest_extent,
            "quarantine": context.quarantine.pages,
            "waiting": context.gate.waiting,
        },
        "reuse": {
            "looked_up_tokens": cache.looked_up_tokens,
            "hit_tokens": cache.hit_tokens,
            "evicted_pages": cache.evicted_pages,
            "leases": cache.leases,
            "pins": cache.pins,
        },
        "slots": {"total": context.slots.count, "free": context.slots.free_slots},
        "rooms": {
            "live": len(table),
            "opened": table.opened,
            "failed": table.failed,
            "states": dict(Counter(str(job.life.state) for job in table)),
        },
        "holds": context.quarantine.snapshot(now),
        "holds_expired": context.quarantine.expired,
        "forwards": {"count": context.forwards.count, "waiting": context.forwards.waiting},
        "chunks": len(node.prefill.rooms.fifos) if node.prefill else 0,
        "tombstones": len(node.prefill.rooms.tombstones) if node.prefill else 0,
        "transfer": context.transfer.statistics(),
        "transfer_ranks": [transfer.statistics() for transfer in context.transfers],
        "sent": context.statistics.snapshot(),
        "peers": {
            "known": len(context.peers),
            "refused": context.peers.refused,
            "circuits": context.breakers.snapshot(),
            "circuits_opened": context.breakers.opened,
            "refused_while_open": context.breakers.refused,
        },
        "heartbeats": node.heartbeats.snapshot(),
        "corrupt": dict(context.corrupt),
        "late_messages": dict(context.late),
        "memory": {
            "rss_bytes": psutil.Process().memory_info().rss,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "pool_bytes": sum(pool.total_bytes for pool in context.pools),
        },
        "diagnostics": {
            "synchronisations": context.diagnostics.synchronisations,
            "owner_checks": context.diagnostics.owner_checks,
        },
        "counters": dict(node.counters),
    }
