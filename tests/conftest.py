"""What every test gets: integrity checks of everything it tracked, after it has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

Track = Callable[[Any], Any]


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
