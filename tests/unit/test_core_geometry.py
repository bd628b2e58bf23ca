"""Buffer specs, the geometry and the fingerprint made of it."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.fingerprint import Fingerprint, build_fingerprint
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import Owner
from app.core.slots import SlotFormat
from app.errors import BadInput, FingerprintMismatch


def spec(
    *layers: int, owner: Owner = "target", kind: str = "kv", item_bytes: int = 1152, dtype: str = "bfloat16"
) -> BufferSpec:
    return BufferSpec(owner=owner, kind=kind, layer_ids=layers, item_bytes=item_bytes, dtype=dtype)


def geometry(*buffers: BufferSpec, page_size: int = 64) -> CacheGeometry:
    return CacheGeometry(page_size=page_size, buffers=buffers)


def fingerprint(built: CacheGeometry | None = None, **changed: Any) -> Fingerprint:
    values = {
        "geometry": built or geometry(spec(0, 1, 2)),
        "model": "toy",
        "model_revision": "r1",
        "compute_dtype": "bfloat16",
        "draft": None,
        "digest_mode": "full",
        "slots": SlotFormat(),
        "hidden_size": 64,
    }
    return build_fingerprint(**{**values, **changed})


def test_logical_layers_map_to_compact_slots() -> None:
    """A buffer of layers 3, 7 and 9 stores three layers; another layer is an error that names it."""
    some = spec(3, 7, 9)
    assert [some.slot(layer) for layer in (3, 7, 9)] == [0, 1, 2]
    assert some.pool_bytes(10) == 3 * 10 * 1152
    with pytest.raises(BadInput, match=r"target\.kv holds no layer 4") as caught:
        some.slot(4)
    assert caught.value.layer == 4


@pytest.mark.case("D5")
def test_page_bytes_add_each_buffers_own_items() -> None:
    """A target item of 1152 B and draft items of 2 x 4096 B add up exactly, over the layers that hold them."""
    both = geometry(
        spec(0, 1),
        spec(2, owner="draft", kind="k", item_bytes=4096),
        spec(2, owner="draft", kind="v", item_bytes=4096),
    )
    assert both.layers == (0, 1, 2)
    assert both.page_bytes() == 2 * 1152 + 2 * 4096
    assert both.page_bytes([2]) == 8192
    assert both.pool_bytes(5) == 5 * both.page_bytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec(), "ascending and unique"),
        (lambda: spec(2, 1), "ascending and unique"),
        (lambda: spec(1, 1), "ascending and unique"),
        (lambda: spec(1, item_bytes=0), "item_bytes of target.kv must be positive: 0"),
        (lambda: geometry(spec(1), page_size=0), "page_size must be positive: 0"),
        (lambda: geometry(), "uniquely named buffers"),
        (lambda: geometry(spec(1), spec(2)), "uniquely named buffers"),
        (lambda: geometry(spec(1, owner="draft"), spec(1)), "draft buffers follow the target's"),
    ],
)
def test_impossible_geometries_are_refused(make: Any, message: str) -> None:
    """Empty, repeated, unordered or misordered buffers raise and name what is wrong."""
    with pytest.raises(BadInput, match=message):
        make()


@pytest.mark.contract(135)
def test_equal_contracts_have_equal_fingerprints() -> None:
    """Two nodes that are built alike agree, part by part and in the hash, also after a trip through JSON."""
    import json

    ours, theirs = fingerprint(), Fingerprint(parts=json.loads(json.dumps(dict(fingerprint().parts))))
    ours.require_equal(theirs, "http://peer")
    assert ours.hash == theirs.hash


@pytest.mark.contract(135)
@pytest.mark.parametrize(
    ("other", "part", "shown"),
    [
        pytest.param(
            fingerprint(geometry(spec(0, 1, 2), page_size=16)),
            "page_size",
            "page_size: ours 64, theirs 16",
            marks=[pytest.mark.case("C14"), pytest.mark.case("I1")],
        ),
        pytest.param(
            fingerprint(geometry(spec(0, 1, 2, dtype="float8_e4m3fn"))),
            "buffer.target.kv.dtype",
            "buffer.target.kv.dtype: ours bfloat16, theirs float8_e4m3fn",
            marks=pytest.mark.case("I2"),
        ),
        (fingerprint(compute_dtype="float16"), "compute_dtype", "ours bfloat16, theirs float16"),
        (fingerprint(model_revision="r2"), "model_revision", "model_revision: ours r1, theirs r2"),
        (fingerprint(digest_mode="off"), "digest_mode", "digest_mode: ours full, theirs off"),
        (fingerprint(draft="mtp"), "draft", "draft: ours none, theirs mtp"),
        (
            fingerprint(slots=SlotFormat(hidden=16)),
            "draft_hidden_size",
            "draft_hidden_size: ours 0, theirs 16",
        ),
        (fingerprint(slots=SlotFormat(top_k=8)), "draft_top_k", "draft_top_k: ours 0, theirs 8"),
        (fingerprint(hidden_size=128), "hidden_size", "hidden_size: ours 64, theirs 128"),
        (fingerprint(reuse="exact/512"), "reuse", "reuse: ours any, theirs exact/512"),
        pytest.param(
            fingerprint(geometry(spec(0, 1, 3))),
            "buffer.target.kv.layers",
            "buffer.target.kv.layers: ours [0, 1, 2], theirs [0, 1, 3]",
        ),
    ],
)
def test_a_difference_is_shown(other: Fingerprint, part: str, shown: str) -> None:
    """One part that differs refuses the peer, and the error shows that part with both values."""
    ours = fingerprint()
    with pytest.raises(FingerprintMismatch) as caught:
        ours.require_equal(other, "http://peer")
    assert shown in caught.value.message
    assert "http://peer" in caught.value.message
    assert list(caught.value.details["differences"]) == [part]
    assert ours.hash != other.hash
    ours.require_equal(fingerprint(), "http://another")


@pytest.mark.contract(135)
@pytest.mark.case("D4")
def test_a_missing_state_buffer_is_shown() -> None:
    """State layers A and C on one side and A, B, C on the other differ, and so does a buffer one side lacks."""
    index = spec(0, 2, kind="index", item_bytes=132, dtype="uint8")
    wider = spec(0, 1, 2, kind="index", item_bytes=132, dtype="uint8")
    ours = fingerprint(geometry(spec(0, 1, 2), index))
    found = ours.differences(fingerprint(geometry(spec(0, 1, 2), wider)))
    assert found["buffer.target.index.layers"] == ([0, 2], [0, 1, 2])
    found = ours.differences(fingerprint(geometry(spec(0, 1, 2))))
    assert found["buffer.target.index.item_bytes"] == (132, "(absent)")
    assert found["state_layer_ids"] == ({"target.index": [0, 2]}, {})


def with_draft(*index: int, draft_index: tuple[int, ...] = (4,)) -> CacheGeometry:
    """Latent of four layers, an index of some, and a draft layer with both."""
    drafts = [spec(4, owner="draft", kind="latent", item_bytes=2304)]
    if draft_index:
        drafts.append(spec(*draft_index, owner="draft", kind="index", item_bytes=132, dtype="uint8"))
    return geometry(
        spec(0, 1, 2, 3, kind="latent"), spec(*index, kind="index", item_bytes=132, dtype="uint8"), *drafts
    )


@pytest.mark.contract(53)
def test_the_draft_part_is_told_by_start_and_count() -> None:
    """Draft buffers stand after the target's, and both ends compare where they start and how many there are."""
    parts = fingerprint(with_draft(0, 2)).parts
    assert parts["draft_buffers"] == {"start": 2, "count": 2}
    found = fingerprint(with_draft(0, 2)).differences(fingerprint(with_draft(0, 2, draft_index=())))
    assert found["draft_buffers"] == ({"start": 2, "count": 2}, {"start": 2, "count": 1})


