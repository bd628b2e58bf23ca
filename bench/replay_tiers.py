"""The tiers of a node without a model or bytes: the real tree, the real allocators, real evictions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.core.extents import PageExtents
from app.core.ids import PageArray
from app.core.lanes import OwnerLanes
from app.core.owners import plan_owners
from app.core.prefix_tree import Namespace, Policy, PrefixTree
from bench.churn import runs_of
from bench.report import BenchFailed
from bench.traces import Request

PAGE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Capacities in tokens; the free room, a part of a tier, is what an eviction restores beyond the deficit."""

    l1_tokens: int
    l2_tokens: int = 0
    lanes: int = 1
    free_room: float = 0.01


@dataclass(kw_only=True)
class Outcome:
    """`took_s` is the time of the decisions of each request; the making of its tokens is not part of it."""

    prompt_tokens: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0
    evicted_pages: int = 0
    evictions: int = 0
    largest_extent: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    @property
    def served(self) -> float:
        """The part of the prompts' tokens that came from a tier."""
        return (self.l1_tokens + self.l2_tokens) / self.prompt_tokens


class Tiers:
    """One request after the other: match, load, allocate, insert, back up."""

    def __init__(self, shape: Shape, policy: Policy) -> None:
        lane_pages = shape.l1_tokens // PAGE_TOKENS // shape.lanes
        l2_pages = shape.l2_tokens // PAGE_TOKENS
        self._lanes = OwnerLanes(shape.lanes, lane_pages)
        self._l2 = PageExtents(l2_pages) if l2_pages else None
        self._room = (int(lane_pages * shape.free_room), int(l2_pages * shape.free_room))
        self.tree = PrefixTree(
            page_size=PAGE_TOKENS,
            l1_pages=lane_pages * shape.lanes,
            l2_pages=l2_pages,
            lanes=shape.lanes,
            policy=policy,
        )
        self._space = Namespace("replay")
        self.outcome = Outcome()

    def serve(self, request: Request) -> None:
        prompt = request.prompt()
        whole = request.tokens // PAGE_TOKENS
        started = time.perf_counter_ns()
        self._serve(prompt[: whole * PAGE_TOKENS], whole)
        self.outcome.took_s.append((time.perf_counter_ns() - started) * 1e-9)
        self.outcome.prompt_tokens += request.tokens
        self.outcome.largest_extent.append(max(map(self._lanes.largest_extent, range(self._lanes.lanes))))

    def _serve(self, prompt: npt.NDArray[np.int64], whole: int) -> None:
        if not whole:
            return
        hit = self.tree.match(self._space, prompt, floor=True, pin=True)
        pages = hit.pages
        if hit.tokens > hit.l1_tokens:
            pages = np.concatenate((pages, self._load(hit.node)))[: hit.tokens // PAGE_TOKENS]
        self.outcome.l1_tokens += hit.l1_tokens
        self.outcome.l2_tokens += hit.tokens - hit.l1_tokens
        owners = plan_owners(whole - len(pages), self._lanes.lanes, self._roomiest())
        own = self._allocate(owners)
        table = np.concatenate((pages, own))
        owners = np.concatenate((self._lanes.owners_of(pages), owners))
        node = self.tree.insert(self._space, prompt, table, owners).node
        if hit.node:
            self.tree.unpin(hit.node)
        if self._l2 is not None:
            self._back_up(node)

    def _roomiest(self) -> int:
        """Where a prompt's front goes: it stays longest, so that it had better not be the same lane's always."""
        return max(range(self._lanes.lanes), key=self._lanes.free_in)

    def _allocate(self, owners: npt.NDArray[np.int8]) -> PageArray:
        if not len(owners):
            return np.empty(0, dtype=np.int64)
        pages = self._lanes.alloc_pages_with_owners(owners)
        if pages is None:
            wanted = self._lanes.deficits(owners)
            self._give_back(self.tree.evict_owners(1, np.where(wanted > 0, wanted + self._room[0], 0)))
            pages = self._lanes.alloc_pages_with_owners(owners)
        if pages is None:
            raise BenchFailed(f"a prompt of {len(owners)} new pages does not fit into L1")
        self.outcome.runs.append(runs_of(pages))
        return pages

    def _give_back(self, pages: PageArray) -> None:
        self.outcome.evictions += 1
        self.outcome.evicted_pages += len(pages)
        self._lanes.release(pages)

    def _load(self, node: int) -> PageArray:
        """All of the path that is in L2 only; its bytes would be copied between begin and acknowledgement."""
        pages = self._allocate(self.tree.load_owners(node))
        self.tree.acknowledge(self.tree.begin_load(node, pages))
        return pages

    def _back_up(self, node: int) -> None:
        """Write-through: whatever of the path is not in L2 yet, parents first."""
        assert self._l2 is not None
        self.tree.pin(node)
        for part in self.tree.path(node):
            info = self.tree.node(part)
            if info.state != "l1":
                continue
            pages = self._l2.allocate(len(info.l1_pages))
            if pages is None:
                deficit = len(info.l1_pages) - self._l2.free_pages
                gone = self.tree.evict(2, deficit + self._room[1])
                if len(gone):
                    self._l2.release(gone)
                pages = self._l2.allocate(len(info.l1_pages))
            if pages is None:
                break
            self.tree.acknowledge(self.tree.begin_backup(part, pages))
        self.tree.unpin(node)
