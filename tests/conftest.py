"""What every test gets: integrity checks of everything it tracked, after it has run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.engine.heap import settle

Track = Callable[[Any], Any]


def pytest_unconfigure() -> None:
    """What has been kept out of collections is let go of at the end, native instances included."""
    gc.unfreeze()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """A full collection over all that other modules have loaded would stop every thread for seconds."""
    settle()


@pytest.fixture(autouse=True)
def track() -> Iterator[Track]:
    """`track(thing)` returns the thing and has its `check_integrity` called after the test."""
    tracked: list[Any] = []

    def add(thing: Any) -> Any:
        tracked.append(thing)
        return thing

    yield add
    for thing in tracked:
        thing.check_integrity()
