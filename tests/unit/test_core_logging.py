"""Logs that say a thing once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import structlog
from structlog.testing import capture_logs

from app.errors import TransferFailed
from app.obs import logging as obs
from app.obs.logging import RateLimited, log_once


@pytest.mark.contract(123)
def test_an_error_is_logged_once_and_as_a_warning() -> None:
    """The place that decides logs an error at WARNING with its fields; later places repeat nothing."""
    error = TransferFailed("a write failed", room=7, layer=3)
    with capture_logs() as logs:
        log = structlog.get_logger()
        log_once(log, "room.failed", error, peer="http://peer")
        log_once(log, "room.failed", error)
    assert logs == [
        {
            "event": "room.failed",
            "log_level": "warning",
            "error": "TransferFailed",
            "reason": "a write failed",
            "room": 7,
            "layer": 3,
            "peer": "http://peer",
        }
    ]


@pytest.mark.case("L9")
def test_ten_thousand_bad_events_are_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 events within 10 s make a line each 5 s, and the lines count what was left out."""
    now = [1000.0]
    monkeypatch.setattr(obs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with capture_logs() as logs:
        limited = RateLimited(structlog.get_logger(), every_s=5.0)
        for _ in range(10_000):
            limited.warning("poll.bad", peer="p")
            now[0] += 0.001
        limited.warning("another")
        now[0] += 5.0
        limited.warning("poll.bad", peer="p")
    lines = [(line["event"], line["left_out"]) for line in logs]
    assert lines[0] == ("poll.bad", 0)
    assert [event for event, _ in lines] == ["poll.bad", "poll.bad", "another", "poll.bad"]
    assert sum(left for _, left in lines) + len(lines) == 10_002
    assert all(line["log_level"] == "warning" for line in logs)
