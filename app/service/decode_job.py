"""One room of a decode node: what it holds, what has landed in it, what it has answered so far."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from app.core.ids import PageArray
from app.core.pages import pages_for
from app.core.slots import SlotRef
from app.engine.generate import Continuation
from app.errors import LegName
from app.service.jobs import Job, TokenOut


@dataclass(eq=False, kw_only=True)
class DecodeJob(Job):
    leg: ClassVar[LegName] = "decode"
    other_leg: ClassVar[LegName] = "prefill"

    slot: SlotRef | None = None
    generation: int = 0
    """Of the slot, and known after the slot has gone: prefill may repeat its word."""
    first_position: int = 0
    """Positions below it were here already: nothing is received for them."""
    announced: bool = False
    """Prefill may know the pages: a write can land."""
    delivered: bool = False
    """Prefill has said that every write has ended: only a retried one may still land, until settled_at_s."""
    settled_at_s: float = 0.0
    checked: set[int] = field(default_factory=set)
    """Layers whose digests have been compared ahead of the end."""
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    """Delivered, and the bytes are those that were sent."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of the answer so far."""
    continuation: Continuation | None = None
    stop_requested: bool = False
    """The reader has seen enough: end with success after the step in progress."""
    output: asyncio.Queue[TokenOut | None] = field(default_factory=asyncio.Queue)
    """Tokens as they come; None ends it, whatever the outcome."""

    def answer(self) -> None:
        super().answer()
        self.output.put_nowait(None)

    def prompt_pages(self, page_size: int) -> PageArray:
        """The pages of the prompt, without those for its continuation."""
        assert self.pages is not None and self.request is not None
        return self.pages[: pages_for(len(self.request.prompt), page_size)]

    def received_pages(self, page_size: int) -> PageArray:
        """Those of them that prefill fills: the others were here already."""
        return self.prompt_pages(page_size)[self.first_position :]
