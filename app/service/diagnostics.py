"""Checks that cost time, off by default: they find where a fault of a device or of page ownership happened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog
import torch

from app.core.ids import PageArray
from app.core.lanes import OwnerLanes
from app.core.pages import summary
from app.errors import IntegrityError
from app.settings.sections import DiagnosticSettings
from app.tiers.device import DevicePool

log = structlog.get_logger(__name__)


class Diagnostics:
    """Says so, once, when something is on. Without settings nothing here waits for a device."""

    def __init__(self, settings: DiagnosticSettings, pools: Sequence[DevicePool], lanes: OwnerLanes) -> None:
        self._settings = settings
        self._devices = [pool.device for pool in pools if pool.device.type == "cuda"]
        self._lanes = lanes
        self.synchronisations = 0
        self.owner_checks = 0
        if settings.synchronise:
            log.warning("diagnostics.synchronise", reason="every layer waits for its device: slower")
        if settings.check_owners:
            log.warning("diagnostics.check_owners", reason="every page table is checked: slower")

    def layer_end(self) -> None:
        """On the forward thread: wait for the devices, so that a fault shows at the layer that it belongs to."""
        if not self._settings.synchronise:
            return
        self.synchronisations += 1
        for device in self._devices:
            torch.cuda.synchronize(device)

    def pages(self, pages: PageArray, owners: Sequence[int] | None = None) -> None:
        """A request's page table: IntegrityError on a page that no lane has handed out, or of another owner."""
        if not self._settings.check_owners:
            return
        self.owner_checks += 1
        total = self._lanes.lanes * self._lanes.pages
        if len(pages) and (
            int(pages.min()) < 0 or int(pages.max()) >= total or len(np.unique(pages)) < len(pages)
        ):
            raise IntegrityError(f"a page table of {total} pages holds {summary(pages)}")
        free = pages[self._lanes.is_free(pages)]
        if len(free):
            raise IntegrityError(f"a page table holds pages that are free: {summary(free)}")
        if owners is not None and self._lanes.owners_of(pages).tolist() != list(owners):
            raise IntegrityError(f"pages {summary(pages)} are not of the owners {list(owners)}")
