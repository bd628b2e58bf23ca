"""Diagnostics that cost time: off by default, audible when on, and they find what they are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from app.core.lanes import OwnerLanes
from app.errors import IntegrityError
from app.service.diagnostics import Diagnostics
from app.settings.sections import DiagnosticSettings
from tests.support.harness import Cluster, prompt_of


@pytest.mark.contract(11, 21)
@pytest.mark.parametrize("on", [False, True])
async def test_nothing_waits_for_a_device_unless_asked_to(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    """By default no layer synchronises and no owner is checked; switched on, each is counted and said once."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    settings = {"diagnostics": {"synchronise": True, "check_owners": True}} if on else {}
    with capture_logs() as logs:
        await cluster.start(settings, settings)
        for node in cluster.nodes:
            # as on a machine with a device
            node.context.diagnostics._devices.append(torch.device("cuda:0"))
        await cluster.serve(prompt_of(40))
    said = [line["event"] for line in logs if str(line["event"]).startswith("diagnostics.")]
    counts = cluster.prefill.statistics()["diagnostics"]
    assert said == ["diagnostics.synchronise", "diagnostics.check_owners"] * 2 * on
    assert bool(waited) is on
    assert (counts["synchronisations"] > 0, counts["owner_checks"] > 0) == (on, on)
    await cluster.free()


@pytest.mark.contract(21)
def test_a_page_of_nobody_is_found() -> None:
    """A table with a free page, a foreign page, or a page of another owner than promised is an error that names it."""
    lanes = OwnerLanes(2, 4)
    check = Diagnostics(DiagnosticSettings(check_owners=True), [], lanes)
    pages = lanes.alloc_pages_with_owners([0, 1])
    assert pages is not None
    check.pages(pages, [0, 1])
    with pytest.raises(IntegrityError, match=r"are not of the owners \[1, 0\]"):
        check.pages(pages, [1, 0])
    with pytest.raises(IntegrityError, match=r"holds pages that are free: \[3\] \(1\)"):
        check.pages(np.array([int(pages[0]), 3]))
    with pytest.raises(IntegrityError, match="a page table of 8 pages holds"):
        check.pages(np.array([8]))
