"""How much to evict: never the exact deficit, but past it, up to a target of free pages in each lane."""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

from app.core.lanes import OwnerLanes
from app.errors import BadInput


def room_pages(lanes: OwnerLanes, fraction: float) -> int:
    """The target of each lane: that part of its pages. BadInput outside 0..1."""
    if not 0 <= fraction < 1:
        raise BadInput(f"free room is a part of 0 to 1 of a lane, not {fraction:g}")
    return ceil(lanes.pages * fraction)


def shortfall(
    lanes: OwnerLanes, room: int, owners: npt.NDArray[np.int8] | None = None
) -> npt.NDArray[np.int64]:
    """Pages to evict of each lane, so that `owners` can be served and `room` pages are free afterwards."""
    free = np.array([lanes.free_in(lane) for lane in range(lanes.lanes)], dtype=np.int64)
    wanted = np.zeros(lanes.lanes, dtype=np.int64)
    if owners is not None:
        wanted += np.bincount(owners, minlength=lanes.lanes)
    missing: npt.NDArray[np.int64] = np.maximum(wanted + room - free, 0)
    return missing
