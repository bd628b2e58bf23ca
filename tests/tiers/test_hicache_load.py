"""Hits in L2: pages of L1 on the saved owners, layers that come one by one, and loads that fail."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from app.core.prefix_tree import Residency
from app.errors import BadInput, Corruption, DeadlineExceeded, IntegrityError, TransferFailed
from app.tiers.copy_faults import CopyFault
from app.tiers.descriptors import LayerCopy
from app.tiers.leases import Lease
from app.tiers.paths import nodes_to
from tests.tiers.cache_rig import PAGE, PAIRS, PLAIN, CacheRig, cache_rig, held, tokens
from tests.tiers.rig import WAIT_S, Gate


def in_l2(rig: CacheRig, count: int, salt: int = 0, space: object = PLAIN) -> list[int]:
    """A prompt that is in L2 alone, and one token that goes on from it."""
    prompt = [*tokens(count, salt), 5]
    rig.serve(prompt, space)  # type: ignore[arg-type]
    rig.leave_l1()
    rig.copies.clear()
    return prompt


def read_all(rig: CacheRig, lease: Lease) -> None:
    """As a forward does."""
    for layer in rig.loads.copier.geometry.layers:
        lease.wait(layer)


def loads(fault: CopyFault, *layers: int) -> object:
    return lambda copy: fault if copy.direction == "load" and copy.layer in layers else None


@pytest.mark.case("G1")
@pytest.mark.contract(69)
@pytest.mark.contract(74)
def test_a_layer_is_waited_for_alone() -> None:
    """Layer 0 is read while layer 3 is on its way; whoever reads layer 3 blocks until KV and state have landed."""
    with cache_rig() as rig, ThreadPoolExecutor(1) as forward:
        prompt, gate = in_l2(rig, 16), threading.Event()
        third = threading.Event()

        def fault(copy: LayerCopy) -> CopyFault | None:
            if copy.layer == 3:
                third.set()
                assert gate.wait(WAIT_S)
            return None

        rig.fault = fault
        lease = rig.find(prompt)
        for layer in (0, 1, 2):
            lease.wait(layer)
        assert third.wait(WAIT_S)
        reader = forward.submit(lease.wait, 3)
        assert not reader.done() and not lease.loaded and lease.failed is None
        gate.set()
        reader.result(WAIT_S)
        lease.confirm(WAIT_S)
        assert lease.loaded
        pool, page = rig.tiers.l1[0], int(lease.prefix[0])
        for name in ("target.kv", "target.index", "draft.kv"):
            buffer = pool.buffers[name]
            assert (buffer.tensor[buffer.spec.slot(3), page] != 0xEE).any()
        rig.settle()
        rig.require_bytes(prompt, PLAIN, lease.prefix)
        rig.cache.end(lease)


@pytest.mark.case("G3")
@pytest.mark.contract(23)
@pytest.mark.contract(24)
def test_host_pages_are_held_until_the_load_is_acknowledged() -> None:
    """L1 has 0 free pages and enough that can be evicted, L2 is full: 8 pages are loaded, and not evicted meanwhile."""
    with cache_rig(l1_pages=9, l2_pages=16) as rig:
        prompt = in_l2(rig, 32)
        rig.serve(tokens(32, salt=1))
        other = rig.cache.allocate(1)
        assert other is not None
        assert (rig.cache.free_pages, rig.cache.host.lanes.free_pages) == (0, 0)
        gate = threading.Event()
        rig.fault = held(gate)
        lease = rig.find(prompt)
        assert (len(lease.prefix), lease.l2_tokens) == (8, 32)
        rig.cache.end(lease)
        assert rig.cache.pins == 0
        victims = rig.cache.tree.evict(2, 16)
        assert len(victims) == 8
        rig.cache.host.release(victims)
        gate.set()
        rig.settle()
        assert rig.cache.tree.match(PLAIN, np.array(prompt)).l1_tokens == 32
        rig.cache.release(other)


@pytest.mark.case("G3")
def test_nothing_is_held_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree refuses a load: pages and pin go back, and the error comes through."""
    with cache_rig() as rig:
        prompt = in_l2(rig, 16)

        def refuse(*args: object, **more: object) -> int:
            raise IntegrityError("no")

        with monkeypatch.context() as patch:
            patch.setattr(rig.cache.tree, "begin_load", refuse)
            with pytest.raises(IntegrityError, match="no"):
                rig.find(prompt)
        assert rig.counts() == rig.initial
        assert rig.cache.free_pages == 16


