"""Digests of pages."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from app.core.digests import Bytes3d, DigestMode, items, page_digests, require_equal_digests
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import PageArray
from app.errors import Corruption

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
    require_equal_digests(GEOMETRY, sent, landed, positions=20, mode=mode, room=7)


@pytest.mark.case("N3")
def test_one_flipped_bit_is_named() -> None:
    """In full mode each single flipped bit raises, naming buffer, layer and position."""
    ours, all_pages = pools(6), pages(3, 0, 5)
    sent = page_digests(GEOMETRY, ours, all_pages, "full")
    ours["target.kv"][2, 0, 63] ^= 1
    with pytest.raises(Corruption) as caught:
        require_equal_digests(
            GEOMETRY, sent, page_digests(GEOMETRY, ours, all_pages, "full"), positions=3, mode="full", room=7
        )
    assert caught.value.message == "page digest differs: target.kv layer 5 position 1"
    assert caught.value.fields() == {"room": 7, "layer": 5, "position": 1}


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
        require_equal_digests(GEOMETRY, [1, 2, 3], [1, 2], positions=1, mode="full", room=7)


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
