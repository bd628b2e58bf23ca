"""A row of `bench core`: ours beside several peers, and a target for our figure or for one of the ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.report import Row

NOT_INSTALLED = "not installed"


@dataclass(frozen=True, kw_only=True)
class Figure(Row):
    """Samples are one figure a round (a median, a p99, a mean), rounds of all parties alternating.

    `target.of` is "difference" for a target of our own figure: `other` is then empty. A ratio is that to
    the peer named `against`, whose samples are `other`.
    """

    peers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Empty samples: the peer is not installed."""
    against: str | None = None

    @property
    def measured(self) -> bool:
        return self.against is None or bool(self.other)

    @property
    def value(self) -> float:
        return median(self.ours) if self.against is None else self.ratio

    @property
    def holds(self) -> bool:
        """A row without its peer misses nothing; the verdict says that nothing was compared."""
        return not self.measured or self.target.keeps(self.value)

    @property
    def verdict(self) -> str:
        return super().verdict if self.measured else "no peer"

    def shown_other(self) -> str:
        """Each peer's figure, and what part of it ours is."""
        return "\n".join(
            f"{name} {self.shown(samples)} ({median(self.ours) / median(samples):.3f})"
            if samples
            else f"{name} {NOT_INSTALLED}"
            for name, samples in self.peers.items()
        )

    def shown_value(self) -> str:
        return "" if self.against is None else f"{self.value:.3f}" if self.measured else "-"

    def shown_target(self) -> str:
        sign = "<=" if self.target.bound == "at most" else ">="
        if self.against is None:
            return f"{sign} {self.shown([self.target.limit])}"
        return f"{sign} {self.target.limit:g} of {self.against}"

    def as_json(self) -> dict[str, Any]:
        ratios = {
            name: median(self.ours) / median(them) if them else None for name, them in self.peers.items()
        }
        written = super().as_json() if self.other else Figure._alone(self)
        return written | {
            "against": self.against,
            "measured": self.measured,
            "peers": {name: {"samples": list(them)} for name, them in self.peers.items()},
            "ratios": ratios,
        }

    def _alone(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "unit": self.unit,
            "ours": {"median": median(self.ours), "samples": list(self.ours)},
            "target": {"of": "ours", "bound": self.target.bound, "limit": self.target.limit},
            "value": median(self.ours),
            "holds": self.holds,
            "detail": self.detail,
        }