@pytest.mark.contract(56)
@pytest.mark.case("D4")
def test_as_many_state_layers_with_other_ids_are_refused() -> None:
    """Index state on layers 0 and 2 is not that of layers 1 and 3, although the counts and bytes are equal."""
    ours, theirs = fingerprint(with_draft(0, 2)), fingerprint(with_draft(1, 3))
    with pytest.raises(
        FingerprintMismatch, match=r"buffer\.target\.index\.layers: ours \[0, 2\], theirs \[1, 3\]"
    ):
        ours.require_equal(theirs, "http://peer")


@pytest.mark.case("H4")
def test_state_that_one_side_lacks_is_refused() -> None:
    """A contract with draft index state and a peer without any: refused, by the name of the buffer."""
    ours, theirs = fingerprint(with_draft(0, 2)), fingerprint(with_draft(0, 2, draft_index=()))
    with pytest.raises(FingerprintMismatch, match=r"draft\.index\.item_bytes: ours 132, theirs \(absent\)"):
        ours.require_equal(theirs, "http://peer")


@pytest.mark.contract(57, 58)
def test_identity_is_fixed_before_compaction() -> None:
    """Target and draft state keep their logical layers beside compact storage: layer 2 is slot 1, layer 4 slot 0."""
    both = with_draft(0, 2)
    target, draft = both.buffers[1], both.buffers[3]
    assert (target.name, target.layer_ids, [target.slot(layer) for layer in (0, 2)]) == (
        "target.index",
        (0, 2),
        [0, 1],
    )
    assert (draft.name, draft.layer_ids, draft.slot(4)) == ("draft.index", (4,), 0)
    assert target.pool_bytes(10) == 2 * 10 * 132
    parts = fingerprint(both).parts["state_layer_ids"]
    assert parts == {"target.index": [0, 2], "draft.index": [4]}


@pytest.mark.case("D13")
def test_unequal_tensor_parallel_sizes_are_refused() -> None:
    """A peer that shares its heads out among two ranks has another contract, whatever its item sizes."""
    ours = fingerprint()
    theirs = Fingerprint(parts={**ours.parts, "tensor_parallel": 2})
    with pytest.raises(FingerprintMismatch, match="tensor_parallel: ours 1, theirs 2"):
        ours.require_equal(theirs, "http://peer")
