"""Backups: reserved before the forward, copied at layer ends, visible after the last acknowledgement, or not at all."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import structlog

from app.core.prefix_tree import Residency
from app.errors import BadInput, SettingsError, TransferFailed
from app.tiers.copy_faults import CopyFault
from app.tiers.descriptors import LayerCopy
from tests.tiers.cache_rig import PAGE, PAIRS, PLAIN, CacheRig, Request, cache_rig, tokens
from tests.tiers.rig import SHARED_LAYER, WAIT_S

UNITS = [("target", 0), ("target", 1), ("target", 2), ("target", 3), ("draft", 3), ("draft", 4)]


def begun(rig: CacheRig, count: int, salt: int = 0) -> Request:
    of = rig.begin(tokens(count, salt))
    assert of is not None and of.reservation is not None
    return of


def held_at(source: str, layer: int, gate: threading.Event) -> object:
    """A fault that holds the copies of one layer until the gate opens."""

    def fault(copy: LayerCopy) -> CopyFault | None:
        if (copy.source, copy.layer) == (source, layer):
            assert gate.wait(WAIT_S)
        return None

    return fault


def broken(layer: int, **how: float) -> object:
    def fault(copy: LayerCopy) -> CopyFault | None:
        if copy.layer == layer and copy.direction == "backup":
            return CopyFault(error=TransferFailed("torn"), **how)
        return None

    return fault


@pytest.mark.contract(34)
@pytest.mark.contract(35)
@pytest.mark.contract(36)
@pytest.mark.contract(42)
@pytest.mark.contract(75)
def test_a_backup_is_visible_after_the_drafts_acknowledgement() -> None:
    """Pages of L2 and a pending node stand before the forward; the target's copies alone make no hit."""
    with cache_rig() as rig:
        gate = threading.Event()
        rig.fault = held_at("draft", 4, gate)  # type: ignore[assignment]
        of = begun(rig, 16)
        assert rig.cache.host.lanes.free_pages == 20
        assert not rig.copies
        rig.forward([of])  # returns while the draft's copy is held: no layer end waits for a copy
        rig.finish(of)
        rig.until(lambda: of.reservation is not None and of.reservation.left == {"target": 0, "draft": 4})
        assert rig.cache.tree.node(of.lease.node).state == Residency.L1_PENDING
        assert not len(rig.cache.tree.evict(1, 16))
        gate.set()
        rig.settle()
        assert rig.cache.tree.node(of.lease.node).state == Residency.L1_L2
        rig.cache.end(of.lease)
        assert rig.cache.backups.counters.backups == 1


@pytest.mark.contract(37)
@pytest.mark.contract(38)
def test_a_layer_end_copies_its_own_source_only() -> None:
    """At a layer that both store, the target's end copies target pages, the draft's end draft pages, each once."""
    with cache_rig() as rig:
        of = begun(rig, 8)
        batch = rig.cache.chunk([(of.reservation, 0, 2)])  # type: ignore[list-item]
        for _ in range(2):
            batch.layer_end("target", SHARED_LAYER)
            batch.layer_end("draft", 0)  # the draft stores nothing of it
        rig.backups.drain(WAIT_S)
        assert [(copy.source, copy.layer) for copy in rig.copies] == [("target", SHARED_LAYER)]
        batch.layer_end("draft", SHARED_LAYER)
        rig.backups.drain(WAIT_S)
        assert [(copy.source, copy.layer) for copy in rig.copies[1:]] == [("draft", SHARED_LAYER)]
        rig.cache.end(of.lease)


