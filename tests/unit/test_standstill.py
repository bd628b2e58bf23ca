"""The watch over the machine: it knows a standstill from a busy test process."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.standstill import LONGEST_S, Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    try:
        assert not watch.stood_still()
        yield watch
    finally:
        watch.close()


def test_a_standstill_is_seen_by_the_test_it_falls_into_alone(watch: Watch) -> None:
    """The sleeper is stopped as a paused machine would stop it: that test may be run again, the next one not."""
    watch.begin()
    watch.sleeper.send_signal(signal.SIGSTOP)
    time.sleep(LONGEST_S + 0.5)
    watch.sleeper.send_signal(signal.SIGCONT)
    assert watch.stood_still()
    assert watch.summary()
    watch.begin()
    assert not watch.stood_still()


def test_a_busy_interpreter_is_no_standstill(watch: Watch) -> None:
    """What holds this process's interpreter for seconds is a fault of the test or the product, and stays one."""
    until = time.monotonic() + LONGEST_S + 0.5
    while time.monotonic() < until:
        sum(range(100_000))
    assert not watch.stood_still()
