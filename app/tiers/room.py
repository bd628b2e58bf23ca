"""Room in the lanes: how much to evict, never the exact deficit but past it, and which lanes new pages come from."""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

from app.core.lanes import OwnerLanes
from app.core.owners import plan_owners
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


def spread(count: int, room: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.int8]:
    """The owners of `count` new pages, as even as `room`, the most that each lane can ever give, allows.

    A range for each lane, in order, from lane `first` on. With too little room altogether it is not looked at.
    """
    owners = plan_owners(count, len(room), first)
    counts = np.bincount(owners, minlength=len(room))
    if (counts <= room).all() or room.sum() < count:
        return owners
    counts = np.minimum(counts, room)
    for _ in range(count - int(counts.sum())):
        # of those with room left the one with the fewest, then the roomiest
        behind = np.where(counts < room, counts, count)
        counts[np.lexsort((counts - room, behind))[0]] += 1
    order = (np.arange(len(room)) + first) % len(room)
    return np.repeat(order, counts[order]).astype(np.int8)
