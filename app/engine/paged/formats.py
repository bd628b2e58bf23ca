"""How rows of a cache are stored in a page: one format a buffer, named in the geometry and the fingerprint.

    kv       [ K | V ] x [page_size tokens] x [heads * head_dim]          any dtype of this table's right side
    k, v     [page_size tokens] x [heads * head_dim]                      float32, bfloat16, float8_e4m3fn
    latent   [page_size tokens] x [512 latent, 64 rotary]                 float32, bfloat16
    latent   [page_size tokens] x [512 e4m3 | 4 scales f32 | 64 bf16]     float8_e4m3fn:656   (656 bytes a token)
    index    [page_size x 128 e4m3 | page_size x scale f32]               float8_e4m3fn:132   (132 bytes a token)

A row is one token's data of one layer. It crosses every interface between a model and a pool encoded, as `uint8`
bytes: nothing that handles rows can round them once more, and another dtype is refused.
A forward reads back what it has stored, its own rows included, so a page that was moved gives equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from app.errors import BadInput

E4M3_MAX = 448.0
_SCALE_BYTES = 4
_BLOCK = 128


class Codec(Protocol):
    """Between one row in the model's numbers and its bytes. `planes` is how a page orders a row's bytes.

    A page holds plane after plane, each with its part of every row: K and V one behind the other, say.
    """

    @property
    def name(self) -> str: ...

    @property
    def compute(self) -> torch.dtype:
        """What rows are decoded to."""
        ...

    @property
    def width(self) -> int:
        """Values a row has."""
        ...

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes a row takes in each plane."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """`[n, width]` in any float dtype to `[n, sum(planes)]` uint8."""
        ...

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """The other way, in the model's compute dtype."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Rows as they are, in `stored`; without scales, so eight bits saturate at 448."""

    stored: torch.dtype
    compute: torch.dtype
    widths: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.stored).removeprefix("torch.")

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def planes(self) -> tuple[int, ...]:
        return tuple(width * self.stored.itemsize for width in self.widths)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        if self.stored == torch.float8_e4m3fn:  # not every device's conversion saturates by itself
            rows = rows.clamp(-E4M3_MAX, E4M3_MAX)
        return rows.to(self.stored).contiguous().view(torch.uint8)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        return encoded.contiguous().view(self.stored).to(self.compute)


@dataclass(frozen=True, kw_only=True)
class ScaledLatent:
    """A latent in eight bits with a scale for each 128 values, and its rotary part in bfloat16."""

    latent: int
    rotary: int
    compute: torch.dtype

    @property
    def name(self) -> str:
        return f"float8_e4m3fn:{sum(self.planes)}"

    @property
    def width(self) -> int:
        return self.latent + self.rotary

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.latent + self.latent // _BLOCK * _SCALE_BYTES + self.rotary * 2,)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        quantised, scales = _quantise(rows[:, : self.latent].float().unflatten(1, (-1, _BLOCK)))
        rotary = rows[:, self.latent :].to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat([quantised.flatten(1), scales.flatten(1).view(torch.uint8), rotary], dim=1)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        blocks = self.latent // _BLOCK
        parts = encoded.split([self.latent, blocks * _SCALE_BYTES, self.rotary * 2], dim=1)
        quantised, scales, rotary = (part.contiguous() for part in parts)
        values = quantised.view(torch.float8_e4m3fn).float().unflatten(1, (blocks, _BLOCK))
        latent = (values * scales.view(torch.float32).unsqueeze(-1)).flatten(1)
        return torch.cat([latent.to(self.compute), rotary.view(torch.bfloat16).to(self.compute)], dim=1)


@dataclass(frozen=True, kw_only=True)
class IndexKey:
    """A sparse-attention index key in eight bits with one scale; the scales stand behind a page's keys."""

    width: int
    compute: torch.dtype

    @property
    def name(self) -> str:
        return f"float8_e4m3fn:{sum(self.planes)}"

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.width, _SCALE_BYTES)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        quantised, scales = _quantise(rows.float())
        return torch.cat([quantised, scales.unsqueeze(1).view(torch.uint8)], dim=1)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        quantised, scales = (part.contiguous() for part in encoded.split(list(self.planes), dim=1))
        values: torch.Tensor = quantised.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
        return values.to(self.compute)


