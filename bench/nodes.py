"""Node processes for a benchmark: started as an operator would, always stopped, by their process id."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.report import BenchFailed

_START_S = 120.0
_STOP_S = 30.0


class NodeFailed(BenchFailed):
    """A node did not start, or a request failed; the message holds what the node said."""


@dataclass(frozen=True, kw_only=True)
class NodeProcess:
    """One running node."""

    pid: int
    url: str
    client: httpx.AsyncClient

    @property
    def port(self) -> int:
        port = httpx.URL(self.url).port
        assert port is not None
        return port

    async def get(self, path: str) -> dict[str, Any]:
        answer = await self.client.get(f"{self.url}{path}")
        answer.raise_for_status()
        content: dict[str, Any] = answer.json()
        return content

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self.client.post(f"{self.url}{path}", json=dict(body))
        if answer.status_code != 200:
            raise NodeFailed(f"{self.url}{path} answered {answer.status_code}: {answer.text}")
        content: dict[str, Any] = answer.json()
        return content

    async def ended_room(self, room: int, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """The record of a room once nothing of it is left on the node."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for record in (await self.get("/rooms"))["ended"]:
                if record["room"] == room:
                    if record["state"] != "success":
                        raise NodeFailed(f"room {room} ended as {record['state']}: {record['error']}")
                    return dict(record)
            await asyncio.sleep(0.05)
        raise NodeFailed(f"room {room} has not ended on {self.url}")


def _environment() -> dict[str, str]:
    """This process's environment, without settings that would change what is measured."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVFERRY_") or k == "KVFERRY_CACHE_DIR"}
    return kept | {"HF_HUB_OFFLINE": "1"}


@asynccontextmanager
async def node(role: str, client: httpx.AsyncClient, **settings: str | int) -> AsyncIterator[NodeProcess]:
    """A node that is ready; `settings` are written with `__` for the dot (`cache__pages=64`)."""
    flags = [f"--{key.replace('__', '.').replace('_', '-')}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "app", "serve", "--role", role, "--http.port", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        log = Path(folder) / "node.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())  # noqa: ASYNC220  returns at once
        try:
            url = await _ready(process, log, client)
            yield NodeProcess(pid=process.pid, url=url, client=client)
        finally:
            await asyncio.shield(asyncio.to_thread(_stop, process))


async def _ready(process: subprocess.Popen[bytes], log: Path, client: httpx.AsyncClient) -> str:
    """The node's url, once it serves."""
    until, url = time.monotonic() + _START_S, ""
    while time.monotonic() < until:
        if process.poll() is not None:
            raise NodeFailed(f"a node ended with {process.returncode}:\n{_tail(log)}")
        url = url or _published_url(log)
        if url:
            try:
                if (await client.get(f"{url}/readyz")).status_code == 200:
                    return url
            except httpx.TransportError:
                pass  # it has bound its port and does not serve yet
        await asyncio.sleep(0.2)
    raise NodeFailed(f"a node was not ready within {_START_S} s:\n{_tail(log)}")


def _published_url(log: Path) -> str:
    """Port 0 takes any free port; the log says which."""
    for line in log.read_text(errors="replace").splitlines():
        if '"node.listening"' in line:
            return str(json.loads(line)["url"])
    return ""


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for one that does not end by itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
