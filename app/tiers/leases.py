"""What one request holds of the tiers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.core.ids import PageArray
from app.core.prefix_tree import Namespace
from app.errors import KvferryError
from app.tiers.backup import Reservation
from app.tiers.loadback import Load

NO_PAGES: PageArray = np.empty(0, dtype=np.int64)


@dataclass(eq=False, kw_only=True)
class Lease:
    """What one request holds of L1. Its pages are neither evicted nor handed out until `end`.

    Pages that a backup still reads then stay away until it is quiet; the cache sees to that.
    """

    space: Namespace | None = None
    prompt: npt.NDArray[np.int64] = field(default_factory=lambda: NO_PAGES)
    """All of it, also what was not looked up; empty where nothing is reused."""
    node: int = 0
    prefix: PageArray = field(default_factory=lambda: NO_PAGES)
    """Pages of the tree that hold the first positions of the prompt."""
    own: PageArray = field(default_factory=lambda: NO_PAGES)
    """Pages of this request alone."""
    ended: bool = False
    since_s: float = 0.0
    l2_tokens: int = 0
    """Tokens of the prefix that were in L2 when it was found."""
    waits_for: tuple[Reservation, ...] = ()
    """Under write-back: copies that have to end before there is room for its load."""
    loads: list[Load] = field(default_factory=list)
    """Loads of the prefix: this request's own, and those of others that it joined."""
    backups: list[Reservation] = field(default_factory=list)

    @property
    def pages(self) -> PageArray:
        """Page table of the request as long as nothing was kept: prefix, then its own."""
        return np.concatenate([self.prefix, self.own])

    def wait(self, layer: int) -> None:
        """Block until the prefix's pages of a layer are there: every accessor of the forward, before it reads.

        On the forward thread. Raises what made the load fail: the request must not go on.
        """
        for load in self.loads:
            load.wait(layer)

    def confirm(self, timeout_s: float) -> None:
        """Block until all of the prefix has landed: the forward thread, at its end, before what it wrote is kept.

        Layers that were only enqueued on a device, or that nobody has read, are waited for too. Errors as `wait`.
        """
        for load in self.loads:
            load.confirm(timeout_s)

    @property
    def failed(self) -> KvferryError | None:
        """Why the promised prefix is not there: recompute under a new lease, or fail; never decode with a hole."""
        return next((load.failed for load in self.loads if load.failed is not None), None)

    @property
    def loaded(self) -> bool:
        """Whether all of the prefix has landed. Without a load it was there from the start."""
        return all(load.landed for load in self.loads)

    @property
    def busy(self) -> bool:
        """Whether a backup may still read pages that this request computed."""
        return any(reservation.moving for reservation in self.backups)
