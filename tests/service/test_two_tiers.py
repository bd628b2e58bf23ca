"""Prefixes over both tiers in the life of requests: computed once, backed up, evicted, loaded, and the same output."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from app.errors import ClientGone, Corruption, TransferFailed
from app.service.caches import cache_report
from app.service.node import Node
from app.tiers.copy_faults import CopyFault
from app.tiers.descriptors import LayerCopy
from tests.support.harness import PAGE, Cluster, eventually, is_slot, prompt_of
from tests.tiers.cache_rig import held

CHUNK = 4 * PAGE
PRESSURE = ["write_through", "write_through_selective", "write_back"]
"""Write policies, over an L1 that is much smaller than what comes again."""


def sides(
    kind: str = "l2", model: str = "toy-dsa", ranks: int = 1, pages: int = 64, **hicache: Any
) -> tuple[Any, Any]:
    """Both nodes with caches off, with L1, or with both tiers; `pages` of L1 over all ranks."""
    tier = {"host_ratio": 4.0, "checks": "full", **hicache} if kind == "l2" else {}
    common = {
        "model": {"name": model},
        "cache": {"reuse": "off" if kind == "off" else "page", "pages": pages},
        "hicache": tier,
        "prefill": {"chunk_tokens": CHUNK, "max_input_tokens": min(pages, 48) * PAGE},
    }
    cp = {"size": ranks, "shared_kv": True} if ranks > 1 else {}
    cache = {**common["cache"], "pages": pages // ranks}
    return {**common, "cache": cache, "cp": cp}, common


def conversations(seed: int, count: int = 4, turns: int = 3) -> list[list[int]]:
    """Prompts of several turns that interleave; two of the conversations share a system prompt."""
    shared = prompt_of(5 * PAGE + 3, salt=99)
    texts = [[*shared, *prompt_of(20, salt=n)] if n % 2 else prompt_of(60, salt=n) for n in range(count)]
    order: list[list[int]] = []
    draws = random.Random(seed)
    for turn in range(turns):
        for n in draws.sample(range(count), count):
            order.append(list(texts[n]))
            texts[n] += prompt_of(25 + 11 * n, salt=100 * turn + n)
    return order


async def settled(cluster: Cluster) -> None:
    """Return when no copy is under way on any node."""
    for node in cluster.nodes:
        hicache = node.context.tiers.hicache
        if hicache is not None:
            await eventually(lambda hicache=hicache: not hicache.holds())  # type: ignore[misc]


async def all_out(cluster: Cluster) -> None:
    """Evict what nobody holds from L1, and overwrite it, so that the next hit comes from L2."""
    await settled(cluster)
    for node in cluster.nodes:
        cache = node.context.cache
        cache.lanes.release(cache.tree.evict(1, cache.pages))
        every = np.arange(cache.pages)
        for page in every[cache.lanes.is_free(every)].tolist():
            rank, physical = divmod(page, cache.lanes.pages)
            for buffer in node.context.pools[rank].buffers.values():
                buffer.tensor[:, physical] = 0xEE


@pytest.mark.contract(34, 140)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("model", ["toy", "toy-dsa"])
async def test_a_prefix_comes_back_from_the_host(cluster: Cluster, model: str, ranks: int) -> None:
    """Computed, backed up, evicted from L1: the next pass loads it on both sides, and gives the same output."""
    await cluster.start(*sides(model=model, ranks=ranks))
    prompt = prompt_of(11 * PAGE + 5)
    await cluster.serve(prompt)
    await all_out(cluster)
    legs = await cluster.serve(prompt)
    assert legs.prefill.facts["l2_tokens"] == 11 * PAGE
    assert legs.decode.facts["l2_tokens"] == 11 * PAGE
    assert legs.prefill.facts["cached_tokens"] == 11 * PAGE
    await settled(cluster)
    await cluster.free()
    for node in cluster.nodes:
        report = node.context.tiers.hicache.report()  # type: ignore[union-attr]
        assert report["tokens"]["l2_hits"] == 11 * PAGE
        assert report["loads"]["failed"] == 0


@pytest.mark.contract(47, 51)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["off", "l1", "l2", *PRESSURE])
async def test_conversations_are_the_same_with_every_cache(cluster: Cluster, kind: str, ranks: int) -> None:
    """Turns and shared beginnings give the local run's bits with no cache, with L1, with both, and under pressure."""
    if kind in PRESSURE:
        await cluster.start(*sides(ranks=ranks, pages=24, write_policy=kind, selective_hits=1))
    else:
        await cluster.start(*sides(kind, ranks=ranks))
    for prompt in conversations(seed=ranks):
        await cluster.serve(prompt, new_tokens=5)
        await settled(cluster)
    await cluster.free()
    evicted = [node.context.cache.evicted_pages for node in cluster.nodes]
    hits = [node.context.cache.hit_tokens for node in cluster.nodes]
    assert all(hits) is (kind != "off")
    if kind in PRESSURE:
        assert all(evicted)
    if kind == "write_through":
        # when the others have copied something depends on when the free room was restored
        assert all(node.context.tiers.hicache.l2_hit_tokens for node in cluster.nodes)  # type: ignore[union-attr]


