"""The answer to a flush: what it has freed, and what stayed because somebody holds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Flushed:
    """Pages that a flush freed, and what stayed because somebody holds it."""

    l1_pages: int
    l2_pages: int
    l1_stayed: int
    l2_stayed: int
    leases: int
    copies: int

    @property
    def complete(self) -> bool:
        return not (self.l1_stayed or self.l2_stayed or self.leases or self.copies)
