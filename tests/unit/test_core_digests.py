"""Digests of pages."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from app import _native
from app.core.digests import Bytes3d, DigestMode, items, page_digests, require_equal_digests
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import PageArray
from app.errors import BadInput, Corruption, PageMismatch
from tests.support.interpreter import steps_during

GEOMETRY = CacheGeometry(
    page_size=4,
    buffers=(
        BufferSpec(owner="target", kind="kv", layer_ids=(0, 1, 5), item_bytes=64, dtype="uint8"),
        BufferSpec(owner="target", kind="index", layer_ids=(1,), item_bytes=12, dtype="uint8"),
    ),
)


def pools(pages: int, seed: int = 1) -> dict[str, Bytes3d]:
    random = np.random.default_rng(seed)
    return {
        b.name: random.integers(0, 256, (len(b.layer_ids), pages, b.item_bytes), dtype=np.uint8)
        for b in GEOMETRY.buffers
    }


def pages(*numbers: int) -> PageArray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize("mode", ["full", "sampled"])
def test_equal_bytes_at_other_pages_have_equal_digests(mode: DigestMode) -> None:
    """Digests depend on the bytes and their positions, not on the physical pages they lie in."""
    ours, theirs = pools(40), pools(40, seed=2)
    here, there = np.arange(20), np.random.default_rng(0).permutation(40)[:20]
    for name in ours:
        theirs[name][:, there] = ours[name][:, here]
    sent, landed = page_digests(GEOMETRY, ours, here, mode), page_digests(GEOMETRY, theirs, there, mode)
    assert sent == landed
    require_equal_digests(GEOMETRY, sent, landed, pages=there, mode=mode, room=7)


@pytest.mark.parametrize("layers", [None, [5], [1, 0], []])
@pytest.mark.parametrize("mode", ["full", "sampled", "off"])
@pytest.mark.parametrize("page_first", [False, True])
def test_digests_are_those_of_xxh3_in_the_order_of_items(
    mode: DigestMode, layers: list[int] | None, page_first: bool
) -> None:
    """One digest for each item that is checked, in wire order, as any xxh3 library computes it."""
    ours, where = pools(50), np.random.default_rng(4).permutation(50)[:37]
    for name, pool in ours.items() if page_first else ():
        ours[name] = np.ascontiguousarray(pool.swapaxes(0, 1)).swapaxes(0, 1)
        ours[name].setflags(write=False)
    expected = [
        xxhash.xxh3_64_intdigest(ours[spec.name][spec.slot(layer), where[position]].tobytes())
        for spec, layer, position in items(GEOMETRY, len(where), mode, layers)
    ]
    assert page_digests(GEOMETRY, ours, where, mode, layers) == expected
    assert page_digests(GEOMETRY, ours, where[:0], mode, layers) == []


@pytest.mark.parametrize("item_bytes", [1, 3, 8, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 70_001])
@pytest.mark.parametrize("threads", [0, 1, 5])
def test_items_of_any_size_are_digested_by_any_number_of_threads(item_bytes: int, threads: int) -> None:
    """Each digest is that of its own item, wherever it lies."""
    pool = np.random.default_rng(item_bytes).integers(0, 256, (2, 9, item_bytes), np.uint8)
    layers, where = np.divmod(np.random.default_rng(1).permutation(18), 9)
    expected = [
        xxhash.xxh3_64_intdigest(pool[layer, page].tobytes())
        for layer, page in zip(layers, where, strict=True)
    ]
    assert _native.digest_items(pool, layers, where, threads=threads).tolist() == expected


def test_foreign_layers_and_pages_are_named() -> None:
    """What is not of the pool is BadInput, lists of unequal length are PageMismatch; nothing is read then."""
    pool = pools(6)["target.kv"]
    for layers, where, wrong in (
        ([0, 3], [0, 0], "layer 3 is not of this pool of 3"),
        ([0, -1], [0, 0], "layer -1 is not of this pool of 3"),
        ([0, 1], [6, 0], "page 6 is not of this pool of 6"),
        ([0, 1], [0, -1], "page -1 is not of this pool of 6"),
    ):
        with pytest.raises(BadInput, match=wrong):
            _native.digest_items(pool, pages(*layers), pages(*where))
    with pytest.raises(PageMismatch, match="1 layers are given for 2 pages"):
        _native.digest_items(pool, pages(0), pages(0, 1))
    with pytest.raises(BadInput, match="page 6 is not of this pool of 6"):
        page_digests(GEOMETRY, pools(6), pages(0, 6), "full")
    with pytest.raises(BadInput, match="the bytes of an item are 2 apart"):
        _native.digest_items(pool[:, :, ::2], pages(0), pages(0))


def test_other_threads_run_while_pages_are_digested() -> None:
    """A long digest does not keep the interpreter to itself."""
    pool = np.zeros((1, 256, 1 << 20), np.uint8)
    zeros = np.zeros(256, np.int64)
    assert steps_during(lambda: _native.digest_items(pool, zeros, np.arange(256), threads=1)) >= 3


@pytest.mark.case("N3")
def test_one_flipped_bit_is_named() -> None:
    """In full mode each single flipped bit raises, naming buffer, layer, position, page and the rank that sent it."""
    ours, all_pages = pools(6), pages(3, 0, 5)
    sent = page_digests(GEOMETRY, ours, all_pages, "full")
    ours["target.kv"][2, 0, 63] ^= 1
    with pytest.raises(Corruption) as caught:
        require_equal_digests(
            GEOMETRY,
            sent,
            page_digests(GEOMETRY, ours, all_pages, "full"),
            pages=all_pages,
            first_position=4,
            mode="full",
            room=7,
            rank_of={5: 2}.get,
        )
    assert caught.value.message == (
        "page digest differs: target.kv layer 5 position 5, which is page 0 here, sent by rank 2"
    )
    place = {"layer": 5, "position": 5, "page": 0, "buffer": "target.kv"}
    assert caught.value.fields() == {"room": 7, "rank": 2, **place}


def test_sampling_always_checks_the_last_position() -> None:
    """Sampled items are every sixteenth of layer plus position, and the last position of every layer."""
    chosen = [(b.name, layer, position) for b, layer, position in items(GEOMETRY, 20, "sampled")]
    assert chosen == [
        ("target.kv", 0, 0),
        ("target.kv", 0, 16),
        ("target.kv", 0, 19),
        ("target.kv", 1, 15),
        ("target.kv", 1, 19),
        ("target.kv", 5, 11),
        ("target.kv", 5, 19),
        ("target.index", 1, 15),
        ("target.index", 1, 19),
    ]
    assert list(items(GEOMETRY, 20, "off")) == []


def test_lists_of_other_lengths_are_corruption() -> None:
    """A peer that computed another number of digests is told so."""
    with pytest.raises(Corruption, match="3 digests were sent and 2 computed"):
        require_equal_digests(GEOMETRY, [1, 2, 3], [1, 2], pages=np.zeros(1, np.int64), mode="full", room=7)


@pytest.mark.case("I6")
def test_digests_and_fingerprints_do_not_depend_on_the_hash_seed() -> None:
    """Two processes with different hash seeds compute the same page digests and the same fingerprint."""
    script = (
        "from tests.unit.test_core_digests import GEOMETRY, pools, page_digests, pages\n"
        "from tests.unit.test_core_geometry import fingerprint\n"
        "print(page_digests(GEOMETRY, pools(4), pages(2, 0, 3), 'full'), fingerprint().hash)\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert str(page_digests(GEOMETRY, pools(4), pages(2, 0, 3), "full")) in said[0]
