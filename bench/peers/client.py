"""The benchmark's end of a peer's process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import BenchFailed

_ROOT = Path(__file__).parents[2]
DEFAULT_PYTHON = Path(__file__).parent / ".venv/bin/python"


class Peer:
    """A peer that answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version = str(self.ask("version"))

    def ask(self, do: str, **request: Any) -> Any:
        """The answer. BenchFailed with the peer's own words when it could not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise BenchFailed(f"the peer could not {do}: {answer['error']}")
        return answer["ok"]


@contextmanager
def peer(python: Path) -> Iterator[Peer | None]:
    """The peer, or None where its environment has not been set up."""
    if not python.exists():
        yield None
        return
    process = subprocess.Popen(
        [python, "-m", "bench.peers.serve"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Peer(process)
    finally:
        process.communicate()  # closes its stdin, which ends it
