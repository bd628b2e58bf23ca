"""A cluster of nodes in this process, stopped and checked after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conftest import Track
from tests.support.harness import Cluster


@pytest.fixture
async def cluster(track: Track) -> AsyncIterator[Cluster]:
    made: Cluster = track(Cluster())
    yield made
    await made.close()
