"""Two prefill nodes, two decode nodes and the router, each a process that can be killed, stopped and restarted."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from anyio import to_thread

from chaos.plan import NODES
from demo.cluster import NodeProcess, Router, free_port

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


_ROUTER = {
    "policy": "random", "request-timeout-secs": str(int(BOUND_S)), "health-check-interval-secs": "1",
    "health-check-timeout-secs": "1", "health-failure-threshold": "2", "health-success-threshold": "1",
}  # fmt: skip
"""It is told to notice dead nodes soon."""


class ChaosNode:
    """One address, and the processes that serve it one after the other."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.role = name, name.partition("-")[0]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lives = 0
        self._folder, self._seed = folder, seed
        self._process: NodeProcess | None = None

    @property
    def process(self) -> NodeProcess:
        """Of this life."""
        assert self._process is not None, f"{self.name} has not been started"
        return self._process

    @property
    def faults_log(self) -> Path:
        return self._folder / f"{self.name}.faults"

    @property
    def logs(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self.name}-life-*.log"))

    def start(self) -> None:
        self.lives += 1
        settings = {**_COMMON, **(_PREFILL if self.role == "prefill" else {}), "http.port": str(self.port)}
        self._process = NodeProcess(
            f"{self.name}-life-{self.lives}",
            self.role,
            self._folder,
            _flags(settings),
            program=(
                "chaos.node", "--faults-log", str(self.faults_log),
                "--faults-seed", f"{self._seed}/{self.name}/{self.lives}",
            ),
        )  # fmt: skip

    async def ready(self) -> None:
        await to_thread.run_sync(self.process.wait_ready, abandon_on_cancel=True)

    def kill(self) -> None:
        self.process.kill()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self._process is not None and self._process.running:
            self.signal(signal.SIGCONT)
            self._process.stop()

    def fault_counts(self) -> Counter[str]:
        if not self.faults_log.exists():
            return Counter()
        return Counter(json.loads(line)["fault"] for line in self.faults_log.read_text().splitlines())


class Deployment:
    def __init__(self, nodes: dict[str, ChaosNode], folder: Path) -> None:
        self.nodes = nodes
        self.folder = folder
        self.router: Router | None = None

    async def start(self) -> None:
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            await node.ready()
        of: dict[str, list[NodeProcess]] = {"prefill": [], "decode": []}
        for node in self.nodes.values():
            of[node.role].append(node.process)
        flags = [*_flags(_ROUTER), "--disable-circuit-breaker"]
        self.router = Router(self.folder, of["prefill"], of["decode"], flags)
        await to_thread.run_sync(self.router.wait_ready, abandon_on_cancel=True)


def _flags(values: Mapping[str, str]) -> list[str]:
    return [part for key, value in values.items() for part in (f"--{key}", value)]


@contextmanager
def deployment(folder: Path, seed: int) -> Iterator[Deployment]:
    """Nothing of it is left running, also when a campaign breaks."""
    made = Deployment({name: ChaosNode(name, folder, seed) for name in NODES}, folder)
    with ExitStack() as stack:
        for node in made.nodes.values():
            stack.callback(node.end)
        stack.callback(lambda: made.router.stop() if made.router else None)
        yield made