@pytest.mark.contract(40)
@pytest.mark.parametrize("pairs", [False, True])
def test_the_reservation_is_what_keep_will_insert(pairs: bool) -> None:
    """Whole pages of the draft's keys; a prompt that comes again reserves only what it adds, and nothing rolls back."""
    space = PAIRS if pairs else PLAIN
    with cache_rig() as rig:
        of = rig.begin(tokens(16), space)
        assert of is not None and of.reservation is not None
        assert len(of.reservation.l1) == (3 if pairs else 4)
        rig.forward([of])
        rig.finish(of)
        assert of.reservation.complete
        rig.cache.end(of.lease)
        rig.settle()
        again = rig.begin(tokens(16), space)
        assert again is not None and again.reservation is None
        rig.cache.end(again.lease)
        longer = rig.begin([*tokens(16), *tokens(9, salt=1)], space)
        assert longer is not None and longer.reservation is not None
        # with a draft the fourth page was not kept: its last row had another next token
        assert (longer.reservation.first, len(longer.reservation.l1)) == ((3, 3) if pairs else (4, 2))
        rig.forward([longer])
        rig.finish(longer)
        rig.cache.end(longer.lease)
        rig.settle()
        assert rig.cache.backups.counters.rolled_back == 0


@pytest.mark.contract(40)
def test_the_probe_sees_what_is_known_beyond_the_reused_part() -> None:
    """On a coarse grid the reused part is shorter than the known one: only what is unknown is reserved."""
    with cache_rig(grid=4 * PAGE) as rig:
        rig.serve(tokens(5 * PAGE))
        of = rig.begin([*tokens(5 * PAGE), *tokens(PAGE, salt=1)])
        assert of is not None and of.reservation is not None
        assert (len(of.lease.prefix), of.reservation.first, len(of.reservation.l1)) == (4, 5, 1)
        rig.forward([of])
        rig.finish(of)
        rig.cache.end(of.lease)


@pytest.mark.contract(40)
def test_two_that_compute_one_prompt_reserve_it_once() -> None:
    """The second of two equal prompts finds the first one's reservation; both are kept, one copy is made."""
    with cache_rig() as rig:
        one, two = begun(rig, 16), rig.begin(tokens(16))
        assert two is not None and two.reservation is None
        rig.forward([one, two])
        rig.finish(two)
        rig.finish(one)
        rig.cache.end(two.lease)
        rig.cache.end(one.lease)
        rig.settle()
        assert (rig.cache.backups.counters.backups, rig.cache.cached_pages) == (1, 4)


@pytest.mark.contract(43)
@pytest.mark.contract(45)
def test_ten_prompts_of_a_batch_make_one_copy_a_layer_and_source() -> None:
    """One target and one draft copy a layer for ten reservations, one mapping for all of them; ten nodes stay ten."""
    with cache_rig(l1_pages=20, l2_pages=20) as rig:
        batch = [begun(rig, 8, salt) for salt in range(10)]
        builds = rig.backups.copier.statistics.steps["build"]
        rig.forward(batch)
        rig.settle()
        assert [(copy.source, copy.layer) for copy in rig.copies] == UNITS
        assert {copy.pairs.nodes for copy in rig.copies} == {(2,) * 10}
        assert rig.backups.copier.statistics.steps["build"] - builds == 1
        assert rig.cache.backups.counters.backups == 10
        for of in batch:
            rig.finish(of)
            rig.cache.end(of.lease)
        assert rig.cache.tree.stats().nodes == 10


@pytest.mark.contract(41)
@pytest.mark.contract(44)
def test_a_reservation_that_is_given_up_leaves_the_others_intact() -> None:
    """One of two prompts ends within the batch: its pages are copied no more and come back, the other's stay."""
    with cache_rig() as rig:
        one, two = begun(rig, 16), begun(rig, 8, salt=1)
        batch = rig.cache.chunk([(one.reservation, 0, 4), (two.reservation, 0, 2)])  # type: ignore[list-item]
        batch.layer_end("target", 0)
        rig.cache.end(one.lease)
        for source, layer in UNITS[1:]:
            batch.layer_end(source, layer)  # type: ignore[arg-type]
        rig.settle()
        assert [len(copy.pairs) for copy in rig.copies] == [6, 2, 2, 2, 2, 2]
        assert (rig.cache.backups.counters.rolled_back, rig.cache.backups.counters.backups) == (1, 1)
        assert rig.cache.host.lanes.free_pages == 24 - 2
        rig.cache.keep(two.lease, two.prompt, two.table)
        rig.cache.end(two.lease)


