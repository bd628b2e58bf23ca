"""Runs spin over the model: one search is one set of macros, explored to its end.

spin -a -D... rooms.pml -> pan.c -> cc -> pan: states, the first error, the table entries it used
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.lifecycle import TABLES
from formal.tables import Entry, entries, promela

HERE = Path(__file__).parent

SEARCHES: Mapping[str, tuple[str, ...]] = {
    # one room, every node stopped or killed at any moment, each message twice
    "one room, nodes end": ("ONE_ROOM", "STOPS", "REPEATS=4"),
    # two rooms that compete for pages and turns
    "two rooms": ("FORGET", "REPEATS=0"),
    # one number used twice
    "one number": ("SAME", "FORGET", "REPEATS=0"),
}
"""What CI explores."""

WIDER: Mapping[str, tuple[str, ...]] = {
    "two rooms, a message twice": ("FORGET", "REPEATS=1"),
    "one number, a message twice": ("SAME", "FORGET", "REPEATS=1"),
}
"""What `make model` explores besides."""

ONE_ROOM = ("ONE_ROOM", "REPEATS=1")

WRONG: Mapping[str, tuple[tuple[str, ...], str]] = {
    "an abort is acknowledged when it arrives": ((*ONE_ROOM, "ACK_ON_RECEIPT"), "assertion"),
    "prefill frees its pages when an abort arrives": ((*ONE_ROOM, "FREE_ON_ABORT"), "assertion"),
    "decode frees its pages when its half fails": ((*ONE_ROOM, "FREE_ON_FAIL"), "assertion"),
    "quarantine ends before the engine's last word": ((*ONE_ROOM, "SHORT_HOLD"), "assertion"),
    "decode's hold ends, heard of by prefill or not": ((*ONE_ROOM, "UNHEARD"), "assertion"),
    "only the number of an aborted room is remembered": (
        ("SAME", "FORGET", "REPEATS=1", "NUMBER_ONLY"),
        "assertion",
    ),
    "a parked room waits without a deadline": ((*ONE_ROOM, "NO_PARKED"), "invalid end state"),
    "decode waits for the last byte without a deadline": ((*ONE_ROOM, "NO_TRANSFER"), "invalid end state"),
}
"""Protocols that must be found wrong, and what is found."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`error` is the first violation, with spin's words, or "" when there is none."""

    states: int
    error: str
    complete: bool
    used: frozenset[Entry]
    seconds: float
    trail: str = ""


def explore(macros: tuple[str, ...], *, timeout_s: float = 240.0) -> Outcome:
    """Explore every reachable state, or up to the first error. Needs spin and a C compiler."""
    spin = shutil.which("spin")
    if spin is None:
        raise RuntimeError("spin is not installed: scripts/setup.sh does that")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvferry-model-") as folder:
        there = Path(folder)
        shutil.copy(HERE / "rooms.pml", there)
        (there / "tables.pml").write_text(promela())
        _run([spin, "-a", *(f"-D{macro}" for macro in macros), "rooms.pml"], there, timeout_s)
        _run(["cc", "-O2", "-w", "-DSAFETY", "-DMEMLIM=6000", "-o", "pan", "pan.c"], there, timeout_s)
        said = _run(["./pan", "-m100000", "-w23"], there, timeout_s)
        trail = ""
        if (there / "rooms.pml.trail").exists():
            trail = _run(["./pan", "-r"], there, timeout_s, check=False)
        return _outcome(said, time.monotonic() - began, trail)


def unused(outcomes: list[Outcome]) -> frozenset[Entry]:
    """Table entries that no search has used."""
    return frozenset(entries(TABLES)) - frozenset().union(*(outcome.used for outcome in outcomes))


def _run(command: list[str], there: Path, timeout_s: float, *, check: bool = True) -> str:
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, timeout=timeout_s, check=False)
    said = done.stdout + done.stderr
    if check and done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {said[-2000:]}")
    return said


def _outcome(said: str, seconds: float, trail: str) -> Outcome:
    states = re.search(r"^\s*([0-9.e+]+) states, stored", said, re.MULTILINE)
    errors = re.search(r"errors: ([0-9]+)", said)
    first = re.search(r"^pan:1: (.*)$", said, re.MULTILINE)
    if states is None or errors is None:
        raise RuntimeError(f"pan said nothing that is understood: {said[-2000:]}")
    every = entries(TABLES)
    return Outcome(
        states=round(float(states[1])),
        error=first[1] if first else "",
        complete="Search not completed" not in said and "max search depth too small" not in said,
        used=frozenset(every[int(number)] for number in re.findall(r"^used ([0-9]+)$", said, re.MULTILINE)),
        seconds=seconds,
        trail=trail,
    )