@pytest.mark.contract(14)
@pytest.mark.contract(19)
@pytest.mark.contract(22)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_load_goes_back_to_the_owners_of_its_pages(ranks: int) -> None:
    """Over several nodes, each page comes back to the rank that it left, in one run of its lane, byte for byte."""
    with cache_rig(ranks=ranks) as rig:
        rig.serve(tokens(20))
        prompt = in_l2(rig, 36)
        path = nodes_to(rig.cache.tree, rig.cache.tree.match(PLAIN, np.array(prompt)).node)
        owners = np.concatenate([info.owners for info in path])
        assert len(path) == 2
        lease = rig.find(prompt)
        assert (rig.cache.lanes.owners_of(lease.prefix) == owners).all()
        for rank in range(ranks):
            mine = lease.prefix[owners == rank]
            assert (np.diff(mine) == 1).all()
        rig.settle()
        rig.require_bytes(prompt, PLAIN, lease.prefix)
        rig.cache.end(lease)


@pytest.mark.contract(20)
def test_lanes_in_deficit_are_evicted_once_and_then_it_is_a_miss() -> None:
    """A load evicts from the lane that it lacks; when that cannot help it is a miss, counted, with nothing changed."""
    with cache_rig(ranks=2, l1_pages=5, l2_pages=16) as rig:
        prompt, other = in_l2(rig, 32), [*tokens(32, salt=1), 5]
        rig.serve(other[:-1])
        lease = rig.find(prompt)
        assert (lease.l2_tokens, rig.cache.evicted_pages) == (32, 8)
        rig.settle()
        rig.cache.end(lease)
        rig.leave_l1()
        # over both lanes there is room for eight pages, in the first one there is not for its four
        taken = rig.cache.lanes.alloc_pages_with_owners([0, 0])
        assert taken is not None
        missed = rig.find(other)
        assert (len(missed.prefix), missed.node, rig.cache.loads.counters.misses) == (0, 0, 1)
        rig.cache.end(missed)
        rig.cache.release(taken)
        found = rig.find(other)
        assert len(found.prefix) == 8
        rig.settle()
        rig.cache.end(found)


@pytest.mark.case("C11")
@pytest.mark.parametrize("layer", [0, 3, 4])
def test_a_prefix_that_does_not_arrive_is_never_used(layer: int) -> None:
    """A load fails: the reader gets the error, nothing computed on it is kept, its pages stay the request's till its
    end, and the next one loads anew."""
    with cache_rig() as rig:
        prompt = in_l2(rig, 16)
        rig.fault = loads(CopyFault(error=TransferFailed("torn")), layer)  # type: ignore[assignment]
        longer = [*prompt, *tokens(8, 1)]
        of = rig.begin(longer)
        assert of is not None and of.reservation is not None
        with pytest.raises(TransferFailed, match="torn"):
            read_all(rig, of.lease)
        with pytest.raises(TransferFailed, match="torn"):
            of.lease.confirm(WAIT_S)
        rig.settle()
        assert isinstance(of.lease.failed, TransferFailed) and not of.lease.loaded
        rig.cache.keep(of.lease, longer, of.table)
        joined = rig.find(prompt)
        assert not len(joined.prefix)  # nobody joins a load that failed
        rig.cache.end(joined)
        assert rig.cache.free_pages == 16 - 7
        rig.cache.end(of.lease)
        assert rig.cache.free_pages == 16
        assert rig.cache.tree.match(PLAIN, np.array(longer)).known_tokens == 16
        rig.fault = lambda copy: None
        again = rig.find(prompt)
        rig.settle()
        assert again.loaded and again.failed is None
        rig.require_bytes(prompt, PLAIN, again.prefix)
        rig.cache.end(again)
        assert rig.cache.loads.counters.failed == 1


