"""From the end of a layer on the device to a coroutine.

On CPU a layer is written when the hook fires, so there is no event. On CUDA the hook records an event on
the compute stream, and a coroutine awaits it through a small thread pool: polling would burn the loop,
and a wait on the loop or on the forward thread would stop everything else.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """What the bridge needs of an event; torch.cuda.Event has it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class EventBridge:
    """Records and awaits layer events of one device. `record` runs on the forward thread."""

    def __init__(self, device: torch.device | str, *, threads: int = 4) -> None:
        self.device = torch.device(device)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvferry-event")

    def record(self) -> DeviceEvent | None:
        """None where work is complete when the hook fires."""
        if self.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch
        event.record(torch.cuda.current_stream(self.device))
        return event

    async def wait(self, event: DeviceEvent | None) -> None:
        """Return once the event has happened; the loop stays free meanwhile."""
        if event is None or event.query():
            return
        await asyncio.get_running_loop().run_in_executor(self._threads, event.synchronize)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