def _quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last axis to e4m3 bytes and one float32 scale (1 where all values are 0)."""
    largest = values.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    quantised = (values / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantised.view(torch.uint8), scales.contiguous()


@dataclass(frozen=True, kw_only=True)
class PageFormat:
    """A codec and the page size: where a row's bytes lie in a page."""

    page_size: int
    codec: Codec

    @property
    def name(self) -> str:
        return self.codec.name

    @cached_property
    def row_bytes(self) -> int:
        return sum(self.codec.planes)

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.page_size * self.row_bytes

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self.codec.encode(rows)

    def store(
        self, region: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, encoded: torch.Tensor
    ) -> None:
        """Write row i to offset `offsets[i]` of page `pages[i]`; `region` is `[pages, item_bytes]` uint8.

        BadInput when the rows are not encoded: not uint8, or of another width.
        """
        if encoded.dtype != torch.uint8 or encoded.shape[1:] != (self.row_bytes,):
            raise BadInput(
                f"rows of {self.name} cross as uint8 [rows, {self.row_bytes}], "
                f"not as {encoded.dtype} {list(encoded.shape)}"
            )
        parts = encoded.contiguous().view(self._word).split(self._plane_words, dim=1)
        for plane, part in zip(self._planes(region), parts, strict=True):
            plane[pages, offsets] = part

    def gather(self, region: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The rows of whole pages, encoded: `[len(pages) * page_size, row_bytes]`."""
        parts = [plane[pages] for plane in self._planes(region)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return rows.flatten(0, 1).view(torch.uint8)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """Encoded rows in the model's compute dtype."""
        return self.codec.decode(encoded)

    def _planes(self, region: torch.Tensor) -> list[torch.Tensor]:
        """Views `[pages, page_size, words]` of the region."""
        sizes = [self.page_size * words for words in self._plane_words]
        parts = region.view(self._word).split(sizes, dim=1)
        return [part.unflatten(1, (self.page_size, -1)) for part in parts]

    @cached_property
    def _word(self) -> torch.dtype:
        """What copies move at a time: indexing costs as much for a byte as for eight."""
        words = (torch.int64, torch.int32, torch.int16)
        fitting = (w for w in words if all(size % w.itemsize == 0 for size in self.codec.planes))
        return next(fitting, torch.uint8)

    @cached_property
    def _plane_words(self) -> list[int]:
        return [size // self._word.itemsize for size in self.codec.planes]


def key_value_format(
    *, page_size: int, widths: tuple[int, ...], cache_dtype: str, compute: torch.dtype
) -> PageFormat:
    """Of K and V rows: `widths` has one entry for each part that the page keeps together."""
    return PageFormat(
        page_size=page_size,
        codec=Plain(stored=_stored(cache_dtype, compute), compute=compute, widths=widths),
    )


def latent_format(
    *, page_size: int, latent: int, rotary: int, cache_dtype: str, compute: torch.dtype
) -> PageFormat:
    """Of latent rows: eight bits take scales, other dtypes are plain."""
    codec: Codec
    if cache_dtype == "fp8":
        codec = ScaledLatent(latent=latent, rotary=rotary, compute=compute)
    else:
        codec = Plain(stored=_stored(cache_dtype, compute), compute=compute, widths=(latent + rotary,))
    return PageFormat(page_size=page_size, codec=codec)


def index_format(*, page_size: int, width: int, compute: torch.dtype) -> PageFormat:
    """Of index keys: always eight bits with a scale."""
    return PageFormat(page_size=page_size, codec=IndexKey(width=width, compute=compute))


def _stored(cache_dtype: str, compute: torch.dtype) -> torch.dtype:
    known = {
        "auto": compute,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
    }
    if cache_dtype not in known:
        raise BadInput(f"no page format is known for a cache in {cache_dtype!r}: {sorted(known)}")
    return known[cache_dtype]