@pytest.mark.case("C11")
def test_pages_of_a_failed_load_stay_until_it_cannot_land() -> None:
    """A load fails, its request ends, its bytes land later: the pages are nobody's before that."""
    with cache_rig() as rig:
        prompt = in_l2(rig, 16)
        rig.fault = loads(CopyFault(error=TransferFailed("torn"), lands_after_s=0.2), 0)  # type: ignore[assignment]
        lease = rig.find(prompt)
        rig.until(lambda: lease.failed is not None)
        rig.cache.end(lease)
        assert rig.cache.free_pages == 12
        assert [held.reason for held in rig.cache.holds()] == ["a load that failed may still land"]
        rig.settle()
        assert rig.cache.free_pages == 16


def test_a_lost_load_is_given_up_at_the_callers_deadline() -> None:
    """Nothing is heard of a load: its readers time out, and its pages come back when the caller says so, once."""
    with cache_rig(load_deadline_s=0.05) as rig:
        prompt = in_l2(rig, 16)
        rig.fault = loads(CopyFault(lost=True), 2)  # type: ignore[assignment]
        lease = rig.find(prompt)
        with pytest.raises(DeadlineExceeded, match="layer 2 was not loaded within"):
            read_all(rig, lease)
        rig.loads.close()
        rig.now[0] += 61
        assert rig.cache.give_up(60) == 1
        rig.loop.run()
        rig.cache.check_integrity()
        assert rig.cache.free_pages == 12
        rig.cache.end(lease)
        assert rig.cache.free_pages == 16


@pytest.mark.case("C13")
def test_a_hit_stops_before_a_unit_that_is_not_complete() -> None:
    """With units of four pages, seven pages in L2 are reused as four."""
    with cache_rig(grid=4 * PAGE) as rig:
        prompt = in_l2(rig, 28)
        lease = rig.find([*prompt, *tokens(9, 1)])
        assert (len(lease.prefix), lease.l2_tokens) == (4, 16)
        rig.settle()
        rig.cache.end(lease)


@pytest.mark.case("G7")
@pytest.mark.case("G15")
def test_loads_that_are_given_up_use_nothing_up() -> None:
    """Fifty requests find a prefix and end at once: no page or pin is gone, and the next one is served."""
    with cache_rig() as rig:
        prompt = in_l2(rig, 48)
        for _ in range(50):
            rig.cache.end(rig.find(prompt))
            assert rig.cache.pins == 0
            rig.settle()
            rig.leave_l1()
        assert rig.cache.free_pages == 16
        lease = rig.find(prompt)
        assert len(lease.prefix) == 12
        rig.settle()
        rig.require_bytes(prompt, PLAIN, lease.prefix)
        rig.cache.end(lease)


@pytest.mark.case("G11")
def test_what_is_found_cannot_be_evicted_before_it_is_loaded() -> None:
    """Between look-up and load everything is evicted that can be: the found path stays, in both tiers."""
    with cache_rig(l2_pages=16) as rig:
        prompt = in_l2(rig, 32)
        lease = rig.find(prompt, start=False)
        assert not len(rig.cache.tree.evict(2, 100))
        assert not len(rig.cache.tree.evict(1, 100))
        rig.cache.start_loads()
        rig.settle()
        rig.require_bytes(prompt, PLAIN, lease.prefix)
        rig.cache.end(lease)
        early = rig.find([*tokens(32), 6], start=False)
        rig.cache.end(early)


@pytest.mark.case("G11")
def test_a_batch_that_nobody_wants_any_more_is_not_started() -> None:
    """The only request of a batch ends before the start: its pages are free, and no copy is made."""
    with cache_rig() as rig:
        prompt = in_l2(rig, 32)
        rig.cache.end(rig.find(prompt, start=False))
        rig.cache.start_loads()
        rig.settle()
        assert (rig.cache.free_pages, rig.copies) == (16, [])


