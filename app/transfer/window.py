"""The window of one peer: what is queued, what is in the engine, what is left of each batch.

Used by the engine's thread only; `statistics` may be read from elsewhere.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.errors import IntegrityError
from app.transfer.base import Batch, Block, EngineDriver


@dataclass(eq=False, kw_only=True, slots=True)
class Descriptor:
    """One write. `submitted` is its id in `driver`, 0 while it is not in the engine."""

    batch: Batch
    block: Block
    submitted: int = 0
    tries: int = 0
    not_before_s: float = 0.0
    driver: EngineDriver = field(init=False)


class PeerWindow:
    """`failed` are batches that have failed while some of their writes are still in the engine."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.active: list[Descriptor] = []
        self.failed: set[Batch] = set()
        self.met: EngineDriver | None = None
        """The driver through which the peer has answered: a first contact would block the thread."""
        self.asking = False
        """A probe is on its way."""
        self.suspicion = ""
        """Why a peer that answers the probe needs a new driver."""
        self.looked_at_all_s = 0.0
        self.dropped = False
        self._queue: deque[Descriptor] = deque()
        self._later: list[Descriptor] = []
        self._left: Counter[Batch] = Counter()
        self._bytes = 0

    @property
    def busy(self) -> bool:
        return bool(self.active or self._queue or self._later)

    @property
    def waiting(self) -> bool:
        return bool(self._queue or self._later)

    def batches(self) -> list[Batch]:
        """Those with a descriptor that has not ended."""
        return list(self._left)

    def extend(self, batch: Batch, descriptors: Sequence[Descriptor]) -> None:
        """Queue a batch's descriptors."""
        self._left[batch] += len(descriptors)
        self._queue.extend(descriptors)

    def retry(self, descriptor: Descriptor, *, not_before_s: float) -> None:
        """Queue one again, not before its time."""
        self._left[descriptor.batch] += 1
        descriptor.not_before_s = not_before_s
        self._later.append(descriptor)

    def next(self, now: float, most: int, most_bytes: int) -> Descriptor | None:
        """The next write that fits into the window, or None; it is counted out of the queue."""
        if self._later:
            self._queue.extend(d for d in self._later if d.not_before_s <= now)
            self._later = [d for d in self._later if d.not_before_s > now]
        if not self._queue or len(self.active) >= most:
            return None
        if self.active and self._bytes + self._queue[0].block.length > most_bytes:
            return None
        descriptor = self._queue.popleft()
        self._left[descriptor.batch] -= 1
        return descriptor

    def start(self, descriptor: Descriptor) -> None:
        self.active.append(descriptor)
        self._left[descriptor.batch] += 1
        self._bytes += descriptor.block.length

    def end(self, descriptor: Descriptor) -> None:
        self.active.remove(descriptor)
        self._left[descriptor.batch] -= 1
        self._bytes -= descriptor.block.length

    def left(self, batch: Batch) -> int:
        """Descriptors of a batch that are queued, delayed or in the engine."""
        return self._left[batch]

    def fail(self, batch: Batch) -> None:
        """Take a failed batch's waiting descriptors out; those in the engine run to their end."""
        waiting = sum(d.batch is batch for d in self._queue) + sum(d.batch is batch for d in self._later)
        self._queue = deque(d for d in self._queue if d.batch is not batch)
        self._later = [d for d in self._later if d.batch is not batch]
        self._left[batch] -= waiting
        if self._left[batch] > 0:
            self.failed.add(batch)
        else:
            del self._left[batch]

    def forget(self, batch: Batch) -> bool:
        """Drop what is known of a batch that is done. Whether it had failed."""
        self._left.pop(batch, None)
        failed = batch in self.failed
        self.failed.discard(batch)
        return failed

    def overdue(self, now: float) -> list[Batch]:
        return [b for b in self._left if b.deadline_s <= now and b not in self.failed]

    def stuck(self, before_s: float) -> list[Descriptor]:
        """Writes still in the engine although their batch's deadline lies before `before_s`."""
        return [d for d in self.active if d.batch.deadline_s <= before_s]

    def statistics(self) -> dict[str, Any]:
        return {
            "queued": len(self._queue) + len(self._later),
            "in_flight": len(self.active),
            "in_flight_bytes": self._bytes,
        }

    def check_integrity(self) -> None:
        """IntegrityError unless every count is the count of what is there."""
        there = Counter(d.batch for d in (*self._queue, *self._later, *self.active))
        in_flight_bytes = sum(d.block.length for d in self.active)
        if dict(there) != dict(self._left) or in_flight_bytes != self._bytes or self.failed - set(there):
            raise IntegrityError(
                f"window of {self.session}: {sum(there.values())} descriptors of {len(there)} batches, counted "
                f"{sum(self._left.values())} of {len(self._left)}, {len(self.failed)} failed; "
                f"{in_flight_bytes} bytes in flight, counted {self._bytes}"
            )
