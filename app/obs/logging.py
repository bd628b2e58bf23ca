"""structlog, readable on a terminal and JSON otherwise.

Room, chunk, peer and request id are bound where they are known. Success is DEBUG; an error is logged
once, where it is decided, and `log_once` keeps later places from repeating it.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import structlog

from app.errors import KvferryError


def configure_logging(*, level: str, style: str) -> None:
    """Set up the process's logging. `style` is auto, json or console."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if not console else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")


def _keep(_logger: Any, _name: str, event: Any) -> Any:
    return event


def log_once(log: Any, event: str, error: KvferryError, **fields: Any) -> None:
    """Log an error at WARNING unless it has been logged already."""
    if getattr(error, "logged", False):
        return
    error.logged = True  # type: ignore[attr-defined]
    shown = error.fields() | fields
    log.warning(event, error=type(error).__name__, reason=error.message, **shown)


class RateLimited:
    """One line per `every_s` and key, with the count of what was left out."""

    def __init__(self, log: Any, *, every_s: float = 5.0) -> None:
        self._log = log
        self._every_s = every_s
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, event: str, **fields: Any) -> None:
        now = time.monotonic()
        if now < self._next.get(event, 0.0):
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._next[event] = now + self._every_s
        self._log.warning(event, left_out=self._left_out.pop(event, 0), **fields)
