"""An engine over fake drivers, checked and closed after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.transfer.rig import Rig

StartRig = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def start_rig() -> AsyncIterator[StartRig]:
    """`await start_rig(limits=..., plan=...)`; every window has to be empty and well counted at the end."""
    started: list[Rig] = []

    async def start(**options: Any) -> Rig:
        rig = Rig(**options)
        started.append(rig)
        return await rig.start()

    yield start
    for rig in started:
        await rig.idle()
        rig.engine.check_integrity()
        assert [d.checked_after_end for d in rig.drivers] == [0] * len(rig.drivers)
        await rig.engine.close()