@pytest.mark.case("A7", "A10")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("policy", PRESSURE)
async def test_random_aborts_lose_nothing(cluster: Cluster, policy: str, ranks: int) -> None:
    """Requests that are given up at random layers, under pressure: the others are right and all comes back."""
    await cluster.start(*sides(ranks=ranks, pages=24, write_policy=policy, selective_hits=1))
    draws = random.Random(5)
    brake = cluster.brake(cluster.prefill)
    for number, prompt in enumerate(conversations(seed=3, turns=4)):
        if number % 3 == 1:
            layer = draws.randrange(12)
            brake.at(lambda step, at, layer=layer: at == layer)  # type: ignore[misc]
            legs = cluster.start_both(prompt)
            await eventually(lambda legs=legs: brake.reached.is_set() or legs.prefill.life.ended)  # type: ignore[misc]
            draws.choice(legs.jobs).fail(ClientGone("gone"))
            brake.release()
            await legs.answered()
        else:
            await cluster.serve(prompt)
    await settled(cluster)
    await cluster.free()


@pytest.mark.contract(41)
async def test_an_aborted_prompt_leaves_nothing_in_the_host(cluster: Cluster) -> None:
    """Given up in the middle of its backup, a prompt is in neither tier, and the free counts are the first ones."""
    await cluster.start(*sides())
    brake = cluster.brake(cluster.prefill)
    hicache = cluster.prefill.context.tiers.hicache
    assert hicache is not None
    before = hicache.host.lanes.free_pages
    brake.at_layer(6, start=CHUNK)
    legs = cluster.start_both(prompt_of(12 * PAGE))
    await eventually(brake.reached.is_set)
    assert hicache.host.lanes.free_pages < before
    legs.decode.fail(ClientGone("gone"))
    await legs.decode.answered.wait()
    await eventually(lambda: legs.prefill.life.reason is not None)
    brake.release()
    await settled(cluster)
    await cluster.free()
    assert (hicache.host.lanes.free_pages, hicache.cached_pages) == (before, 0)


@pytest.mark.case("C11")
async def test_a_page_that_changed_in_the_host_is_not_decoded(cluster: Cluster) -> None:
    """A bit flips in L2: the request that loads the page fails with its place; the next one computes it again.

    So it is where a failed load is to fail its request.
    """
    await cluster.start(*sides(failed_load="fail"))
    prompt = prompt_of(8 * PAGE + 1)
    await cluster.serve(prompt)
    await all_out(cluster)
    pool = cluster.prefill.context.tiers.hosts[0]
    pool.layer("target.kv", 3)[:, 7] ^= 1
    legs = cluster.start_both(prompt)
    await legs.failed()
    assert isinstance(legs.prefill.life.reason, Corruption)
    assert legs.decode.life.reason is not None
    await settled(cluster)
    await cluster.free()
    again = await cluster.serve(prompt)
    assert again.prefill.facts["l2_tokens"] == 0