def test_a_prompt_joins_the_load_of_another() -> None:
    """Two requests for one prefix: it is loaded once, both wait for it, and it stays when the first one ends."""
    with cache_rig() as rig:
        prompt, gate = in_l2(rig, 16), threading.Event()
        rig.fault = held(gate)
        one, two = rig.find(prompt), rig.find(prompt)
        assert one.prefix.tolist() == two.prefix.tolist()
        assert not two.loaded
        rig.cache.end(one)
        gate.set()
        read_all(rig, two)
        rig.require_bytes(prompt, PLAIN, two.prefix)
        rig.cache.end(two)
        assert (rig.cache.loads.counters.loads, rig.cache.l2_hit_tokens, rig.cache.hit_tokens) == (1, 16, 16)


@pytest.mark.contract(71)
def test_ten_prompts_of_a_batch_are_loaded_by_one_descriptor() -> None:
    """One mapping for the batch, one copy of target and one of draft a layer, whatever the number of prompts."""
    with cache_rig(l1_pages=20, l2_pages=20) as rig:
        prompts = []
        for salt in range(10):
            prompts.append([*tokens(8, salt), 5])
            rig.serve(prompts[-1])
            rig.leave_l1()
        rig.copies.clear()
        builds = rig.loads.copier.statistics.steps["build"]
        leases = [rig.find(prompt, start=False) for prompt in prompts]
        rig.cache.start_loads()
        rig.settle()
        assert rig.loads.copier.statistics.steps["build"] - builds == 1
        assert len(rig.copies) == 6
        for lease, prompt in zip(leases, prompts, strict=True):
            assert lease.loaded
            rig.require_bytes(prompt, PLAIN, lease.prefix)
            rig.cache.end(lease)


@pytest.mark.case("G12")
def test_a_load_waits_for_the_last_reader_of_its_pages() -> None:
    """Pages of L1 whose old reader is still at work are written when its event has happened."""
    with cache_rig() as rig:
        prompt, reader = in_l2(rig, 16), Gate()
        lease = rig.find(prompt, after=[reader])
        assert reader.awaited.wait(WAIT_S)
        assert (rig.tiers.l1_bytes("target.kv")[:, lease.prefix] == 0xEE).all()
        reader.happen()
        rig.settle()
        rig.require_bytes(prompt, PLAIN, lease.prefix)
        rig.cache.end(lease)


@pytest.mark.case("H1")
@pytest.mark.contract(47)
@pytest.mark.contract(51)
@pytest.mark.parametrize("ranks", [1, 2])
def test_draft_pages_come_back_with_their_target(ranks: int) -> None:
    """Evicted and loaded again, draft pages are byte-equal too: they share number, owner and fate with their target."""
    with cache_rig(ranks=ranks) as rig:
        prompt = in_l2(rig, 32, space=PAIRS)
        lease = rig.find(prompt, PAIRS)
        assert len(lease.prefix) == 8
        rig.settle()
        rig.require_bytes(prompt, PAIRS, lease.prefix)
        rig.cache.end(lease)


@pytest.mark.case("H1")
@pytest.mark.contract(48)
def test_a_node_without_its_draft_is_no_hit() -> None:
    """A node of which only the target was written shortens the hit; loading it all the same names node and rank."""
    with cache_rig(ranks=2) as rig:
        rig.serve(tokens(16))
        prompt = in_l2(rig, 32)
        path = nodes_to(rig.cache.tree, rig.cache.tree.match(PLAIN, np.array(prompt)).node)
        host, last = rig.cache.host, path[1]
        host._marks[last.l2_pages] = 1  # the target's
        lease = rig.find(prompt)
        assert len(lease.prefix) == 4
        rig.settle()
        rig.cache.end(lease)
        with pytest.raises(
            IntegrityError, match=rf"of node {last.id} holds only \['target'\] in L2"
        ) as raised:
            host.require_sound(last.l2_pages, last.id)
        assert raised.value.rank == int(last.l2_pages[0]) // host.lanes.pages
        host.written(last.l2_pages, "draft")


