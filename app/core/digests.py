"""Digests of pages, to compare what was sent with what has landed.

Both sides list the same items in the same order (buffer, layer, position), so a difference names its
place. `sampled` checks every item whose layer and position add up to a multiple of 16, and always the
last position, which is where off-by-one faults show.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from app import _native
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import PageArray
from app.errors import Corruption

DigestMode = Literal["off", "sampled", "full"]
SAMPLE_STRIDE = 16

Bytes3d = npt.NDArray[np.uint8]
"""One buffer's pool: uint8 [layers, pages, item_bytes]."""


def items(
    geometry: CacheGeometry, positions: int, mode: DigestMode, layers: Collection[int] | None = None
) -> Iterator[tuple[BufferSpec, int, int]]:
    """(buffer, logical layer, position) of every item that the mode checks, in wire order.

    `layers` leaves the others out; None is all of them.
    """
    if mode == "off":
        return
    for spec in geometry.buffers:
        for layer in spec.layer_ids:
            if layers is not None and layer not in layers:
                continue
            for position in range(positions):
                chosen = mode == "full" or (layer + position) % SAMPLE_STRIDE == 0
                if chosen or position == positions - 1:
                    yield spec, layer, position


def page_digests(
    geometry: CacheGeometry,
    pools: dict[str, Bytes3d],
    pages: PageArray,
    mode: DigestMode,
    layers: Collection[int] | None = None,
) -> list[int]:
    """xxh3 of each checked item, of the pages at positions 0..len(pages); read in place, without the GIL.

    BadInput on a page that a pool does not have.
    """
    found: list[int] = []
    for spec in geometry.buffers if mode != "off" else ():
        checked = [layer for layer in spec.layer_ids if layers is None or layer in layers]
        of_layers, positions = _checked(checked, len(pages), mode)
        if len(positions):
            slots = np.array([spec.slot(layer) for layer in checked], dtype=np.int64)
            digests = _native.digest_items(pools[spec.name], slots[of_layers], pages[positions])
            found += digests.tolist()
    return found


def _checked(layers: Sequence[int], positions: int, mode: DigestMode) -> tuple[PageArray, PageArray]:
    """What `items` lists of one buffer, as arrays: indices into `layers`, and positions."""
    if mode == "full":
        return np.divmod(np.arange(len(layers) * positions), max(positions, 1))
    chosen = np.add.outer(np.array(layers, dtype=np.int64), np.arange(positions)) % SAMPLE_STRIDE == 0
    chosen[:, -1:] = True
    of_layers, at = np.nonzero(chosen)
    return of_layers, at


def require_equal_digests(
    geometry: CacheGeometry,
    sent: Sequence[int],
    landed: Sequence[int],
    *,
    pages: PageArray,
    mode: DigestMode,
    room: int,
    first_position: int = 0,
    layers: Collection[int] | None = None,
    rank_of: Callable[[int], int | None] = lambda position: None,
) -> None:
    """Corruption, naming buffer, layer, position, page and rank, unless both lists are equal.

    `pages` are where they have landed, the first one at `first_position`; `rank_of` tells who has sent a position.
    """
    if len(sent) != len(landed):
        raise Corruption(f"{len(sent)} digests were sent and {len(landed)} computed", room=room)
    if list(sent) == list(landed):
        return
    for (spec, layer, position), ours, theirs in zip(
        items(geometry, len(pages), mode, layers), landed, sent, strict=True
    ):
        if ours != theirs:
            at, page = first_position + position, int(pages[position])
            rank = rank_of(at)
            sender = "" if rank is None else f", sent by rank {rank}"
            raise Corruption(
                f"page digest differs: {spec.name} layer {layer} position {at}, which is page {page} here{sender}",
                room=room,
                rank=rank,
                layer=layer,
                buffer=spec.name,
                position=at,
                page=page,
            )
