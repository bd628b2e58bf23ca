"""The demonstration, as a newcomer starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.real
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_demonstration_finds_its_answers_equal(ranks: int) -> None:
    """Both nodes and the router come up, and all answers are those of a run without transfer."""
    command = [sys.executable, "-m", "demo", "--model", "glm-dsa-tiny", "--cp", str(ranks)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 requests, 3 equal" in done.stdout