@pytest.mark.contract(49)
@pytest.mark.parametrize("flush", [False, True])
def test_a_page_without_its_drafts_mark_is_not_given_up(flush: bool) -> None:
    """Of one page in L2 the draft is unaccounted for: making room raises with its place, and changes nothing."""
    with cache_rig(l2_pages=8) as rig:
        rig.serve(tokens(16))
        rig.serve(tokens(16, salt=1))
        host, tree = rig.cache.host, rig.cache.tree
        last = tree.node(tree.match(PLAIN, np.array(tokens(16))).node)
        page = int(last.l2_pages[-1])
        host._marks[page] = 1  # the target's
        make_room = rig.cache.flush if flush else lambda: host.evict(np.array([8]))
        marks, counts = host._marks.copy(), (rig.cache.free_pages, host.lanes.free_pages)
        with pytest.raises(
            IntegrityError, match=rf"page {page} of node {last.id} .* only \['target'\] written"
        ) as raised:
            make_room()
        assert raised.value.rank == 0
        assert (rig.cache.free_pages, host.lanes.free_pages) == counts
        assert (tree.stats().l1_pages, tree.stats().l2_pages) == (8, 8)
        assert np.array_equal(host._marks, marks)
        assert len(host.checks or ()) == 8
        with pytest.raises(IntegrityError, match=rf"page {page} "):
            host.release(last.l2_pages)
        assert host.lanes.free_pages == 0
        host.written(last.l2_pages, "draft")


@pytest.mark.contract(50)
@pytest.mark.case("O6")
def test_a_flush_says_what_stays() -> None:
    """While one prefix is leased and another is being loaded, a flush frees the rest and counts what stayed."""
    with cache_rig(l1_pages=24) as rig:
        loading = in_l2(rig, 16, salt=1)
        rig.serve(tokens(16))
        rig.serve(tokens(8, salt=2))
        gate = threading.Event()
        rig.fault = held(gate)
        lease = rig.find([*tokens(16), 5])
        rig.cache.end(rig.find(loading))
        done = rig.cache.flush()
        assert not done.complete
        assert (done.l1_pages, done.l2_pages) == (2, 2)
        assert (done.l1_stayed, done.l2_stayed, done.leases, done.copies) == (8, 8, 1, 1)
        rig.require_bytes(tokens(16), PLAIN, lease.prefix)
        rig.cache.end(lease)
        gate.set()
        rig.settle()
        assert rig.cache.flush().complete
        assert not len(rig.cache.host.checks or ())
        assert not rig.cache.host._marks.any()


def test_a_namespace_is_forgotten_alone() -> None:
    """A purge frees one tenant's pages in both tiers and leaves the others'."""
    with cache_rig() as rig:
        rig.serve(tokens(16), PAIRS)
        rig.serve(tokens(16))
        assert rig.cache.purge(PAIRS).l1_pages == 3
        lost, kept = rig.find(tokens(16), PAIRS), rig.find(tokens(17))
        assert (len(lost.prefix), len(kept.prefix)) == (0, 4)
        rig.cache.end(lost)
        rig.cache.end(kept)
        assert rig.cache.host.lanes.free_pages == 20


def test_a_page_that_changed_in_l2_is_found_out() -> None:
    """One flipped byte in L2: its reader fails with the page named, it is counted, and it is no hit any more."""
    with cache_rig() as rig:
        rig.serve(tokens(8))
        prompt = in_l2(rig, 16)
        page = int(rig.cache.tree.load_pages(rig.cache.tree.match(PLAIN, np.array(prompt)).node)[3])
        rig.tiers.l2[0].layer("draft.index", 4)[page, 5] ^= 1
        lease = rig.find(prompt)
        with pytest.raises(Corruption, match=f"page {page} of L2 has changed") as raised:
            read_all(rig, lease)
        assert raised.value.layer == 4
        rig.settle()
        rig.cache.end(lease)
        assert rig.cache.loads.counters.corrupt_pages == 1
        again = rig.find(prompt)
        assert len(again.prefix) == 2
        rig.settle()
        rig.cache.end(again)


def test_nobody_waits_and_a_changed_page_is_found_out_all_the_same() -> None:
    """The request has ended before its load: what came back wrong does not become readable in L1."""
    with cache_rig() as rig:
        prompt = in_l2(rig, 16)
        rig.tiers.l2[0].layer("target.kv", 1)[0, 5] ^= 1
        rig.cache.end(rig.find(prompt))
        rig.settle()
        assert (rig.cache.free_pages, rig.cache.loads.counters.corrupt_pages) == (16, 1)