@pytest.mark.contract(20)
@pytest.mark.parametrize("end", ["copied", "given up", "out of time"])
async def test_a_load_waits_until_room_was_written_back(cluster: Cluster, end: str) -> None:
    """L1 is full of what L2 lacks: a hit in L2 waits until that is copied, and nothing that was computed is lost."""
    tight = {"write_policy": "write_back", "l1_room": 0.0, "l2_room": 0.0}
    prefill, decode = sides(pages=16, **tight)
    if end == "out of time":
        prefill["deadlines"] = {"queue_s": 0.3}
    await cluster.start(prefill, decode)
    first, second = prompt_of(12 * PAGE + 1), prompt_of(12 * PAGE + 1, salt=1)
    await cluster.serve(first)
    await cluster.serve(second)  # the first one was copied to L2 for it
    await settled(cluster)
    cache = cluster.prefill.context.tiers.hicache
    assert cache is not None
    assert (cache.tree.stats().l2_pages, cache.backups.counters.dropped) == (12, 0)
    gate = threading.Event()
    queue = cluster.prefill.context.tiers.queues[0]
    queue._faults = held(gate)
    try:
        legs = cluster.start_both(first)
        await eventually(lambda: cache.waiting)
        if end == "given up":
            legs.prefill.fail(ClientGone("gone"))
            await legs.failed()
            assert not cache.waiting
        elif end == "out of time":
            await eventually(lambda: not cache.waiting)
            assert cache.loads.counters.misses == 1
        else:
            gate.set()
            await cluster.expect_local(legs)
            facts = legs.prefill.facts
            # four pages were free: nine of the first prompt had to go for the second one's thirteen
            assert (facts["cached_tokens"], facts["l2_tokens"]) == (12 * PAGE, 9 * PAGE)
    finally:
        gate.set()
    if end == "out of time":
        await legs.answered()
    await settled(cluster)
    await cluster.free()
    assert cache.backups.counters.dropped == 0


@dataclass
class Torn:
    """Faults of the next load's copies of one layer; `done` counts them."""

    fault: CopyFault
    layer: int
    done: int = 0

    def __call__(self, copy: LayerCopy) -> CopyFault | None:
        if copy.layer != self.layer or self.done:
            return None
        self.done += 1
        return self.fault


def loads_of(node: Node) -> Any:
    hicache = node.context.tiers.hicache
    assert hicache is not None
    return hicache.loads.counters


FAULTS = {
    "fails": CopyFault(error=TransferFailed("torn")),
    "lands late": CopyFault(error=TransferFailed("torn"), lands_after_s=0.3),
    "is too late": CopyFault(delay_s=1.0),
}


@pytest.mark.case("C11")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("layer", [0, 5, 12])
@pytest.mark.parametrize("how", sorted(FAULTS))
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_what_a_failed_load_did_not_bring_is_computed(
    cluster: Cluster, side: str, how: str, layer: int, ranks: int
) -> None:
    """A copy of a load fails, lands after it has failed, or is too late: the request computes, with the same output."""
    await cluster.start(*sides(ranks=ranks, load_s=0.25 if how == "is too late" else 20.0))
    prompt = prompt_of(11 * PAGE + 5)
    await cluster.serve(prompt)
    await all_out(cluster)
    node = cluster.prefill if side == "prefill" else cluster.decode
    torn = Torn(FAULTS[how], layer)
    node.context.tiers.queues[1]._faults = torn
    legs = await cluster.serve([*prompt, 1, 2, 3])
    job = legs.prefill if side == "prefill" else legs.decode
    assert torn.done == 1
    counters = loads_of(node)
    assert (counters.recomputed, counters.recomputed_tokens) == (1, 11 * PAGE)
    assert (job.facts["recomputed_tokens"], job.facts["cached_tokens"]) == (11 * PAGE, 0)
    await settled(cluster)
    await cluster.free()
    assert counters.failed == 1
    node.context.tiers.queues[1]._faults = None
    again = await cluster.serve([*prompt, 1, 2, 3])
    assert again.prefill.facts["cached_tokens"] == again.decode.facts["cached_tokens"] == 11 * PAGE
    await settled(cluster)
    await cluster.free()


