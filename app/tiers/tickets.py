"""A submitted copy: its outcome, and whether bytes of it can still move.

    submitted --> done      the outcome is known: success, or an error
              \\-> quiet     no byte of it moves any more: its pages may be given back

A copy that succeeds is both at once. One that failed may still land for a while, and only quiet is a proof.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog
import torch

from app.errors import DeadlineExceeded, IllegalTransition, KvferryError
from app.tiers.descriptors import LayerCopy
from app.tiers.events import DeviceEvent

log = structlog.get_logger(__name__)

Notice = Callable[["CopyTicket"], None]
"""Called once, on a thread of the queue: hand over to a loop with call_soon_threadsafe. It must not block."""


class CopyTicket:
    """Made and ended by a queue; anybody may wait, from any thread but the queue's own."""

    def __init__(
        self, copy: LayerCopy, *, on_end: Notice | None = None, on_quiet: Notice | None = None
    ) -> None:
        self.copy = copy
        self.error: KvferryError | None = None
        """Set before `done`."""
        self._on_end = on_end
        self._on_quiet = on_quiet
        self._issued = threading.Event()
        self._done = threading.Event()
        self._quiet = threading.Event()
        self._events: tuple[DeviceEvent, ...] = ()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def quiet(self) -> bool:
        return self._quiet.is_set()

    def wait(self, timeout_s: float) -> None:
        """Block until the copy has succeeded. Its error when it failed, DeadlineExceeded when it is not over."""
        self._require(self._done.wait(timeout_s), timeout_s)

    def wait_quiet(self, timeout_s: float) -> None:
        """Block until no byte of it can move any more, whatever its outcome. DeadlineExceeded when they may."""
        if not self._quiet.wait(timeout_s):
            raise DeadlineExceeded(
                f"bytes of the {self.copy} may still move after {timeout_s} s", layer=self.copy.layer
            )

    def join(self, timeout_s: float) -> None:
        """Let what the caller does next see the bytes; errors as `wait`.

        On CPU that is `wait`. On CUDA it blocks only until the copy is enqueued, and the caller's current
        streams wait for it: the forward thread goes on enqueueing.
        """
        self._require(self._issued.wait(timeout_s), timeout_s)
        for event in self._events:
            if isinstance(event, torch.cuda.Event):
                torch.cuda.current_stream(event.device).wait_event(event)
            else:
                event.synchronize()

    def _require(self, over: bool, timeout_s: float) -> None:
        if not over:
            raise DeadlineExceeded(f"{self.copy} is not over after {timeout_s:.3g} s", layer=self.copy.layer)
        if self.error is not None:
            raise self.error

    # for the queue

    def issued(self, events: Sequence[DeviceEvent]) -> None:
        """The copy is enqueued on a device; its bytes are there when the events have happened."""
        self._events = tuple(events)
        self._issued.set()

    def end(self, error: KvferryError | None = None) -> None:
        """The outcome is known. IllegalTransition when it was known before."""
        if self.done:
            raise IllegalTransition(f"{self.copy} has ended twice", layer=self.copy.layer)
        self.error = error
        self._issued.set()
        self._done.set()
        self._tell(self._on_end)

    def fall_quiet(self) -> None:
        """Nothing of it moves any more. IllegalTransition unless it has ended, and when it was quiet before."""
        if not self.done or self.quiet:
            raise IllegalTransition(f"{self.copy} cannot fall quiet", layer=self.copy.layer)
        self._quiet.set()
        self._tell(self._on_quiet)

    def _tell(self, notice: Notice | None) -> None:
        if notice is None:
            return
        try:
            notice(self)
        except Exception:
            # the queue lives on: one caller's fault must not stop everybody's copies
            log.exception("a notice of a copy failed", copy=str(self.copy))
