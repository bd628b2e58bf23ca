"""Two prefill nodes, two decode nodes and the router, each a process that can be killed, stopped and restarted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from chaos.plan import NODES
from demo.cluster import START_S, ClusterError, Process, free_port

PAGE_SIZE, CHUNK_TOKENS = 16, 64
MESSAGE_S, LATE_LANDING_S, WRITE_S = 2.0, 3.0, 6.0
QUARANTINE_S = 15.0
"""More than a lease of 4 s, one group's writes and a late landing together."""
PROGRESS_TIMEOUT_S = 2
PHASES_S = {
    "bootstrap": 10.0,
    "parked": 10.0,
    "queue": 20.0,
    "forward": 20.0,
    "transfer": 20.0,
    "decode": 20.0,
}
DRAIN_S = 8.0
BOUND_S = sum(PHASES_S.values()) + DRAIN_S
"""What a request may take: all its phases one after the other. Those of a real one overlap."""

_COMMON = {
    "model.name": "toy-dsa", "model.layer-delay-s": "0.004",
    "cache.page-size": str(PAGE_SIZE), "cache.pages": "96", "cache.slots": "16", "cache.reuse": "page",
    "prefill.chunk-tokens": str(CHUNK_TOKENS), "prefill.max-input-tokens": "512",
    "transfer.digests": "full", "transfer.group-layers": "3", "transfer.retries": "2",
    "transfer.progress-timeout-s": str(PROGRESS_TIMEOUT_S), "transfer.deadline-s": str(WRITE_S),
    "transfer.late-landing-s": str(LATE_LANDING_S),
    "deadlines.handshake-s": str(MESSAGE_S), "deadlines.message-s": str(MESSAGE_S),
    "deadlines.drain-s": str(DRAIN_S), "deadlines.quarantine-s": str(QUARANTINE_S),
    "deadlines.tombstone-s": "10", "deadlines.stall-s": "15", "deadlines.shutdown-s": "5",
    **{f"deadlines.{name}-s": str(seconds) for name, seconds in PHASES_S.items()},
}  # fmt: skip
_PREFILL = {"hicache.host-ratio": "2", "hicache.checks": "full"}


class ChaosNode:
    """One address, and the processes that serve it one after the other."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.role = name, name.partition("-")[0]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lives = 0
        self._folder, self._seed = folder, seed
        self.process: Process | None = None

    @property
    def faults_log(self) -> Path:
        return self._folder / f"{self.name}.faults"

    @property
    def logs(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self.name}-life-*.log"))

    def start(self) -> None:
        self.lives += 1
        settings = {**_COMMON, **(_PREFILL if self.role == "prefill" else {})}
        command = [sys.executable, "-m", "chaos.node", "--faults-log", str(self.faults_log)]
        command += ["--faults-seed", f"{self._seed}/{self.name}/{self.lives}"]
        command += ["--role", self.role, "--http.port", str(self.port), "--log.format", "json"]
        for key, value in settings.items():
            command += [f"--{key}", value]
        self.process = Process(f"{self.name}-life-{self.lives}", command, self._folder)

    async def ready(self, client: httpx.AsyncClient) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.process.require_running()
            try:
                if (await client.get(f"{self.url}/readyz", timeout=5)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await anyio.sleep(0.1)
        raise ClusterError(f"{self.name} was not ready within {START_S} s:\n{self.process.tail()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process is not None and self.process.running:
            self.signal(signal.SIGCONT)
            self.process.stop()

    def fault_counts(self) -> Counter[str]:
        import json

        counts: Counter[str] = Counter()
        if self.faults_log.exists():
            for line in self.faults_log.read_text().splitlines():
                counts[json.loads(line)["fault"]] += 1
        return counts


class ChaosRouter(Process):
    """The public router, told to notice dead nodes soon. It tries no request twice."""

    def __init__(self, folder: Path, nodes: dict[str, ChaosNode]) -> None:
        port, metrics = free_port(), free_port()
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for node in nodes.values():
            command += [f"--{node.role}", node.url, *([str(node.port)] if node.role == "prefill" else [])]
        flags: dict[str, Any] = {
            "host": "127.0.0.1", "port": port, "prometheus-host": "127.0.0.1", "prometheus-port": metrics,
            "policy": "random", "worker-startup-check-interval": 1, "request-timeout-secs": int(BOUND_S),
            "health-check-interval-secs": 1, "health-check-timeout-secs": 1, "health-failure-threshold": 2,
            "health-success-threshold": 1,
        }  # fmt: skip
        for key, value in flags.items():
            command += [f"--{key}", str(value)]
        command += ["--disable-retries", "--disable-circuit-breaker"]
        super().__init__("router", command, folder)
        self.url = f"http://127.0.0.1:{port}"

    async def ready(self, client: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.require_running()
            try:
                known = (await client.get(f"{self.url}/workers")).json()["stats"]
                if (known["prefill_count"], known["decode_count"]) == (2, 2):
                    return
            except (httpx.HTTPError, ValueError, KeyError):
                pass
            await anyio.sleep(0.2)
        raise ClusterError(f"the router knew no workers within {START_S} s:\n{self.tail()}")


class Deployment:
    def __init__(self, nodes: dict[str, ChaosNode], folder: Path) -> None:
        self.nodes = nodes
        self.folder = folder
        self.router: ChaosRouter | None = None

    async def start(self, client: httpx.AsyncClient) -> None:
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            await node.ready(client)
        self.router = ChaosRouter(self.folder, self.nodes)
        await self.router.ready(client)


@contextmanager
def deployment(folder: Path, seed: int) -> Iterator[Deployment]:
    """Nothing of it is left running, also when a campaign breaks."""
    made = Deployment({name: ChaosNode(name, folder, seed) for name in NODES}, folder)
    with ExitStack() as stack:
        for node in made.nodes.values():
            stack.callback(node.end)
        stack.callback(lambda: made.router.stop() if made.router else None)
        yield made
