"""Write-back: L2 is written when L1 has to give something up, which stays until it is there, or goes without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import structlog

from app.core.ids import PageArray
from app.core.prefix_tree import NodeInfo, Residency
from app.errors import KvferryError, TransferFailed
from app.tiers.copy_faults import CopyFault
from app.tiers.descriptors import LayerCopy
from tests.tiers.cache_rig import PLAIN, CacheRig, cache_rig, held, tokens


def write_back(**more: Any) -> AbstractContextManager[CacheRig]:
    return cache_rig(**{"l1_pages": 8, "policy": "write_back", "eviction": "lru"} | more)


def full(rig: CacheRig) -> None:
    """Two prompts of four pages, older and younger, fill L1."""
    rig.serve(tokens(16))
    rig.serve(tokens(16, salt=1))
    assert rig.cache.free_pages == 0


def node_of(rig: CacheRig, prompt: list[int]) -> NodeInfo:
    return rig.cache.tree.node(rig.cache.tree.match(PLAIN, np.array(prompt), touch=False).node)


class Told(list[KvferryError | None]):
    """What a lease that waited was told."""

    def __call__(self, error: KvferryError | None) -> None:
        self.append(error)


def once(rig: CacheRig) -> list[int]:
    """The free pages at each time that the cache said so."""
    heard: list[int] = []
    rig.cache.freed = lambda: heard.append(rig.cache.free_pages)
    return heard


def torn(**how: float) -> Callable[[LayerCopy], CopyFault | None]:
    def fault(copy: LayerCopy) -> CopyFault | None:
        return CopyFault(error=TransferFailed("torn"), **how) if copy.direction == "backup" else None

    return fault


@pytest.mark.contract(36)
def test_a_victim_stays_until_its_last_acknowledgement() -> None:
    """Nothing is copied before L1 is full; the victim is held while it is copied, and is a hit in L2 after that."""
    with write_back() as rig:
        full(rig)
        assert (rig.cache.host.lanes.free_pages, len(rig.copies)) == (24, 0)
        gate, heard = threading.Event(), once(rig)
        rig.fault = held(gate)
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):  # who asks again waits for the same copy
                assert rig.cache.allocate(2) is None
        assert [entry for entry in logs if entry["log_level"] == "warning"] == []
        assert node_of(rig, tokens(16)).state == Residency.L1_PENDING
        assert node_of(rig, tokens(16, salt=1)).state == Residency.L1
        assert (rig.cache.free_pages, heard) == (0, [])
        gate.set()
        rig.settle()
        assert heard[-1:] == [0]  # evicted when somebody asks
        pages = rig.cache.allocate(2)
        assert pages is not None
        counters = rig.cache.backups.counters
        assert (counters.backups, counters.dropped, counters.fallbacks) == (1, 0, 0)
        rig.cache.release(pages)
        rig.forget_free()
        lease = rig.find([*tokens(16), 1])
        assert (len(lease.prefix), lease.l2_tokens) == (4, 8)
        lease.confirm(20)
        rig.require_bytes(tokens(16), PLAIN, lease.prefix)
        rig.cache.end(lease)


@pytest.mark.case("G6")
def test_a_victim_takes_what_lies_above_it_along() -> None:
    """A leaf has to go: its parent is copied before it, in one descriptor a layer, and stays in L1."""
    with write_back() as rig:
        rig.serve(tokens(8))
        rig.serve(tokens(16))
        rig.serve(tokens(16, salt=1))
        assert rig.cache.allocate(1) is None
        rig.settle()
        assert {copy.pairs.nodes for copy in rig.copies} == {(2, 2)}
        assert node_of(rig, tokens(8)).state == Residency.L1_L2
        pages = rig.cache.allocate(1)
        assert pages is not None
        assert [rig.cache.tree.match(PLAIN, np.array(tokens(16))).l1_tokens, rig.cache.free_pages] == [12, 0]
        rig.cache.release(pages)


def test_where_l2_has_no_room_a_victim_goes_without_a_copy() -> None:
    """L2 is too small for the victim: its pages are handed out at once, as without an L2, and it is counted."""
    with write_back(l2_pages=2) as rig:
        full(rig)
        pages = rig.cache.allocate(2)
        assert pages is not None
        counters = rig.cache.backups.counters
        assert (counters.dropped, counters.skipped, counters.backups, len(rig.copies)) == (1, 1, 0, 0)
        rig.cache.release(pages)


@pytest.mark.parametrize("lands_after_s", [0.0, 0.05])
def test_a_victim_whose_copy_fails_goes_without_it(lands_after_s: float) -> None:
    """Its pages stay until the copy cannot land any more; then they are handed out, and L2 has kept nothing of it."""
    with write_back() as rig:
        full(rig)
        heard = once(rig)
        rig.fault = torn(lands_after_s=lands_after_s) if lands_after_s else torn()
        assert rig.cache.allocate(4) is None
        rig.settle()
        assert heard
        copies = len(rig.copies)
        pages = rig.cache.allocate(4)
        assert pages is not None
        counters = rig.cache.backups.counters
        assert (counters.dropped, counters.rolled_back, counters.backups) == (1, 1, 0)
        assert len(rig.copies) == copies  # no second try
        assert rig.cache.host.lanes.free_pages == 24
        assert rig.cache.tree.match(PLAIN, np.array(tokens(16))).tokens == 0
        rig.cache.release(pages)


def test_a_use_is_another_try() -> None:
    """A prompt whose copy failed is found again: the next time that it has to go it is copied."""
    with write_back() as rig:
        full(rig)
        rig.fault = torn()
        assert rig.cache.allocate(4) is None
        rig.settle()
        rig.fault = lambda copy: None
        rig.cache.end(rig.find([*tokens(16, salt=1), 1]))
        rig.cache.end(rig.find([*tokens(16), 1]))
        assert rig.cache.allocate(8) is None
        rig.settle()
        assert rig.cache.backups.counters.backups == 2


def test_a_queue_that_refuses_copies_holds_nobody_up() -> None:
    """No copy can be submitted: the pages are handed out at once, and nobody hears of them in the middle of that."""
    with write_back() as rig:
        full(rig)
        heard = once(rig)
        rig.backups.close()
        pages = rig.cache.allocate(6)
        assert pages is not None
        assert heard == []
        assert rig.cache.backups.counters.dropped == 2
        rig.cache.release(pages)
        rig.loop.run()
        assert heard == [6, 6]


def test_a_lost_copy_keeps_nobody_waiting_for_ever() -> None:
    """Nothing is heard of a copy: at the deadline for lost copies its victim goes, and who waits hears of it."""
    with write_back() as rig:
        full(rig)
        heard = once(rig)
        rig.fault = lambda copy: CopyFault(lost=True) if copy.layer == 0 else None
        assert rig.cache.allocate(4) is None
        rig.backups.close()
        rig.now[0] += 61
        assert rig.cache.give_up(60) == 1
        assert heard
        pages = rig.cache.allocate(4)
        assert pages is not None
        rig.cache.release(pages)
        rig.loop.run()


@pytest.mark.contract(82)
def test_room_is_made_ahead_of_need() -> None:
    """The background copies until a quarter of L1 can go, and that much is free when the copies have ended."""
    with write_back(l1_room=0.25) as rig:
        full(rig)
        assert rig.cache.make_room() == 0
        rig.settle()
        assert (rig.cache.free_pages, rig.cache.evicted_pages) == (2, 2)
        assert rig.cache.make_room() == 0
        pages = rig.cache.allocate(2)
        assert pages is not None
        assert rig.cache.backups.counters.dropped == 0
        rig.cache.release(pages)


def test_what_is_in_l2_already_goes_at_once() -> None:
    """Of two victims the one that L2 has is evicted in the same call; the other one stays for its copy."""
    with write_back() as rig:
        full(rig)
        assert rig.cache.allocate(4) is None
        rig.settle()
        gate = threading.Event()
        rig.fault = held(gate)
        assert rig.cache.allocate(6) is None
        assert (rig.cache.free_pages, node_of(rig, tokens(16, salt=1)).state) == (4, Residency.L1_PENDING)
        gate.set()
        rig.settle()
        pages = rig.cache.allocate(6)
        assert pages is not None
        rig.cache.release(pages)


def crowded(rig: CacheRig) -> PageArray:
    """The older of two prompts is in L2 alone, the younger in L1 alone, and a request has all other pages."""
    full(rig)
    assert rig.cache.allocate(4) is None
    rig.settle()
    own = rig.cache.allocate(4)
    assert own is not None
    assert node_of(rig, tokens(16)).state == Residency.L2
    return own


@pytest.mark.contract(20)
def test_a_load_waits_for_what_it_evicts_to_be_copied() -> None:
    """A hit in L2 needs room that only pages without a copy can make: they are copied, then go, and it is loaded."""
    with write_back() as rig:
        own = crowded(rig)
        gate, told = threading.Event(), Told()
        rig.fault = held(gate)
        lease = rig.find([*tokens(16), 1], later=told)
        assert lease.waits_for and not len(lease.prefix)
        rig.loop.run()
        assert (told, node_of(rig, tokens(16, salt=1)).state) == ([], Residency.L1_PENDING)
        gate.set()
        rig.settle()
        assert (told, lease.waits_for) == ([None], ())
        assert (len(lease.prefix), lease.l2_tokens) == (4, 16)
        counters = rig.cache.backups.counters
        assert (counters.backups, counters.dropped, rig.cache.loads.counters.misses) == (2, 0, 0)
        rig.settle()
        rig.require_bytes(tokens(16), PLAIN, lease.prefix)
        assert node_of(rig, tokens(16, salt=1)).state == Residency.L2
        rig.cache.end(lease)
        rig.cache.release(own)


@pytest.mark.contract(20)
def test_a_load_that_cannot_wait_is_a_miss() -> None:
    """The same hit for one that does not wait: nothing is lost for it, and the next one finds the room."""
    with write_back() as rig:
        own = crowded(rig)
        missed = rig.find([*tokens(16), 1])
        assert (len(missed.prefix), missed.node, rig.cache.loads.counters.misses) == (0, 0, 1)
        rig.settle()
        rig.cache.end(missed)
        lease = rig.find([*tokens(16), 1])
        assert (lease.l2_tokens, rig.cache.backups.counters.dropped) == (16, 0)
        rig.settle()
        rig.cache.end(lease)
        rig.cache.release(own)


def test_a_load_goes_on_when_the_copy_that_it_waits_for_fails() -> None:
    """What was to make room cannot be copied: it goes without a copy, counted, and the hit is loaded."""
    with write_back() as rig:
        own, told = crowded(rig), Told()
        rig.fault = torn(lands_after_s=0.02)
        lease = rig.find([*tokens(16), 1], later=told)
        assert lease.waits_for
        rig.settle()
        assert (told, lease.l2_tokens, rig.cache.backups.counters.dropped) == ([None], 16, 1)
        rig.settle()
        rig.require_bytes(tokens(16), PLAIN, lease.prefix)
        rig.cache.end(lease)
        rig.cache.release(own)


@pytest.mark.parametrize("how", ["ended", "out of time"])
def test_a_load_that_waits_can_be_given_up(how: str) -> None:
    """Its request ends, or has waited long enough, before the copy has ended: it holds nothing, and hears once."""
    with write_back() as rig:
        own, gate, told = crowded(rig), threading.Event(), Told()
        rig.fault = held(gate)
        lease = rig.find([*tokens(16), 1], later=told)
        assert rig.cache.pins == 1
        if how == "ended":
            rig.cache.end(lease)
        else:
            rig.cache.resume(lease)
            assert (told, len(lease.prefix), rig.cache.loads.counters.misses) == ([None], 0, 1)
            rig.cache.end(lease)
        assert (rig.cache.pins, rig.cache.waiting) == (0, {})
        gate.set()
        rig.settle()
        assert len(told) == (how != "ended")
        rig.cache.release(own)


def test_what_waits_for_its_load_is_not_evicted_from_l2() -> None:
    """The copy that makes room in L1 needs room in L2 itself: it takes others' pages than those to be loaded."""
    with write_back(l2_pages=4) as rig:
        own, told = crowded(rig), Told()
        lease = rig.find([*tokens(16), 1], later=told)
        rig.settle()
        assert (lease.l2_tokens, rig.cache.backups.counters.dropped) == (16, 1)
        assert told in ([], [None])
        rig.settle()
        rig.require_bytes(tokens(16), PLAIN, lease.prefix)
        rig.cache.end(lease)
        rig.cache.release(own)


