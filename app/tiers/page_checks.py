"""Digests of pages at the crossings between the tiers: what was backed up has to be what is loaded.

A test mode: it reads every byte once more, and on CUDA copies pages to the host for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from app.core.digests import page_digests
from app.core.ids import PageArray
from app.tiers.device import DevicePool, readable

_Digests = npt.NDArray[np.uint64]
"""[items of a layer, pages]."""


class PageChecks:
    """The digests of all L2 pages that hold something, by layer. Pages are logical, in both tiers."""

    def __init__(self, pools: Sequence[DevicePool]) -> None:
        self._pools = tuple(pools)
        self._geometry = pools[0].geometry
        self._known: dict[int, dict[int, _Digests]] = {}

    def record(self, l1: PageArray, l2: PageArray) -> None:
        """L1 page l1[i] was backed up to l2[i]: its bytes, as they are in L1 now."""
        by_layer = {layer: self._digests(l1, layer) for layer in self._geometry.layers}
        for index, page in enumerate(l2.tolist()):
            self._known[page] = {layer: digests[:, index] for layer, digests in by_layer.items()}

    def forget(self, l2: PageArray) -> None:
        for page in l2.tolist():
            self._known.pop(page, None)

    def differing(self, l1: PageArray, l2: PageArray, layer: int) -> list[int]:
        """The pages of L2 whose bytes of a layer are not what was backed up, as they have arrived in L1."""
        now = self._digests(l1, layer)
        return [
            page
            for index, page in enumerate(l2.tolist())
            if page not in self._known or not np.array_equal(self._known[page][layer], now[:, index])
        ]

    def __len__(self) -> int:
        return len(self._known)

    def _digests(self, l1: PageArray, layer: int) -> _Digests:
        pools, places = readable(self._pools, l1)
        found = page_digests(self._geometry, pools, places, "full", (layer,))
        return np.array(found, dtype=np.uint64).reshape(-1, len(l1))
