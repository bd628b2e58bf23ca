"""Processes with the real transfer engine: memory that is written into, and a sender that is told what to do.

They are spawned, never forked, and the test's own process does not load the engine: it reads its
environment once, and other tests may want another one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import psutil

from app.errors import KvferryError
from app.transfer.base import Block, Region, Status
from app.transfer.engine import Engine, Limits
from app.transfer.mooncake import MooncakeDriver, environment, prepare

HOST = "127.0.0.1"
SIZE = 1 << 20
LIMITS = Limits(descriptor_bytes=64 << 10, deadline_s=5.0, retries=1, retry_after_s=1.1, late_landing_s=0.2)


Outcome = tuple[str | None, float]
"""The error, if any, and the seconds until the batch ended."""


def pattern(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(1, 256, SIZE, dtype=np.uint8)


def _prepare() -> None:
    prepare(environment(bind=HOST, lanes=2, progress_timeout_s=5))


def _listening() -> list[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def receive(control: Connection) -> None:
    """Register memory, say where it is, and answer questions about it until told to end."""
    _prepare()
    driver = MooncakeDriver(HOST)
    memory = np.zeros(SIZE, np.uint8)
    driver.register(Region("memory", memory.ctypes.data, SIZE))
    control.send((driver.session, memory.ctypes.data, _listening()))
    while control.recv() == "content":
        control.send_bytes(memory.data)
    driver.unregister(Region("memory", memory.ctypes.data, SIZE))


def first_submits(control: Connection) -> None:
    """Seconds of a first submit with a probe before it, and without, while somebody idles at the peer's port."""
    _prepare()
    peer, met, stranger = (MooncakeDriver(HOST) for _ in range(3))
    memory = np.zeros(SIZE, np.uint8)
    for driver in (peer, met, stranger):
        driver.register(Region("memory", memory.ctypes.data, SIZE))
    assert met.probe(peer.session)
    half = SIZE // 2
    block = Block(memory.ctypes.data, memory.ctypes.data + half, half)
    seconds = []
    with socket.create_connection((HOST, int(peer.session.rpartition(":")[2]))):
        time.sleep(0.2)  # it is being listened to
        for driver in (met, stranger):
            started_s = time.monotonic()
            submitted = driver.submit(peer.session, block)
            seconds.append(time.monotonic() - started_s)
            while driver.check(submitted) is Status.PENDING:
                time.sleep(0.001)
    control.send(seconds)
    control.recv()


def send(control: Connection) -> None:
    """Write a pattern to the places asked for, all at once; answer how each batch ended."""
    _prepare()
    asyncio.run(_send(control))


async def _send(control: Connection) -> None:
    engine = Engine(lambda: MooncakeDriver(HOST), LIMITS)
    await engine.start()
    memory = pattern(1)
    await engine.register([Region("memory", memory.ctypes.data, SIZE)])
    control.send((engine.session, engine.transport, _listening()))
    while (wanted := await asyncio.to_thread(control.recv)) is not None:

        async def write(session: str, base: int, offset: int, length: int) -> Outcome:
            engine.add_peer(session, [Region("memory", base, SIZE)])
            started_s = time.monotonic()
            batch = engine.submit(session, [Block(memory.ctypes.data + offset, base + offset, length)])
            try:
                await engine.wait([batch])
            except KvferryError as failure:
                return f"{type(failure).__name__}: {failure.message}", time.monotonic() - started_s
            finally:
                await engine.settle([batch])
            return None, time.monotonic() - started_s

        outcomes = await asyncio.gather(*(write(*one) for one in wanted))
        engine.check_integrity()
        control.send((outcomes, engine.statistics()))
    await engine.close()


@dataclass(frozen=True, kw_only=True)
class Child:
    """A spawned process, what it said first, and the pipe to it."""

    process: BaseProcess
    control: Connection
    hello: Any

    def ask(self, question: Any) -> Any:
        self.control.send(question)
        assert self.control.poll(100), "the process does not answer"
        return self.control.recv()

    def write(self, *places: tuple[str, int, int, int]) -> tuple[list[Outcome], dict[str, Any]]:
        """Of a sender: (session, base, offset, length) each. The outcomes and the engine's statistics."""
        found: tuple[list[Outcome], dict[str, Any]] = self.ask(places)
        return found

    def content(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self.control.send("content")
        assert self.control.poll(100), "the process does not answer"
        return np.frombuffer(self.control.recv_bytes(), np.uint8)


@contextmanager
def child(target: Any) -> Iterator[Child]:
    """Spawn a function with one end of a pipe; it is ended with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(100), "the process did not start"
        yield Child(process=process, control=ours, hello=ours.recv())
    finally:
        if process.is_alive():
            with suppress(OSError):
                ours.send(None)
            process.join(20)
        if process.is_alive():
            process.kill()
            process.join(20)
        ours.close()
        process.close()
