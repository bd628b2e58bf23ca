"""A circuit breaker for each peer url: a peer that does not answer is not asked by every request.

                 failures in a row            the pause has passed: one request may try
      CLOSED ------------------------> OPEN ------------------------------------------> HALF_OPEN
        ^                                ^                                                 |    |
        |                                '------------------- no answer -------------------'    |
        '------------------------------------- answer ------------------------------------------'

Any answer closes it, a refusal too: it tells of the request, not of the peer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import structlog

from app.errors import DeadlineExceeded, PeerUnavailable

log = structlog.get_logger(__name__)

_MOST = 1024


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Sign(StrEnum):
    ANSWER = "answer"
    SILENCE = "silence"
    """As many failures in a row as open a circuit."""
    PAUSE_OVER = "pause-over"


TRANSITIONS: dict[tuple[Circuit, Sign], Circuit] = {
    (Circuit.CLOSED, Sign.ANSWER): Circuit.CLOSED,
    (Circuit.CLOSED, Sign.SILENCE): Circuit.OPEN,
    (Circuit.OPEN, Sign.ANSWER): Circuit.CLOSED,
    (Circuit.OPEN, Sign.SILENCE): Circuit.OPEN,
    (Circuit.OPEN, Sign.PAUSE_OVER): Circuit.HALF_OPEN,
    (Circuit.HALF_OPEN, Sign.ANSWER): Circuit.CLOSED,
    (Circuit.HALF_OPEN, Sign.SILENCE): Circuit.OPEN,
}


@dataclass(eq=False, kw_only=True)
class _Entry:
    state: Circuit = Circuit.CLOSED
    failures: int = 0
    opened_at_s: float = 0.0
    reason: str = ""


class Breakers:
    """The circuits of one node, by url. A url without failures leaves no entry behind."""

    def __init__(self, *, failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._pause_s = pause_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self.refused = 0
        self.opened = 0

    def state(self, url: str) -> Circuit:
        entry = self._entries.get(url)
        return Circuit.CLOSED if entry is None else entry.state

    @contextmanager
    def attempt(self, url: str) -> Iterator[None]:
        """Around the first contact of a request. PeerUnavailable at once while the circuit is open."""
        probe = self._admit(url)
        try:
            yield
        except (PeerUnavailable, DeadlineExceeded) as error:
            self.failed(url, error.message)
            raise
        except BaseException as error:
            if probe and not isinstance(error, Exception):
                self.failed(url, "the request that tried was cancelled")
            elif probe:
                self.answered(url)
            raise
        else:
            self.answered(url)

    def _admit(self, url: str) -> bool:
        """Whether this request is the one that tries."""
        entry = self._entries.get(url)
        if entry is None or entry.state is Circuit.CLOSED:
            return False
        left = entry.opened_at_s + self._pause_s - self._clock()
        if entry.state is Circuit.HALF_OPEN or left > 0:
            self.refused += 1
            when = "another request is trying" if left <= 0 else f"the next try is in {left:.1f} s"
            error = PeerUnavailable(f"{url} has not answered ({entry.reason}); {when}", peer=url)
            error.retry_after_s = max(math.ceil(left), 1)
            raise error
        self._move(url, entry, Sign.PAUSE_OVER)
        return True

    def answered(self, url: str) -> None:
        entry = self._entries.pop(url, None)
        if entry is not None and entry.state is not Circuit.CLOSED:
            self._move(url, entry, Sign.ANSWER)

    def failed(self, url: str, reason: str) -> None:
        """One failure; as many in a row as the setting says open the circuit."""
        entry = self._entry(url)
        entry.failures += 1
        entry.reason = reason
        if entry.failures >= self._most or entry.state is not Circuit.CLOSED:
            self._open(url, entry)

    def lost(self, url: str, reason: str) -> None:
        """The peer has been silent for long enough, whoever asked."""
        entry = self._entry(url)
        entry.reason = reason
        self._open(url, entry)

    def _entry(self, url: str) -> _Entry:
        entry = self._entries.setdefault(url, _Entry())
        while len(self._entries) > _MOST:  # clients name urls: they must not grow without bound
            self._entries.pop(next(iter(self._entries)))
        return entry

    def _open(self, url: str, entry: _Entry) -> None:
        self.opened += entry.state is not Circuit.OPEN
        entry.opened_at_s = self._clock()
        self._move(url, entry, Sign.SILENCE)

    def _move(self, url: str, entry: _Entry, sign: Sign) -> None:
        before, entry.state = entry.state, TRANSITIONS[entry.state, sign]
        if before is not entry.state:
            log.info(
                "peer.circuit", peer=url, before=str(before), after=str(entry.state), reason=entry.reason
            )

    def snapshot(self) -> dict[str, Any]:
        """Plain values for /stats: the circuits with failures."""
        return {
            url: {"state": str(e.state), "failures": e.failures, "reason": e.reason}
            for url, e in self._entries.items()
        }
