"""The engine's thread after a pause of the whole process."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from app.errors import DeadlineExceeded
from app.transfer.base import Batch, Block
from app.transfer.fake import FakeDriver
from app.transfer.pump import Limits, Pump


def _serve_once(*, deadline_s: float) -> tuple[FakeDriver, Batch]:
    driver = FakeDriver()

    def tell(function: Any, *arguments: Any) -> None:
        function(*arguments)

    pump = Pump(lambda: driver, Limits(), tell)
    pump.open()
    batch = Batch(
        number=1, session="fake:peer", blocks=1, total_bytes=8, deadline_s=time.monotonic() + deadline_s
    )
    source, target = bytearray(8), bytearray(8)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(b)) for b in (source, target)]
    pump.enqueue(batch, [Block(addresses[0], addresses[1], 8)])
    window = pump.windows["fake:peer"]
    window.met = driver
    pump._serve(window)
    return driver, batch


async def test_a_stale_write_is_not_submitted() -> None:
    """A queued write whose batch is past its deadline is failed, never given to the driver."""
    driver, batch = _serve_once(deadline_s=-1.0)
    assert driver.submitted == []
    assert isinstance(batch.error, DeadlineExceeded)


async def test_a_write_in_time_is_submitted() -> None:
    """The same write before its deadline goes to the driver."""
    driver, batch = _serve_once(deadline_s=60.0)
    assert len(driver.submitted) == 1
    assert batch.error is None
