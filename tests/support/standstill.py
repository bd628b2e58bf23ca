"""Tells whether the machine stood still during a test: then the test says nothing, and is run again.

A virtual machine may be paused for tens of seconds while its clock goes on. Every deadline is over at once then, those
of the nodes under test included. A process of its own sleeps all the time and notes when it overslept by seconds: load
does not do that, nor does anything that the tests' own process does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

LONGEST_S = 2.0
"""A sleeper that wakes so late was not kept waiting by other processes."""
_SLEEP_S = 0.1
_SLEEPER = f"""
import select, sys, time
last = time.monotonic()
while not select.select([sys.stdin], [], [], {_SLEEP_S})[0]:
    now = time.monotonic()
    if now - last > {LONGEST_S}:
        print(last, now, flush=True)
    last = now
"""


class Watch:
    """`began` is when the running test began; `seen` are the times (monotonic) that the machine stood still."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seen: list[tuple[float, float]] = []
        self.sleeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.sleeper.stdout is not None
        os.set_blocking(self.sleeper.stdout.fileno(), False)

    def begin(self) -> None:
        self.began = time.monotonic()

    def stood_still(self) -> bool:
        """Whether the machine has stood still since `begin`."""
        time.sleep(5 * _SLEEP_S)  # what has just ended is told now
        self._read()
        return any(end > self.began for _, end in self.seen)

    def _read(self) -> None:
        assert self.sleeper.stdout is not None
        for line in (self.sleeper.stdout.read() or b"").splitlines():
            start, end = map(float, line.split())
            self.seen.append((start, end))

    def summary(self) -> str:
        """How often and how long; empty when it never did."""
        self._read()
        return ", ".join(f"{end - start:.1f} s" for start, end in self.seen)

    def close(self) -> None:
        assert self.sleeper.stdin is not None and self.sleeper.stdout is not None
        self.sleeper.stdin.close()
        self.sleeper.wait()
        self.sleeper.stdout.close()