@pytest.mark.case("C11")
@pytest.mark.parametrize("ranks", [1, 4])
async def test_a_page_that_changed_in_the_host_is_computed_again(cluster: Cluster, ranks: int) -> None:
    """A bit of every page flips in L2, on both sides: neither reads it, the output is right, now and later."""
    await cluster.start(*sides(ranks=ranks))
    prompt = prompt_of(8 * PAGE + 1)
    await cluster.serve(prompt)
    await all_out(cluster)
    for node in cluster.nodes:
        for pool in node.context.tiers.hosts:
            pool.layer("target.kv", 3)[:, 7] ^= 1
    legs = await cluster.serve(prompt)
    assert [job.facts["recomputed_tokens"] for job in legs.jobs] == [8 * PAGE] * 2
    await settled(cluster)
    await cluster.free()
    assert [loads_of(node).recomputed for node in cluster.nodes] == [1, 1]
    for _ in range(2):  # as a hit in L1, and as what is in L2 alone
        await cluster.serve(prompt)
        await all_out(cluster)
    assert [loads_of(node).failed for node in cluster.nodes] == [1, 1]
    await cluster.free()


@pytest.mark.case("C11")
@pytest.mark.parametrize("digests", ["full", "off"])
async def test_a_load_that_fails_in_the_last_layer_sends_everything_again(
    cluster: Cluster, digests: str
) -> None:
    """Groups of a chunk have landed when the load of the draft fails: they are sent anew, and the bytes add up."""
    prefill, decode = sides()
    decode["cache"] = {**decode["cache"], "reuse": "off"}
    decode["hicache"] = {}
    for side in (prefill, decode):
        side["transfer"] = {"digests": digests}
    await cluster.start(prefill, decode)
    prompt = prompt_of(11 * PAGE + 5)
    await cluster.serve(prompt)
    await all_out(cluster)
    last = cluster.prefill.context.engine.geometry.layers[-1]
    torn = Torn(CopyFault(error=TransferFailed("torn"), delay_s=0.3), last)
    cluster.prefill.context.tiers.queues[1]._faults = torn
    before = len(cluster.writer.submitted)
    legs = await cluster.serve(prompt)
    page_bytes = cluster.prefill.context.engine.geometry.page_bytes()
    assert legs.prefill.facts["sent_bytes"] == 12 * page_bytes
    moved = sum(block.length for _, block in cluster.writer.submitted[before:] if not is_slot(block))
    assert moved > 12 * page_bytes
    await settled(cluster)
    await cluster.free()


@pytest.mark.case("C11")
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_other_pages_are_waited_for(cluster: Cluster, side: str) -> None:
    """L1 has no room for a prefix twice: it is computed when the failed load can no longer land, in its pages."""
    await cluster.start(*sides(pages=16, l1_room=0.0))
    prompt = prompt_of(11 * PAGE + 5)
    await cluster.serve(prompt)
    await all_out(cluster)
    node = cluster.prefill if side == "prefill" else cluster.decode
    node.context.tiers.queues[1]._faults = Torn(FAULTS["lands late"], 2)
    await cluster.serve(prompt)
    assert loads_of(node).recomputed == 1
    await settled(cluster)
    await cluster.free()


@pytest.mark.case("C11", "A10")
@pytest.mark.parametrize("digests", ["full", "off"])
async def test_a_room_can_be_given_up_before_it_is_computed_again(cluster: Cluster, digests: str) -> None:
    """A write of the first forward has not ended: nothing is computed in its place, and an abort leaves nothing."""
    await cluster.start(*({**side, "transfer": {"digests": digests}} for side in sides()))
    prompt = prompt_of(11 * PAGE + 5)
    await cluster.serve(prompt)
    await all_out(cluster)
    cluster.decode.context.tiers.hicache.flush()  # type: ignore[union-attr]
    layers = cluster.prefill.context.engine.geometry.layers
    torn = Torn(CopyFault(error=TransferFailed("torn"), delay_s=0.3), layers[-1])
    cluster.prefill.context.tiers.queues[1]._faults = torn
    cluster.writer.hold()
    legs = cluster.start_both(prompt)
    await eventually(lambda: torn.done and legs.prefill.lease and legs.prefill.lease.failed)
    await eventually(lambda: not len(cluster.prefill_rooms.fifos))
    await asyncio.sleep(0.05)  # it goes on, if it does not wait
    assert (loads_of(cluster.prefill).recomputed, legs.prefill.life.reason) == (0, None)
    legs.decode.fail(ClientGone("gone"))
    await legs.decode.answered.wait()
    await eventually(lambda: legs.prefill.life.reason is not None)
    cluster.writer.let_go()
    await settled(cluster)
    await cluster.free()
    assert loads_of(cluster.prefill).recomputed == 0