@pytest.mark.contract(41)
@pytest.mark.parametrize("layer", [0, 3, 4])
def test_a_failed_copy_gives_back_every_page(layer: int) -> None:
    """A copy of target or draft fails: no hit in L2, its pages are free again, what was computed stays in L1."""
    with cache_rig() as rig:
        rig.fault = broken(layer)  # type: ignore[assignment]
        rig.serve(tokens(16))
        assert rig.cache.host.lanes.free_pages == 24
        assert rig.cache.cached_pages == 4
        assert rig.cache.backups.counters.rolled_back == 1


@pytest.mark.contract(46)
@pytest.mark.case("G5")
def test_a_node_that_is_split_while_it_is_backed_up_is_published_whole() -> None:
    """Another prompt splits a pending node: both parts are held until the copies ended, then both are hits."""
    with cache_rig(l2_pages=40) as rig:
        gate = threading.Event()
        rig.fault = held_at("draft", 4, gate)  # type: ignore[assignment]
        of = begun(rig, 24)
        rig.forward([of])
        rig.finish(of)
        rig.cache.end(of.lease)
        branch = rig.begin([*tokens(12), *tokens(8, salt=1)])
        assert branch is not None and len(branch.lease.prefix) == 3
        rig.cache.end(branch.lease)
        nodes = rig.cache.tree.match(PLAIN, np.array(tokens(24))).node
        assert len(rig.cache.tree.path(nodes)) == 2
        assert not len(rig.cache.tree.evict(1, 16))
        gate.set()
        rig.settle()
        rig.leave_l1()
        assert rig.cache.free_pages == 16
        assert rig.cache.tree.match(PLAIN, np.array(tokens(24))).l2_tokens == 24


@pytest.mark.case("C11")
def test_what_was_computed_on_a_missing_prefix_is_no_hit() -> None:
    """All layers were copied, and then the prefix turns out not to have arrived: the backup rolls back."""
    with cache_rig() as rig:
        of = begun(rig, 16)
        gate = threading.Event()
        rig.fault = held_at("draft", 4, gate)  # type: ignore[assignment]
        rig.forward([of])
        assert of.reservation is not None and of.reservation.complete
        of.reservation.doubt = lambda: TransferFailed("the prefix is not there")
        gate.set()
        rig.settle()
        assert (rig.cache.backups.counters.rolled_back, rig.cache.host.lanes.free_pages) == (1, 24)
        rig.cache.end(of.lease)


@pytest.mark.case("A7")
@pytest.mark.contract(41)
def test_pages_come_back_when_the_backup_that_reads_them_is_quiet() -> None:
    """A request is preempted while the backup of its pages waits: nobody gets them before it ran."""
    with cache_rig(l1_pages=6) as rig:
        gate, freed = threading.Event(), []
        rig.cache.freed = lambda: freed.append(rig.cache.free_pages)
        rig.fault = held_at("target", 0, gate)  # type: ignore[assignment]
        of = begun(rig, 16)
        batch = rig.cache.chunk([(of.reservation, 0, 4)])  # type: ignore[list-item]
        batch.layer_end("target", 0)
        table = set(of.table.tolist())
        assert of.lease.busy
        rig.cache.end(of.lease)
        assert (rig.cache.free_pages, rig.cache.leases) == (2, 0)
        assert rig.cache.allocate(3) is None
        assert [held.l1_pages for held in rig.cache.holds() if held.l1_pages] == [4]
        rig.cache.check_integrity()
        gate.set()
        rig.settle()
        assert freed[-1] == 6
        pages = rig.cache.allocate(6)
        assert pages is not None and table < set(pages.tolist())
        assert rig.cache.host.lanes.free_pages == 24
        rig.cache.release(pages)


@pytest.mark.case("A7")
def test_pages_of_a_failed_copy_stay_until_it_cannot_land() -> None:
    """A copy fails and lands later: pages of both tiers are held past the failure, until the landing."""
    with cache_rig() as rig:
        rig.fault = broken(0, lands_after_s=0.2)  # type: ignore[assignment]
        of = begun(rig, 16)
        rig.cache.chunk([(of.reservation, 0, 4)]).layer_end("target", 0)  # type: ignore[list-item]
        rig.until(lambda: of.reservation is not None and of.reservation.error is not None)
        rig.cache.end(of.lease)
        assert (rig.cache.free_pages, rig.cache.host.lanes.free_pages) == (12, 20)
        assert {held.reason for held in rig.cache.holds()} == {
            "an ended request's pages are being backed up",
            "a backup that failed may still land",
        }
        rig.settle()
        assert (rig.cache.free_pages, rig.cache.host.lanes.free_pages) == (16, 24)


