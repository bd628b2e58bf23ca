"""Rooms that ended before the other half of them arrived."""

from __future__ import annotations

import time

import pytest

from app.core.ids import RoomId
from app.errors import PeerAborted
from app.service.tombstones import Tombstones


def test_an_idle_node_has_no_tombstones_left() -> None:
    """What has expired is not counted any more, although no later room has swept it."""
    stones = Tombstones(keep_s=0.02)
    stones.set(RoomId(1), PeerAborted("given up", room=1))
    time.sleep(0.03)
    assert len(stones) == 0


def test_the_first_reason_stays() -> None:
    """A room's end is told as it was first set."""
    stones = Tombstones(keep_s=60)
    stones.set(RoomId(1), PeerAborted("first", room=1))
    stones.set(RoomId(1), PeerAborted("second", room=1))
    with pytest.raises(PeerAborted, match="first"):
        stones.require_alive(RoomId(1))
