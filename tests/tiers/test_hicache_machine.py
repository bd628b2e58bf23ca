"""Tree, tiers and faults against each other: whatever happens in whatever order, no page is lost, shared or stale."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.core.prefix_tree import POLICIES, Namespace, Policy
from app.errors import KvferryError, TransferFailed
from app.tiers.copy_faults import CopyFault
from app.tiers.copy_queue import CopyQueue
from app.tiers.descriptors import LayerCopy
from tests.tiers.cache_rig import PAGE, CacheRig, Request, cache_rig, tokens

CHUNKS = 2
LENGTHS = st.sampled_from([6, 9, 17, 18, 25, 33, 36])
BRANCHES = st.sampled_from([0, 8, 16, 36])
SALTS = st.integers(1, 2)
TENANT = st.sampled_from([False, False, False, True])
FAULTS = {
    "fails": CopyFault(error=TransferFailed("torn")),
    "lands": CopyFault(error=TransferFailed("torn"), lands_after_s=0.01),
    "late": CopyFault(delay_s=0.01),
    "lost": CopyFault(lost=True),
}
FAULT = st.sampled_from(["", "", *sorted(FAULTS)])


@dataclass(eq=False)
class Live:
    request: Request
    chunks: int = 0
    kept: bool = False


@dataclass
class Engine:
    """Faults for the next copies of a direction, behind `skip` good ones, and how many of each were lost."""

    direction: str = "load"
    skip: int = 0
    faults: list[str] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=lambda: {"backup": 0, "load": 0})

    def __call__(self, copy: LayerCopy) -> CopyFault | None:
        if not self.faults or copy.direction != self.direction:
            return None
        if self.skip:
            self.skip -= 1
            return None
        name = self.faults.pop()
        self.lost[copy.direction] += name == "lost"
        return FAULTS[name]


class TieredCache(RuleBasedStateMachine):
    """Requests come, are computed chunk by chunk, kept or given up, while copies fail and memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.live: list[Live] = []
        self.engine = Engine()

    @initialize(
        ranks=st.sampled_from([1, 2]),
        draft=st.booleans(),
        policy=st.sampled_from(["write_through", "write_back", "write_through_selective"]),
        eviction=st.sampled_from(POLICIES),
        room=st.sampled_from([0.0, 0.2]),
        grid=st.sampled_from([PAGE, 2 * PAGE]),
    )
    def open(self, ranks: int, draft: bool, policy: str, eviction: Policy, room: float, grid: int) -> None:
        self.rig: CacheRig = self.stack.enter_context(
            cache_rig(
                ranks=ranks,
                l1_pages=24 // ranks,
                l2_pages=20 // ranks,
                draft=draft,
                policy=policy,
                eviction=eviction,
                l1_room=room,
                l2_room=room,
                grid=grid,
                load_deadline_s=0.02,
            )
        )
        self.rig.fault = self.engine
        self.spaces = [Namespace("p", salt, bigrams=draft) for salt in (None, "tenant")]

    def prompt(self, length: int, branch: int, salt: int) -> list[int]:
        """Prompts that share their first tokens, up to `branch`."""
        return [*tokens(min(branch, length)), *tokens(length, salt)[branch:]]

    def close(self, live: Live) -> None:
        self.live.remove(live)
        self.rig.cache.end(live.request.lease)
        self.rig.forget_free()

    # requests

    @rule(length=LENGTHS, branch=BRANCHES, salt=SALTS, tenant=TENANT)
    def come(self, length: int, branch: int, salt: int, tenant: bool) -> None:
        if len(self.live) == 2:
            self.close(self.live[0])
        made = self.rig.begin(self.prompt(length, branch, salt), self.spaces[tenant])
        self.rig.forget_free()
        if made is not None:
            self.live.append(Live(made))

    @rule(length=LENGTHS, branch=BRANCHES, salt=SALTS, tenant=TENANT, quietly=st.booleans(), fault=FAULT)
    def serve(self, length: int, branch: int, salt: int, tenant: bool, quietly: bool, fault: str) -> None:
        """A request from its beginning to its end, while others go on."""
        if fault:
            self.fault([fault], "backup", length % 5)
        made = self.rig.begin(self.prompt(length, branch, salt), self.spaces[tenant])
        if made is None:
            return
        try:
            for chunk in range(CHUNKS):
                self.rig.forward([made], chunk, CHUNKS)
            self.rig.finish(made)
        except KvferryError:
            pass
        self.rig.cache.end(made.lease)
        if quietly:
            self.settle(lost=False)
        self.rig.forget_free()

    @rule(first=st.integers(0, 9), count=st.integers(1, 2))
    def compute(self, first: int, count: int) -> None:
        """One chunk of one prompt, or of two in a batch."""
        ready = [live for live in self.live if live.chunks < CHUNKS]
        batch = (ready[first % len(ready) :] if ready else [])[:count]
        batch = [live for live in batch if live.chunks == batch[0].chunks]
        if not batch:
            return
        try:
            self.rig.forward([live.request for live in batch], batch[0].chunks, CHUNKS)
        except KvferryError:
            for live in batch:
                self.begin_again(live)
            return
        for live in batch:
            live.chunks += 1

    def begin_again(self, live: Live) -> None:
        """Compute what a failed load did not bring, in other pages; without a failed load, or room, give up."""
        lease, cache = live.request.lease, self.rig.cache
        if lease.failed is None:
            self.close(live)
            return
        prompt, space = live.request.prompt, live.request.space
        pages = cache.allocate(cache.forsake(lease), lease)
        self.rig.forget_free()
        if pages is None:
            self.close(live)
            return
        self.rig.require_bytes(prompt, space, lease.prefix)
        lease.own = np.concatenate([pages, lease.own])
        live.request.table, live.request.reservation, live.chunks = lease.pages, None, 0

    @rule(which=st.integers(0, 9))
    def keep(self, which: int) -> None:
        done = [live for live in self.live if live.chunks == CHUNKS and not live.kept]
        if done:
            live = done[which % len(done)]
            live.kept = True
            self.rig.finish(live.request)

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        """At whatever step it is."""
        if self.live:
            self.close(self.live[which % len(self.live)])

    @rule(
        length=LENGTHS,
        branch=BRANCHES,
        salt=SALTS,
        tenant=TENANT,
        warm=st.booleans(),
        cold=st.booleans(),
        fault=FAULT,
        patience=st.sampled_from(["none", "some", "enough"]),
    )
    def look(
        self,
        length: int,
        branch: int,
        salt: int,
        tenant: bool,
        warm: bool,
        cold: bool,
        fault: str,
        patience: str,
    ) -> None:
        """What is found holds what was computed for just these tokens, in every layer; or it says that it does not.

        `warm`: it was served just before. `cold`: and has left L1 since. With `patience` a load waits for room that
        is being written back: for all of it, or until it has to do with what there is.
        """
        if warm:
            self.engine.faults.clear()
            self.serve(length, branch, salt, tenant, quietly=True, fault="")
        if fault:
            self.fault([fault], "load", length % 5)
        if cold:
            self.evict(1, 24)
        prompt, space = [*self.prompt(length, branch, salt), 3, 4], self.spaces[tenant]
        told: list[KvferryError | None] = []
        lease = self.rig.find(prompt, space, later=None if patience == "none" else told.append)
        if lease.waits_for:
            if patience == "enough":
                self.settle(lost=True)
            self.rig.cache.resume(lease)
            assert told == [None]
        try:
            for layer in self.rig.loads.copier.geometry.layers:
                lease.wait(layer)
            self.rig.require_bytes(prompt, space, lease.prefix)
        except KvferryError:
            pass
        finally:
            self.rig.cache.end(lease)
        self.rig.forget_free()

    @rule(length=LENGTHS, branch=BRANCHES, salt=SALTS)
    def receive(self, length: int, branch: int, salt: int) -> None:
        """Pages that came from elsewhere are kept, and backed up when they are."""
        prompt, space = self.prompt(length, branch, salt), self.spaces[0]
        made = self.rig.begin(prompt, space)
        if made is None:
            return
        made.lease.backups.clear()
        if made.reservation is not None:
            self.rig.cache.backups.abort(made.reservation, TransferFailed("not ours"))
            made.reservation = None
        try:
            self.rig.forward([made])
            self.rig.cache.keep(made.lease, prompt, made.table, back_up=True)
        except KvferryError:
            pass
        self.rig.cache.end(made.lease)
        self.rig.forget_free()

    # what happens to them

    @rule(
        names=st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=2),
        direction=st.sampled_from(["load", "backup"]),
        skip=st.integers(0, 6),
    )
    def fault(self, names: list[str], direction: str, skip: int) -> None:
        self.engine.direction, self.engine.skip, self.engine.faults = direction, skip, list(names)

    @rule(tier=st.sampled_from([1, 2]), pages=st.sampled_from([2, 5, 24]))
    def evict(self, tier: int, pages: int) -> None:
        gone = self.rig.cache.tree.evict(tier, pages)  # type: ignore[arg-type]
        if tier == 1:
            self.rig.cache._returned(gone)
        else:
            self.rig.cache.host.release(gone)
        self.rig.forget_free()

    @rule(length=LENGTHS, branch=BRANCHES, at=st.integers(1, 8))
    def split(self, length: int, branch: int, at: int) -> None:
        key = np.array(self.prompt(length, branch, 1))
        node = self.rig.cache.tree.match(self.spaces[0], key, touch=False).node
        if node and self.rig.cache.tree.node(node).tokens > at * PAGE:
            self.rig.cache.tree.split(node, at * PAGE)

    @rule(what=st.sampled_from(["room", "room", "purge", "flush"]))
    def upkeep(self, what: str) -> None:
        if what == "flush":
            self.rig.cache.flush()
        elif what == "purge":
            self.rig.cache.purge(self.spaces[1])
        else:
            self.rig.cache.make_room()
        self.rig.forget_free()

    @rule()
    def hear(self) -> None:
        """Run what has been posted so far."""
        self.rig.loop.run()

    @rule(lost=st.booleans())
    def settle(self, lost: bool) -> None:
        """Until all that is not lost is quiet; `lost`: and give the rest up."""
        self.rig.until(lambda: not self.moving(self.rig.backups) and not self.moving(self.rig.loads))
        self.rig.loop.run()
        if lost:
            self.rig.now[0] += 100
            self.rig.cache.give_up(60)

    def all_can_be_had(self) -> None:
        """Who waits for all pages of L1 gets them as soon as the copies that began meanwhile have ended."""
        cache = self.rig.cache
        for _ in range(cache.pages):
            pages = cache.allocate(cache.pages)
            if pages is not None:
                cache.release(pages)
                return
            assert cache.backups.open
            self.settle(lost=True)
        pytest.fail(f"{cache.pages} pages cannot be had")

    def moving(self, queue: CopyQueue) -> bool:
        return queue.moving != self.engine.lost["backup" if queue is self.rig.backups else "load"]

    # what always holds

    @invariant()
    def every_page_is_somewhere(self) -> None:
        if not hasattr(self, "rig"):
            return
        cache = self.rig.cache
        cache.check_integrity()
        own = [page for lease in cache.live for page in lease.own.tolist()]
        late = sum(len(pages) for pages, _ in cache.late)
        assert len(own) == len(set(own))
        assert cache.free_pages + cache.cached_pages + len(own) + late == cache.pages
        assert cache.pins <= cache.leases == len(self.live)

    def teardown(self) -> None:
        with self.stack:
            if not hasattr(self, "rig"):
                return
            self.engine.faults.clear()
            for live in list(self.live):
                self.close(live)
            self.settle(lost=True)
            self.all_can_be_had()
            for queue in (self.rig.backups, self.rig.loads):
                queue.close()  # what was lost has landed: its words come too late, and are ignored
            self.rig.loop.run()
            assert self.rig.cache.tree.stats().tickets == 0
            assert self.rig.cache.pins == 0


@pytest.mark.contract(41)
@pytest.mark.contract(44)
@pytest.mark.contract(46)
@pytest.mark.contract(47)
@pytest.mark.case("A7")
@pytest.mark.case("G5")
class TestTieredCache(TieredCache.TestCase):
    """3,600 steps."""


TestTieredCache.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