@pytest.mark.contract(19)
async def test_a_hit_that_was_not_loaded_is_computed_where_it_lay(cluster: Cluster) -> None:
    """Four ranks, a lane without room for a load: what is computed instead lies on the saved owners, and is kept."""
    await cluster.start(*sides(ranks=4, pages=16, l1_room=0.0))
    cache = cluster.prefill.context.tiers.hicache
    assert cache is not None
    prompt = prompt_of(12 * PAGE + 1)
    await cluster.serve(prompt)
    await all_out(cluster)
    taken = cache.lanes.alloc_pages_with_owners([0, 0])
    assert taken is not None
    longer = [*prompt, *prompt_of(2 * PAGE, salt=1)]
    legs = cluster.start_both(longer)
    await eventually(lambda: cluster.prefill.context.gate.waiting)
    assert cache.loads.counters.misses == 1
    cluster.prefill.context.gate.give(taken)
    await cluster.expect_local(legs)
    assert legs.prefill.facts["cached_tokens"] == 0
    await settled(cluster)
    key = np.array(longer)
    space = cluster.prefill.context.space()
    assert cache.tree.match(space, key, floor=True).l1_tokens == 14 * PAGE
    assert cache.tree.stats().l2_pages == 14
    await all_out(cluster)
    again = await cluster.serve(longer)
    assert again.prefill.facts["l2_tokens"] == 14 * PAGE
    await cluster.free()


@pytest.mark.case("I4")
@pytest.mark.parametrize("l2", [False, True])
async def test_salts_and_requests_that_are_not_stored(cluster: Cluster, l2: bool) -> None:
    """Another salt is a miss in every tier, and a request that is not to be stored leaves nothing behind."""
    await cluster.start(*sides("l2" if l2 else "l1"))
    prompt = prompt_of(6 * PAGE + 1)
    await cluster.serve(prompt, salt="a")
    await settled(cluster)
    assert (await cluster.serve(prompt, salt="b")).prefill.facts["cached_tokens"] == 0
    assert (await cluster.serve(prompt, salt="a")).prefill.facts["cached_tokens"] == 6 * PAGE
    other = prompt_of(6 * PAGE + 1, salt=5)
    await cluster.serve(other, store=False)
    await settled(cluster)
    legs = await cluster.serve(other, store=False)
    assert (legs.prefill.facts["cached_tokens"], legs.decode.facts["cached_tokens"]) == (0, 0)
    await cluster.free()


@pytest.mark.contract(36)
async def test_a_write_through_is_there_after_the_forward(cluster: Cluster) -> None:
    """Every whole page that was computed is in L2 after the last acknowledgement, by layer ends alone."""
    await cluster.start(*sides())
    await cluster.serve(prompt_of(10 * PAGE + 3))
    await settled(cluster)
    hicache = cluster.prefill.context.tiers.hicache
    assert hicache is not None
    report = hicache.report()
    assert report["l2"]["resident_pages"] == 10
    assert report["backups"]["fallbacks"] == 0
    await cluster.free()


@pytest.mark.parametrize("kind", ["l1", "l2"])
async def test_how_the_tiers_evict_and_write_is_shown(cluster: Cluster, kind: str) -> None:
    """The settings of a node reach its cache, and the report says which they are."""
    prefill, decode = sides(kind, **({"write_policy": "write_back"} if kind == "l2" else {}))
    prefill["cache"] = {**prefill["cache"], "eviction": "slru"}
    await cluster.start(prefill, decode)
    shown = [cache_report(node.context) for node in (cluster.prefill, cluster.decode)]
    assert [report["eviction"] for report in shown] == ["slru", "lhd"]
    assert [report["write_policy"] for report in shown] == ["write_back" if kind == "l2" else None] * 2
    await cluster.free()
