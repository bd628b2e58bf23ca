"""Faults of a copy engine, to be injected: what a service has to survive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.errors import BadInput, KvferryError
from app.tiers.descriptors import LayerCopy


@dataclass(frozen=True, kw_only=True)
class CopyFault:
    """What happens to one copy, after `delay_s` of a slow engine (the copies behind it wait too).

    delay_s only              it succeeds, late
    error                     it fails and moves nothing
    error, lands_after_s      it fails, and its bytes land that much later
    lost                      its bytes land and nobody is told; with lands_after_s they land that much later
    """

    delay_s: float = 0.0
    error: KvferryError | None = None
    lost: bool = False
    lands_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.error is not None and self.lost:
            raise BadInput("a copy that is lost reports no error")
        if self.lands_after_s is not None and self.error is None and not self.lost:
            raise BadInput("only a copy that fails or is lost can land after its end")


FaultPlan = Callable[[LayerCopy], CopyFault | None]
"""Asked once for each copy, on the queue's thread, when its turn has come."""