def test_a_lost_copy_is_given_up_at_the_callers_deadline() -> None:
    """Nothing is heard of a copy: its pages are held with their age, and given back once, when the caller says so."""
    with cache_rig() as rig:
        rig.fault = lambda copy: CopyFault(lost=True) if copy.layer == 0 else None
        of = begun(rig, 16)
        rig.forward([of])
        rig.finish(of)
        rig.cache.end(of.lease)
        rig.backups.close()  # afterwards nothing moves; the words of it come too late
        rig.now[0] += 50
        assert rig.cache.give_up(60) == 0
        assert [(held.age_s, held.l2_pages) for held in rig.cache.holds()] == [(50, 4)]
        rig.now[0] += 20
        assert rig.cache.give_up(60) == 1
        assert (rig.cache.host.lanes.free_pages, rig.cache.tree.stats().tickets) == (24, 0)
        rig.loop.run()
        rig.cache.check_integrity()


def test_words_that_come_after_giving_up_are_ignored() -> None:
    """A copy is given up, then it is heard of, then its request ends: its pages come back at once, and once."""
    with cache_rig() as rig:
        gate = threading.Event()
        rig.fault = held_at("target", 0, gate)  # type: ignore[assignment]
        of = begun(rig, 16)
        rig.cache.chunk([(of.reservation, 0, 4)]).layer_end("target", 0)  # type: ignore[list-item]
        rig.now[0] += 61
        assert rig.cache.give_up(60) == 1
        gate.set()
        rig.settle()
        assert not of.lease.busy
        rig.cache.end(of.lease)
        assert (rig.cache.free_pages, rig.cache.host.lanes.free_pages) == (16, 24)


@pytest.mark.contract(39)
def test_what_no_layer_end_brought_is_copied_with_a_warning() -> None:
    """At the end of a forward the missing layers are copied at once, said so each time; a complete one says nothing."""
    with cache_rig() as rig:
        of = begun(rig, 16)
        rig.forward([of], chunk=0, chunks=2)
        assert of.reservation is not None and not of.reservation.complete
        for layer in rig.loads.copier.geometry.layers:
            for source in rig.loads.copier.sources(layer):
                for position in (2, 3):
                    rig.write(
                        int(of.table[position]), (0, *of.prompt[: (position + 1) * PAGE]), layer, source
                    )
        with structlog.testing.capture_logs() as logs:
            rig.finish(of)
            rig.cache.finish(of.reservation)
        late = rig.cache.chunk([(of.reservation, 0, 4)])
        late.layer_end("target", 0)  # everything was sent: it comes too late
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert rig.cache.backups.counters.fallbacks == 1
        rig.cache.end(of.lease)
        rig.settle()
        rig.leave_l1()
        again = rig.find(tokens(17))
        rig.settle()
        rig.require_bytes(tokens(17), PLAIN, again.prefix)
        assert len(again.prefix) == 4
        rig.cache.end(again)


@pytest.mark.case("D10")
@pytest.mark.contract(32)
def test_host_pages_are_reserved_on_all_ranks_or_on_none() -> None:
    """One rank's L2 is full: nothing is taken on the other, the backup is left out, the prompt is served."""
    with cache_rig(ranks=2, l1_pages=8, l2_pages=2) as rig:
        blocker = begun(rig, 8)  # a page on each rank
        before = [rig.cache.host.lanes.free_in(rank) for rank in (0, 1)]
        of = rig.begin(tokens(13, salt=1))
        assert of is not None and of.reservation is None
        assert [rig.cache.host.lanes.free_in(rank) for rank in (0, 1)] == before == [1, 1]
        assert rig.cache.backups.counters.skipped == 1
        rig.forward([of])
        rig.finish(of)
        assert rig.cache.cached_pages == 3
        rig.cache.end(of.lease)
        rig.cache.end(blocker.lease)


