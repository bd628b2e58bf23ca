"""What a transfer engine is to the rest of the system, and what a driver is to the engine.

service --> TransferEngine (engine.py: windows, deadlines, retries)  --> EngineDriver
                                                                         |-- mooncake.py
                                                                         `-- fake.py (faults)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from app.errors import KvferryError


class Block(NamedTuple):
    """One contiguous copy: local address, remote address, bytes."""

    source: int
    destination: int
    length: int


class Region(NamedTuple):
    """A stretch of memory that may be read or written."""

    name: str
    base: int
    length: int

    def covers(self, address: int, length: int) -> bool:
        return self.base <= address and address + length <= self.base + self.length


class Status(IntEnum):
    """Answers of EngineDriver.check."""

    PENDING = 0
    DONE = 1
    FAILED = -1


class EngineDriver(Protocol):
    """One raw engine. Every call runs in the engine's own thread, since a first contact can block.

    `addressed`: each write names its own source and destination address, so that a rank can send just the
    pages it owns, each to its absolute position. Shared KV cannot do without.
    """

    session: str
    transport: str
    addressed: bool

    def register(self, region: Region) -> None: ...

    def unregister(self, region: Region) -> None: ...

    def submit(self, session: str, block: Block) -> int:
        """An id, or 0 when the write could not be queued."""
        ...

    def check(self, submitted: int) -> Status:
        """Ask until the answer is terminal, and never again after that."""
        ...

    def probe(self, session: str) -> bool:
        """Whether the peer answers at all; may block for a minute. After an answer no submit to it blocks."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class Batch:
    """Writes that were submitted together; fields change on the event loop only.

    `finished` is set at success or at the first failure; `idle` once no descriptor is in the engine.
    After a failure a late landing cannot be ruled out before `settled_at_s` (monotonic).
    """

    number: int
    session: str
    blocks: int
    total_bytes: int
    deadline_s: float
    label: str = ""
    error: KvferryError | None = None
    settled_at_s: float = 0.0
    finished_at_s: float = 0.0
    """Monotonic time of its success; 0 before."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class TransferEngine(Protocol):
    """Asynchronous one-sided writes into the memory of peers."""

    @property
    def session(self) -> str:
        """The name under which peers write into this node."""
        ...

    @property
    def transport(self) -> str:
        """The transport really used."""
        ...

    @property
    def addressed(self) -> bool:
        """Whether each write names its own addresses: see EngineDriver."""
        ...

    async def register(self, regions: Sequence[Region]) -> None:
        """Register local memory once; it stays registered until `close`."""
        ...

    def add_peer(self, session: str, regions: Sequence[Region]) -> None:
        """Make a peer's memory known: writes outside it are refused."""
        ...

    def drop_peer(self, session: str) -> None: ...

    def submit(self, session: str, blocks: Sequence[Block], *, label: str = "") -> Batch:
        """Queue writes and return at once. BadInput when a block leaves its regions."""
        ...

    async def wait(self, batches: Sequence[Batch]) -> None:
        """Return when all have succeeded; raise the first error once one has failed."""
        ...

    async def settle(self, batches: Sequence[Batch]) -> None:
        """Return when none of them can land any more."""
        ...

    def why_not_ready(self, *, stall_s: float) -> str | None:
        """None when writes go on. A thread that is held up for longer than `stall_s`, in a driver say, is a reason."""
        ...

    def statistics(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...
