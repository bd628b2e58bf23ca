"""Nodes and router as processes on loopback, always stopped again.

Nodes listen on ports that the system chooses; their own log tells which. Every process is in a session of
its own and is ended by its id.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

# one client: making one reads every certificate of the machine, and nothing here is encrypted; it keeps no connection
# to a process that is about to end
_http = httpx.Client(timeout=10, verify=False, limits=httpx.Limits(max_keepalive_connections=0))

START_S = 180.0
STOP_S = 25.0


class ClusterError(RuntimeError):
    """A process did not come up; the message ends with the last lines of its log."""


class Process:
    """One child process with its log."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as sink:
            self._child = subprocess.Popen(
                list(command), stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def require_running(self) -> None:
        if not self.running:
            raise ClusterError(f"{self.name} ended with {self._child.returncode}:\n{self.tail()}")

    def stop(self) -> int:
        """Ask it to end, force it after STOP_S; its exit status."""
        if self.running:
            self._child.terminate()
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
        return self._child.wait()

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class NodeProcess(Process):
    """`python -m app serve`, or another program that takes its flags, on a free port."""

    def __init__(
        self,
        name: str,
        role: str,
        folder: Path,
        flags: Sequence[str],
        *,
        program: Sequence[str] = ("app", "serve"),
    ) -> None:
        command = [sys.executable, "-m", *program, "--role", role, "--log.format", "json", *flags]
        super().__init__(name, command, folder)
        self.url = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_ready(self) -> None:
        """Return once the node can serve. ClusterError when it ends or takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.require_running()
            self.url = self.url or self._published()
            if self.url and _ok(f"{self.url}/readyz"):
                return
            time.sleep(0.1)
        raise ClusterError(f"{self.name} was not ready within {START_S} s:\n{self.tail()}")

    def _published(self) -> str:
        for line in self.log.read_text(errors="replace").splitlines():
            if '"node.listening"' in line:
                return str(json.loads(line)["url"])
        return ""

    def get(self, path: str) -> Any:
        return _http.get(f"{self.url}{path}").raise_for_status().json()


class Router(Process):
    """The public PD router. It tries no request twice; `flags` are further ones of its own."""

    def __init__(
        self,
        folder: Path,
        prefill: Sequence[NodeProcess],
        decode: Sequence[NodeProcess],
        flags: Sequence[str] = (),
    ) -> None:
        port, metrics = free_port(), free_port()
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for node in prefill:
            command += ["--prefill", node.url, str(node.port)]
        for node in decode:
            command += ["--decode", node.url]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
        command += [
            "--prometheus-port",
            str(metrics),
            "--worker-startup-check-interval",
            "1",
            "--disable-retries",
            *flags,
        ]
        super().__init__("router", command, folder)
        self.url = f"http://127.0.0.1:{port}"
        self._workers = (len(prefill), len(decode))

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.require_running()
            try:
                known = _http.get(f"{self.url}/workers").json()["stats"]
                if (known["prefill_count"], known["decode_count"]) == self._workers:
                    return
            except (httpx.HTTPError, ValueError, KeyError):
                pass
            time.sleep(0.2)
        raise ClusterError(f"the router knew no workers within {START_S} s:\n{self.tail()}")


class Cluster:
    """What is running. Nodes are in the order of their names."""

    def __init__(self, prefill: list[NodeProcess], decode: list[NodeProcess], router: Router | None) -> None:
        self.prefill = prefill
        self.decode = decode
        self.router = router


@contextmanager
def cluster(
    folder: Path,
    *,
    flags: Sequence[str] = (),
    prefill_flags: Sequence[Sequence[str]] = ((),),
    decode_flags: Sequence[Sequence[str]] = ((),),
    router: bool = True,
) -> Iterator[Cluster]:
    """One prefill node for each of `prefill_flags`, decode nodes likewise, and the router over them."""
    with ExitStack() as stack:
        nodes: dict[str, list[NodeProcess]] = {"prefill": [], "decode": []}
        for role, each in (("prefill", prefill_flags), ("decode", decode_flags)):
            for number, own in enumerate(each):
                node = NodeProcess(f"{role}-{number}", role, folder, [*flags, *own])
                stack.callback(node.stop)
                nodes[role].append(node)
        for node in (*nodes["prefill"], *nodes["decode"]):
            node.wait_ready()
        running = Cluster(nodes["prefill"], nodes["decode"], None)
        if router:
            running.router = Router(folder, running.prefill, running.decode)
            stack.callback(running.router.stop)
            running.router.wait_ready()
        yield running


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ok(url: str) -> bool:
    try:
        return _http.get(url).status_code == 200
    except httpx.HTTPError:
        return False