@pytest.mark.contract(28)
@pytest.mark.contract(29)
@pytest.mark.contract(33)
def test_a_valid_tail_is_backed_up_and_loaded_as_a_page() -> None:
    """100 tokens of 64 a page, in small: 6 of 4 take two pages in both tiers, target and draft, and 6 are matched."""
    with cache_rig() as rig:
        key, own = np.array(tokens(6)), rig.cache.allocate(2)
        assert own is not None
        node = rig.cache.tree.insert(PLAIN, key, own, pin=True).node
        rig.cache.writes.back_up(node)
        rig.settle()
        assert rig.cache.host.lanes.free_pages == 22
        rig.cache.tree.unpin(node)
        rig.leave_l1()
        assert rig.cache.tree.match(PLAIN, key).l2_tokens == 6
        assert rig.cache.tree.match(PLAIN, key, floor=True).tokens == 4
        lease = rig.cache._open(PLAIN)
        assert rig.cache.reads.load(lease, key, 6, ())
        rig.cache.start_loads()
        rig.settle()
        assert lease.loaded and len(lease.prefix) == 2
        assert rig.cache.tree.match(PLAIN, key).l1_tokens == 6
        rig.cache.end(lease)
        rig.leave_l1()
        floored = rig.find([*tokens(6), 9])
        assert (len(floored.prefix), len(nodes_to(rig.cache.tree, floored.node))) == (1, 1)
        rig.settle()
        rig.cache.end(floored)


def test_a_prompt_computed_on_other_ranks_keeps_what_fits() -> None:
    """The prefix is in L2 on other owners and was not loaded: keeping goes up to it, and no page is lost."""
    with cache_rig(ranks=2, l1_pages=4, l2_pages=16) as rig:
        rig.serve(tokens(8, salt=3))
        prompt = in_l2(rig, 16)
        owners = rig.cache.tree.load_owners(rig.cache.tree.match(PLAIN, np.array(prompt)).node)
        lease = rig.cache._open(PLAIN)
        own = rig.cache.lanes.alloc_pages_with_owners([*(1 - owners), 0])
        assert own is not None
        lease.own = own
        rig.cache.keep(lease, [*prompt, 1, 1, 1], lease.own)
        assert len(lease.own) == 5 and lease.node == 0
        rig.cache.end(lease)


