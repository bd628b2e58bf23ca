"""The accounting of one peer's window."""

from __future__ import annotations

import pytest

from app.errors import IntegrityError
from app.transfer.base import Batch, Block
from app.transfer.window import Descriptor, PeerWindow
from tests.transfer.rig import PEER


def batch(deadline_s: float = 100.0) -> Batch:
    return Batch(number=1, session=PEER, blocks=1, total_bytes=10, deadline_s=deadline_s)


def descriptor(of: Batch, length: int = 10) -> Descriptor:
    return Descriptor(batch=of, block=Block(0, 0, length))


def take(window: PeerWindow, *, now: float = 0.0, most: int = 9, most_bytes: int = 1000) -> Descriptor | None:
    found = window.next(now, most, most_bytes)
    if found is not None:
        window.start(found)
    return found


def retry(window: PeerWindow, of: Batch, not_before_s: float) -> None:
    window.retry(descriptor(of), not_before_s=not_before_s)


def test_counts_follow_a_batch_to_its_end() -> None:
    """A batch is left while any of its writes is queued or in the engine, and forgotten after the last."""
    window, one = PeerWindow(PEER), batch()
    for _ in range(2):
        window.extend(one, [descriptor(one)])
    first, second = take(window), take(window)
    assert first is not None
    assert second is not None
    assert (window.left(one), window.busy, window.waiting) == (2, True, False)
    window.end(first)
    assert window.left(one) == 1
    window.end(second)
    assert window.left(one) == 0
    assert not window.forget(one)
    assert (window.busy, window.batches()) == (False, [])
    window.check_integrity()


def test_both_limits_hold_and_one_write_always_goes() -> None:
    """Neither the number nor the bytes are exceeded, but a single write larger than the window may go."""
    window, one = PeerWindow(PEER), batch()
    for length in (600, 600, 10, 10):
        window.extend(one, [descriptor(one, length)])
    assert take(window, most=2, most_bytes=500) is not None
    assert take(window, most=2, most_bytes=500) is None
    window.end(window.active[0])
    assert take(window, most=2, most_bytes=650) is not None
    assert take(window, most=2, most_bytes=650) is not None
    assert take(window, most=2, most_bytes=650) is None
    assert window.statistics() == {"queued": 1, "in_flight": 2, "in_flight_bytes": 610}
    window.check_integrity()


def test_a_retry_waits_for_its_time() -> None:
    """A write that is tried again later is not taken before, and is left meanwhile."""
    window, one = PeerWindow(PEER), batch()
    retry(window, one, 5.0)
    assert take(window, now=4.9) is None
    assert (window.left(one), window.waiting) == (1, True)
    assert take(window, now=5.0) is not None


def test_a_failed_batch_leaves_the_queue_and_not_the_engine() -> None:
    """Failing a batch drops what waits, keeps what is in the engine, and touches no other batch."""
    window, bad, good = PeerWindow(PEER), batch(), batch()
    for _ in range(3):
        window.extend(bad, [descriptor(bad)])
    retry(window, bad, 50.0)
    window.extend(good, [descriptor(good)])
    running = take(window)
    assert running is not None
    window.fail(bad)
    assert window.left(bad) == 1
    assert window.overdue(1000.0) == [good]
    window.check_integrity()
    other = take(window)
    assert other is not None
    assert other.batch is good
    window.end(running)
    assert window.left(bad) == 0
    assert window.forget(bad)
    assert bad not in window.failed
    window.end(other)
    assert not window.forget(good)
    window.check_integrity()


def test_a_batch_that_fails_while_it_only_waits_is_gone() -> None:
    """Nothing is remembered of a batch of which nothing is in the engine, also when it fails twice."""
    window, one = PeerWindow(PEER), batch()
    window.extend(one, [descriptor(one)])
    window.fail(one)
    window.fail(one)
    assert (window.left(one), window.busy, window.failed, window.batches()) == (0, False, set(), [])
    assert not window.forget(one)
    window.check_integrity()


def test_overdue_and_stuck() -> None:
    """A batch is overdue once, at its deadline; its writes are stuck once the settling time has passed too."""
    window, one = PeerWindow(PEER), batch(deadline_s=10.0)
    window.extend(one, [descriptor(one)])
    running = take(window)
    assert window.overdue(9.9) == []
    assert window.overdue(10.0) == [one]
    window.fail(one)
    assert window.overdue(11.0) == []
    assert window.stuck(9.9) == []
    assert window.stuck(10.0) == [running]


def test_wrong_counts_are_found() -> None:
    """The integrity check compares counted and present descriptors, and their bytes."""
    window, one = PeerWindow(PEER), batch()
    window.extend(one, [descriptor(one)])
    window._left[one] += 1
    with pytest.raises(IntegrityError, match="1 descriptors of 1 batches, counted 2 of 1"):
        window.check_integrity()
    window._left[one] -= 1
    take(window)
    window._bytes = 9
    with pytest.raises(IntegrityError, match="10 bytes in flight, counted 9"):
        window.check_integrity()