@pytest.mark.case("G8")
@pytest.mark.contract(82)
def test_a_full_l2_makes_room_beyond_the_deficit() -> None:
    """L2 is full of pages that nobody holds: a reservation evicts its deficit and a quarter of the lane beside."""
    with cache_rig(l2_pages=8, l2_room=0.25) as rig:
        for salt in range(4):
            rig.serve(tokens(8, salt))
        assert rig.cache.host.lanes.free_pages == 0
        of = begun(rig, 8, salt=5)
        assert (rig.cache.host.evicted_pages, rig.cache.host.lanes.free_pages) == (4, 2)
        rig.forward([of])
        rig.finish(of)
        rig.cache.end(of.lease)
        rig.settle()
        rig.serve(tokens(8, 6))
        assert rig.cache.host.lanes.free_pages == 0
        assert rig.cache.make_room() == 2
        assert rig.cache.host.lanes.free_pages == 2


@pytest.mark.case("G6")
def test_a_parent_that_was_left_out_is_backed_up_before_its_child() -> None:
    """What L2 had no room for comes with the next prompt that goes on from it, its parent first."""
    with cache_rig(l2_pages=4) as rig:
        blocker = begun(rig, 16, salt=9)
        of = rig.begin(tokens(8))
        assert of is not None and of.reservation is None
        rig.forward([of])
        rig.finish(of)
        rig.cache.end(of.lease)
        rig.cache.end(blocker.lease)
        child = begun(rig, 16)
        assert (child.reservation.first, len(child.reservation.l1)) == (2, 2)  # type: ignore[union-attr]
        rig.forward([child])
        rig.finish(child)
        rig.cache.end(child.lease)
        rig.settle()
        assert (rig.cache.backups.counters.backups, rig.cache.tree.stats().l2_pages) == (2, 4)


def test_a_node_is_backed_up_after_so_many_uses() -> None:
    """Write-through-selective copies the part of a prompt that was used twice, and nothing at its first use."""
    with cache_rig(policy="write_through_selective") as rig:
        rig.serve(tokens(24))
        assert rig.cache.host.lanes.free_pages == 24
        for uses in (1, 2):
            rig.cache.end(rig.find([*tokens(16), 1]))
            rig.settle()
            assert rig.cache.tree.stats().l2_pages == (0 if uses == 1 else 4)


def test_less_than_one_use_is_refused() -> None:
    """A number of uses that no page can be below is an error at start, with the setting's name."""
    with pytest.raises(SettingsError, match=r"hicache.selective_hits \(0\)"), cache_rig(selective_hits=0):
        pass


@pytest.mark.case("G10")
@pytest.mark.contract(16)
def test_pages_that_came_from_elsewhere_are_backed_up_when_they_are_kept() -> None:
    """Kept without a reservation, written to L2, evicted from L1, looked up: a hit, on the ranks of the L1 pages."""
    with cache_rig(ranks=2) as rig:
        lease = rig.find(tokens(21))
        own = rig.cache.allocate(6)
        assert own is not None
        lease.own = own
        table = lease.pages
        rig.cache.keep(lease, tokens(20), table, back_up=True)
        rig.cache.end(lease)
        rig.settle()
        stored = rig.cache.tree.node(lease.node).l2_pages
        assert (rig.cache.host.lanes.owners_of(stored) == rig.cache.lanes.owners_of(table[:5])).all()
        rig.leave_l1()
        again = rig.find(tokens(21))
        assert again.l2_tokens == 20
        rig.cache.end(again)


def test_an_ended_lease_reserves_nothing() -> None:
    """After the end, and without reuse, nothing is reserved; ending twice is an error."""
    with cache_rig() as rig:
        lease = rig.find(tokens(8))
        rig.cache.end(lease)
        assert rig.cache.reserve(lease, tokens(8), np.arange(2)) is None
        with pytest.raises(BadInput, match="a lease was ended twice"):
            rig.cache.end(lease)
    with cache_rig(reuse=False) as rig:
        assert rig.begin(tokens(8)) is not None
        for lease in rig.cache.live:
            assert not lease.backups
            rig.cache.end(lease)