@pytest.mark.case("C11")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lease_goes_on_without_what_did_not_arrive(ranks: int) -> None:
    """Half of a prefix is in L1, the load of the rest fails: that half stays, and the lost pages are out of reach."""
    with cache_rig(ranks=ranks, l1_pages=32 // ranks, l2_pages=32) as rig:
        prompt = in_l2(rig, 32)
        half = rig.find(prompt[:17])
        half.confirm(WAIT_S)
        rig.settle()
        rig.cache.end(half)
        rig.fault = loads(CopyFault(error=TransferFailed("torn"), lands_after_s=0.05), 3)  # type: ignore[assignment]
        of = rig.begin([*prompt, *tokens(8, 1)])
        assert of is not None and of.reservation is not None
        assert (len(of.lease.prefix), of.lease.l2_tokens) == (8, 16)
        lost, own = of.lease.prefix[4:], of.lease.own
        with pytest.raises(TransferFailed, match="torn"):
            rig.forward([of])
        assert rig.cache.forsake(of.lease) == 4
        assert (len(of.lease.prefix), of.lease.loads, of.lease.failed) == (4, [], None)
        assert of.reservation.error is not None
        rig.require_bytes(prompt, PLAIN, of.lease.prefix)
        new = rig.cache.allocate(4, of.lease)
        assert new is not None and not np.isin(new, lost).any()
        of.lease.own = np.concatenate([new, own])
        of.table, of.reservation = of.lease.pages, None
        rig.settle()  # it lands now
        assert rig.cache.lanes.is_free(lost).all()
        rig.fault = lambda copy: None
        rig.forward([of])
        rig.cache.keep(of.lease, of.prompt, of.table, back_up=True)
        found = rig.cache.tree.match(PLAIN, np.array(of.prompt))
        assert found.l1_tokens == len(of.prompt) // PAGE * PAGE
        rig.require_bytes(of.prompt, PLAIN, found.pages)
        rig.cache.end(of.lease)
        counters = rig.cache.loads.counters
        assert (counters.recomputed, counters.recomputed_tokens) == (1, 16)
        rig.settle()
        assert rig.cache.tree.stats().l2_pages == len(of.prompt) // PAGE


@pytest.mark.case("C11")
def test_two_that_share_a_failed_load_go_on_alone() -> None:
    """Two requests wait for one load: the first to go on takes nothing away from the other, which does the same."""
    with cache_rig(l1_pages=32) as rig:
        prompt = in_l2(rig, 16)
        gate = threading.Event()

        def fault(copy: LayerCopy) -> CopyFault:
            assert gate.wait(WAIT_S)
            return CopyFault(error=TransferFailed("torn"))

        rig.fault = fault
        first, second = (rig.find([*prompt, *tokens(8, salt)]) for salt in (1, 2))
        assert first.loads == second.loads != []
        lost = first.prefix
        gate.set()
        rig.settle()
        for lease in (first, second):
            assert lease.failed is not None
            assert not rig.cache.lanes.is_free(lost).any()  # somebody has them in its page table
            assert rig.cache.forsake(lease) == 4
        assert rig.cache.lanes.is_free(lost).all()
        rig.cache.end(first)
        rig.cache.end(second)


@pytest.mark.case("C11")
def test_what_remains_of_a_prefix_is_on_the_grid() -> None:
    """Three pages are in L1 and the grid is two: the third one is computed again as well, elsewhere."""
    with cache_rig(grid=2 * PAGE) as rig:
        prompt = in_l2(rig, 24)
        lease = rig.cache._open(PLAIN, prompt[:13])
        assert rig.cache.reads.load(lease, np.array(prompt[:12]), 12, ())
        rig.cache.start_loads()
        rig.settle()
        rig.cache.end(lease)
        rig.fault = loads(CopyFault(error=TransferFailed("torn")), 0)  # type: ignore[assignment]
        lease = rig.find([*prompt, 1])
        assert (len(lease.prefix), lease.l2_tokens) == (6, 12)
        rig.settle()
        assert rig.cache.forsake(lease) == 4
        assert len(lease.prefix) == 2
        rig.cache.end(lease)


def test_only_a_failed_load_is_given_up() -> None:
    """A prefix that has arrived, and one that never was in L2, are not to be computed again."""
    with cache_rig() as rig:
        lease = rig.find(in_l2(rig, 16))
        lease.confirm(WAIT_S)
        with pytest.raises(BadInput, match="no load"):
            rig.cache.forsake(lease)
        rig.settle()
        rig.cache.end(lease)


@pytest.mark.case("C11")
def test_a_load_that_was_waited_for_in_vain_has_failed() -> None:
    """A layer is not there in time: the load has failed for everybody, also when it lands after all."""
    with cache_rig(load_deadline_s=0.05) as rig:
        prompt = in_l2(rig, 16)
        gate = threading.Event()
        rig.fault = held(gate)
        lease = rig.find(prompt)
        with pytest.raises(DeadlineExceeded, match="layer 0"):
            lease.wait(0)
        gate.set()
        rig.settle()
        assert isinstance(lease.failed, DeadlineExceeded) and not lease.loaded
        assert rig.cache.forsake(lease) == 4
        rig.cache.end(lease)
        assert rig.cache.cached_pages == 0


@pytest.mark.contract(19)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_computed_again_goes_to_the_owners_of_its_copy(ranks: int) -> None:
    """A hit of which the last page is not to be loaded: that page is computed on the rank that has its copy."""
    with cache_rig(ranks=ranks, l1_pages=16 // ranks, l2_pages=16) as rig:
        prompt = tokens(20)
        rig.serve(prompt, PAIRS)
        rig.leave_l1()
        found = rig.cache.tree.match(PAIRS, np.array(prompt), touch=False)
        owners = rig.cache.tree.load_owners(found.node)
        assert (found.l1_tokens, found.tokens) == (0, 16)
        taken = rig.cache.lanes.alloc_pages_with_owners([int(owners[3])])  # another lane is the roomiest now
        assert taken is not None
        lease = rig.cache.find(PAIRS, prompt, most=12)
        own = rig.cache.allocate(2, lease)
        assert own is not None
        assert rig.cache.lanes.owners_of(own)[0] == owners[3]
        lease.own = own
        rig.settle()
        rig.cache.keep(lease, prompt, lease.pages)
        assert len(lease.own) == 1
        assert rig.cache.tree.match(PAIRS, np.array(prompt), touch=False).l1_tokens == 16
        rig.cache.end(lease)
        rig.cache.release(taken)


def test_a_prefix_on_one_lane_leaves_the_rest_to_the_others() -> None:
    """A prefix has all pages of a lane: the request's own are of the other lanes, and it does not wait for ever."""
    with cache_rig(ranks=4, l1_pages=4, l2_pages=16) as rig:
        own = rig.cache.lanes.alloc_pages_with_owners([0] * 4)
        assert own is not None
        lease = rig.cache._open(PLAIN)
        lease.own = own
        rig.cache.keep(lease, tokens(16), own)
        rig.cache.end(lease)
        lease = rig.find([*tokens(16), *tokens(48, salt=1)])
        rest = rig.cache.allocate(12, lease)
        assert rest is not None
        assert np.bincount(rig.cache.lanes.owners_of(rest)).tolist() == [0, 4, 4, 4]
        rig.cache.release(rest)
        rig.cache.end(lease)


def test_owners_too_uneven_for_the_lanes_are_not_kept_to() -> None:
    """A copy has more pages of a lane than the prefix leaves of it: the request gets others, at once."""
    with cache_rig(ranks=2, l1_pages=4, l2_pages=16) as rig:
        lease = rig.cache._open(PLAIN)
        own = rig.cache.lanes.alloc_pages_with_owners([0] * 4)
        assert own is not None
        lease.own = own
        rig.cache.keep(lease, tokens(16), own, back_up=True)
        rig.cache.end(lease)
        rig.settle()
        rig.leave_l1()
        taken = rig.cache.lanes.alloc_pages_with_owners([0])
        assert taken is not None
        lease = rig.find([*tokens(16), *tokens(8, salt=1)])
        assert (len(lease.prefix), rig.cache.loads.counters.misses) == (0, 1)
        assert rig.cache.allocate(6, lease) is None  # the lane's four pages will be there
        lease.prefix = taken  # now they cannot be
        other = rig.cache.allocate(6, lease)
        assert other is not None
        lease.prefix = taken[:0]
        rig.cache.release(np.concatenate([other, taken]))
        rig.cache.end(lease)


def test_the_report_counts_by_tier() -> None:
    """Occupancy resident and in flight, hits by tier, pins by age, fragmentation."""
    with cache_rig() as rig:
        prompt, gate = in_l2(rig, 16), threading.Event()
        rig.fault = held(gate)
        lease = rig.find(prompt)
        of = rig.begin(tokens(8, salt=4))
        assert of is not None
        rig.now[0] += 30
        seen = rig.cache.report()
        assert (seen["l1"]["in_flight_pages"], seen["l1"]["resident_pages"]) == (4, 0)
        assert (seen["l2"]["in_flight_pages"], seen["l2"]["resident_pages"]) == (2, 4)
        assert (seen["tokens"]["l1_hits"], seen["tokens"]["l2_hits"]) == (0, 16)
        assert seen["pins_by_age_s"]["<60"] == 1
        assert (seen["l1"]["largest_extent"], seen["l1"]["fragmentation"]) == (10, 0.0)
        assert seen["holds"][0]["reason"] == "a load is written"
        rig.cache.end(of.lease)
        rig.cache.end(lease)
        gate.set()


def test_a_loading_node_is_not_readable_in_l1() -> None:
    """Until the acknowledgement a loaded node counts for L2 alone."""
    with cache_rig() as rig:
        prompt, gate = in_l2(rig, 16), threading.Event()
        rig.fault = held(gate)
        lease = rig.find(prompt)
        assert rig.cache.tree.node(lease.node).state == Residency.LOADING
        assert rig.cache.tree.match(PLAIN, np.array(prompt)).l1_tokens == 0
        rig.cache.end(lease)
        gate.set()
