"""Page formats: sizes, rounding, and where a row's bytes lie."""

from __future__ import annotations

import pytest
import torch

from app.engine.paged.formats import PageFormat, index_format, key_value_format, latent_format
from app.errors import BadInput

PAGE = 64
F32 = torch.float32


def rows_of(count: int, width: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count + width)) * scale


def stored(form: PageFormat, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    region = torch.zeros(4, form.item_bytes, dtype=torch.uint8)
    form.store(region, positions // PAGE, positions % PAGE, form.encode(rows))
    return region


def test_an_fp8_latent_takes_656_bytes_a_token() -> None:
    """512 eight-bit values, four float32 scales and 64 rotary values in bfloat16 are 656 bytes a token."""
    form = latent_format(page_size=PAGE, latent=512, rotary=64, cache_dtype="fp8", compute=F32)
    assert (form.row_bytes, form.item_bytes, form.name) == (656, 64 * 656, "float8_e4m3fn:656")


def test_formats_of_one_model_have_names_of_their_own() -> None:
    """Every choice of cache dtype names another format, so that fingerprints differ."""
    names = {
        latent_format(page_size=PAGE, latent=512, rotary=64, cache_dtype=dtype, compute=F32).name
        for dtype in ("float32", "bfloat16", "fp8")
    }
    assert names == {"float32", "bfloat16", "float8_e4m3fn:656"}


def test_an_unknown_cache_dtype_is_refused() -> None:
    """A cache dtype without a format is refused, with the known ones named."""
    with pytest.raises(BadInput, match=r"int4.*bfloat16"):
        latent_format(page_size=PAGE, latent=512, rotary=64, cache_dtype="int4", compute=F32)


def test_the_fp8_latent_keeps_each_block_close_and_its_rotary_part_in_bfloat16() -> None:
    """A block is off by at most a sixteenth of each value or a step of its scale; rotary is plain bfloat16."""
    form = latent_format(page_size=PAGE, latent=512, rotary=64, cache_dtype="fp8", compute=F32)
    rows = rows_of(70, 576)
    rows[3] *= 1e-4
    rows[4, :128] = 0
    rows[5, 128:256] *= 1e4
    back = form.decode(form.encode(rows))
    blocks, returned = rows[:, :512].view(-1, 4, 128), back[:, :512].view(-1, 4, 128)
    allowed = torch.maximum(blocks.abs() / 16, blocks.abs().amax(-1, keepdim=True) / 448 / 512 * 1.01)
    assert bool(((blocks - returned).abs() <= allowed).all())
    assert torch.equal(back[4, :128], torch.zeros(128))
    assert torch.equal(back[:, 512:], rows[:, 512:].bfloat16().float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_a_round_trip_through_a_page_gives_the_rounded_rows(dtype: str) -> None:
    """What is read from pages equals what decoding gives at once, and rounding twice changes nothing."""
    for form in (
        latent_format(page_size=PAGE, latent=512, rotary=64, cache_dtype=dtype, compute=F32),
        key_value_format(page_size=PAGE, widths=(192, 192), cache_dtype=dtype, compute=F32),
        key_value_format(page_size=PAGE, widths=(192,), cache_dtype=dtype, compute=F32),
        key_value_format(page_size=PAGE, widths=(5, 3), cache_dtype=dtype, compute=F32),
        index_format(page_size=PAGE, width=128, compute=F32),
    ):
        rows = rows_of(100, form.codec.width)
        region = stored(form, rows, torch.arange(100))
        back = form.decode(form.gather(region, torch.tensor([0, 1])))[:100]
        once = form.decode(form.encode(rows))
        assert torch.equal(back, once)
        if dtype == "float32" and form.name == "float32":
            assert torch.equal(back, rows)


def test_keys_and_values_lie_one_behind_the_other_in_a_page() -> None:
    """A page of K and V together holds the keys of all its tokens, then the values."""
    form = key_value_format(page_size=PAGE, widths=(4, 4), cache_dtype="float32", compute=F32)
    rows = rows_of(64, 8)
    page = stored(form, rows, torch.arange(64))[0].view(F32).view(2, 64, 4)
    assert torch.equal(page[0], rows[:, :4]) and torch.equal(page[1], rows[:, 4:])


def test_eight_bit_keys_saturate() -> None:
    """K and V without a scale stop at 448 instead of becoming infinite or NaN."""
    form = key_value_format(page_size=PAGE, widths=(2,), cache_dtype="fp8", compute=F32)
    back = form.decode(form.encode(torch.tensor([[1000.0, -1e9], [1.0, -0.5]])))
    assert back.tolist() == [[448.0, -448.0], [1.0, -0.5]]
    assert form.item_bytes == 64 * 2


def test_an_index_page_holds_its_keys_and_behind_them_its_scales() -> None:
    """An index page is 64 keys of 128 bytes, then 64 float32 scales: the largest value decides a scale."""
    form = index_format(page_size=PAGE, width=128, compute=F32)
    rows = rows_of(64, 128)
    page = stored(form, rows, torch.arange(64))[0]
    assert form.item_bytes == 64 * 128 + 64 * 4
    assert torch.equal(page[64 * 128 :].view(F32), rows.abs().amax(-1) / 448)
    keys = page[: 64 * 128].view(torch.float8_e4m3fn).float().view(64, 128)
    assert torch.equal(keys.abs().amax(-1), torch.full((64,), 448.0))


@pytest.mark.case("C10")
def test_an_index_row_moves_alone() -> None:
    """Moving token 70 to 130 goes from page 1 offset 6 to page 2 offset 2 and leaves its neighbours alone."""
    form = index_format(page_size=PAGE, width=128, compute=F32)
    region = stored(form, rows_of(192, 128), torch.arange(192))
    before = region.clone()
    row = form.gather(region, torch.tensor([70 // PAGE]))[70 % PAGE].unsqueeze(0)
    form.store(region, torch.tensor([130 // PAGE]), torch.tensor([130 % PAGE]), row)
    after, rows = form.gather(region, torch.arange(3)), form.gather(before, torch.arange(3))
    assert torch.equal(after[130], rows[70])
    changed = torch.nonzero((after != rows).any(-1)).flatten().tolist()
    assert changed == [130]
    key, scale = slice(2 * 128, 3 * 128), slice(64 * 128 + 2 * 4, 64 * 128 + 3 * 4)
    touched = torch.nonzero(region[2] != before[2]).flatten().tolist()
    assert set(touched) <= {*range(key.start, key.stop), *range(scale.start, scale.stop)}
    assert torch.equal(region[2][key], before[1][6 * 128 : 7 * 128])


@pytest.mark.contract(137)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_an_index_key_in_another_dtype_than_bytes_is_refused(dtype: torch.dtype) -> None:
    """An index key crosses as uint8; another dtype of the same size is refused and nothing is written."""
    form = index_format(page_size=PAGE, width=128, compute=F32)
    region = torch.zeros(4, form.item_bytes, dtype=torch.uint8)
    where = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(BadInput, match=r"uint8 \[rows, 132\]"):
        form.store(region, where, where, torch.ones(1, 132).to(dtype))
    with pytest.raises(BadInput, match=r"uint8 \[rows, 132\]"):
        form.store(region, where, where, torch.ones(1, 128, dtype=torch.uint8))
    assert not region.any()
    assert form.encode(rows_of(1, 128)).dtype == torch.uint8