def test_each_rank_waits_for_its_own_lane() -> None:
    """Two ranks, a victim on both: what one lane lacks is copied, and handed out in just that lane."""
    with write_back(ranks=2, l1_pages=4) as rig:
        full(rig)
        owners = np.array([1, 1], dtype=np.int8)
        assert rig.cache._take(owners) is None
        rig.settle()
        pages = rig.cache._take(owners)
        assert pages is not None
        assert rig.cache.lanes.owners_of(pages).tolist() == [1, 1]
        assert rig.cache.backups.counters.dropped == 0
        rig.cache.release(pages)


@pytest.mark.case("G6")
def test_room_in_l2_is_not_made_of_what_lies_above_a_victim() -> None:
    """L2 is full, and its oldest pages are the victim's parent's: others go, and the victim is copied below it."""
    with write_back(l2_pages=4) as rig:
        for prompt in (tokens(8), tokens(8, salt=1)):
            rig.serve(prompt)
            lease = rig.find([*prompt, 1])
            assert rig.cache.writes.back_up(lease.node)
            rig.cache.end(lease)
        rig.serve(tokens(16))
        rig.cache.end(rig.find([*tokens(8, salt=1), 1]))
        assert rig.cache.host.lanes.free_pages == 0
        assert rig.cache.allocate(8) is None
        rig.settle()
        assert node_of(rig, tokens(16)).state == Residency.L1_L2
        assert (rig.cache.tree.stats().l1_pages, rig.cache.tree.stats().l2_pages) == (4, 4)
        assert rig.cache.backups.counters.dropped == 1  # what made room in L2, and then had none itself
        pages = rig.cache.allocate(8)
        assert pages is not None
        rig.cache.release(pages)


@pytest.mark.parametrize(("eviction", "goes"), [("lru", 0), ("slru", 1), ("s3fifo", 1)])
def test_the_eviction_policy_is_a_setting(eviction: str, goes: int) -> None:
    """Of two prompts the older one was used again: only LRU gives it up first, in L1 and in L2; the report names it."""
    with cache_rig(l1_pages=8, l2_pages=8, eviction=eviction) as rig:
        full(rig)
        report = rig.cache.report()
        assert (report["eviction"], report["write_policy"]) == (eviction, "write_through")
        rig.cache.flush()
        rig.serve(tokens(16))
        rig.cache.end(rig.find([*tokens(16), 1]))
        rig.serve(tokens(16, salt=1))
        assert rig.cache.host.evict(np.array([4])) == 4
        assert [len(node_of(rig, tokens(16, salt=n)).l2_pages) for n in (0, 1)] == [4 * goes, 4 - 4 * goes]
        pages = rig.cache.allocate(4)
        assert pages is not None
        known = [rig.cache.tree.match(PLAIN, np.array(tokens(16, salt=n))).l1_tokens for n in (0, 1)]
        assert known == [16 * goes, 16 - 16 * goes]
        rig.cache.release(pages)
