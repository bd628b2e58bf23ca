"""What every test gets: integrity checks of everything it tracked, after it has run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.engine.heap import settle
from tests.support.standstill import Watch

Track = Callable[[Any], Any]
WATCH = pytest.StashKey[Watch]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[WATCH] = Watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """What has been kept out of collections is let go of at the end, native instances included."""
    config.stash[WATCH].close()
    gc.unfreeze()
    gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    item.config.stash[WATCH].begin()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that failed is run again, if the machine stood still meanwhile: for no other reason."""
    watch = config.stash[WATCH]

    def condition(error: BaseException | None) -> bool:
        return error is not None and watch.stood_still()

    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=3, condition=condition))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if times := config.stash[WATCH].summary():
        terminalreporter.write_line(f"the machine stood still for {times}")


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
