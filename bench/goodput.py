"""Goodput of the transfer wrapper against a plain socket that moves as many bytes to the same process.

    this process                                  spawned process
    Engine over MooncakeDriver  --- blocks --->   registered memory
    socket                      --- stream --->   recv_into the same memory, one byte back at the end

Both send 64 MiB a run, alternately. The socket always streams contiguous bytes, also beside scattered
pages: what the machine's loopback gives at best.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from app.service.build import limits
from app.settings import NodeSettings
from app.transfer import mooncake
from app.transfer.base import Block, Region
from app.transfer.engine import Engine, Limits
from bench.report import BenchFailed, Row, Target

_HOST = "127.0.0.1"
_RUN_BYTES = 64 << 20
_MEMORY_BYTES = 128 << 20
_PIECE = 1 << 20

Memory = npt.NDArray[np.uint8]
Pairs = Sequence[tuple[int, int, int]]
"""(source offset, destination offset, length) of each copy of a run."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    work: str
    pairs: Pairs
    least: float


def shapes() -> list[Shape]:
    """Runs of one MiB each, and pages of 64 KiB of which no two are neighbours at either end."""
    mib = [(at, at, 1 << 20) for at in range(0, _RUN_BYTES, 1 << 20)]
    page, shuffle = 64 << 10, random.Random(7).sample
    places = range(0, _MEMORY_BYTES, 2 * page)
    scattered = [
        (source, destination, page)
        for source, destination in zip(
            shuffle(places, len(places)), shuffle(places, len(places)), strict=True
        )
    ]
    return [
        Shape(work="goodput, contiguous runs of 1 MiB / plain socket", pairs=mib, least=0.9),
        Shape(work="goodput, scattered pages of 64 KiB / plain socket", pairs=scattered, least=0.5),
    ]


def prepare() -> None:
    """The engine's environment as a node with default settings has it; before its first import."""
    transfer = NodeSettings(role="prefill").transfer
    values = mooncake.environment(
        bind=_HOST, lanes=transfer.lanes, progress_timeout_s=transfer.progress_timeout_s
    )
    mooncake.prepare(values)


def default_limits() -> Limits:
    """The limits of a node with default settings."""
    return limits(NodeSettings(role="prefill"))


def receive(control: Connection) -> None:
    """The spawned process: memory that the engine writes into, and a socket that streams into it."""
    prepare()
    driver = mooncake.MooncakeDriver(_HOST)
    memory: Memory = np.zeros(_MEMORY_BYTES, np.uint8)
    driver.register(Region("memory", memory.ctypes.data, memory.nbytes))
    with socket.create_server((_HOST, 0)) as listener:
        control.send((driver.session, memory.ctypes.data, listener.getsockname()[1]))
        stream, _ = listener.accept()
    view = memory.data
    with stream:
        while True:
            command = control.recv()
            if command == "stream":
                at = 0
                while at < _RUN_BYTES:
                    at += stream.recv_into(view[at : at + min(_PIECE, _RUN_BYTES - at)])
                stream.sendall(b"k")
            elif command == "content":
                control.send_bytes(view)
            elif command == "clear":
                memory.fill(0)
                control.send(None)
            else:
                return


@dataclass(frozen=True, kw_only=True)
class Receiver:
    session: str
    base: int
    stream: socket.socket
    control: Connection

    def send_plainly(self, memory: Memory) -> None:
        """One run over the plain socket, until its bytes have been taken."""
        self.control.send("stream")
        self.stream.sendall(memory.data[:_RUN_BYTES])
        if self.stream.recv(1) != b"k":
            raise BenchFailed("the receiving process is gone")

    def clear(self) -> None:
        self.control.send("clear")
        self.control.recv()

    def content(self) -> Memory:
        self.control.send("content")
        return np.frombuffer(self.control.recv_bytes(), np.uint8)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A spawned process (a fork after the engine has started would hang)."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(60):
            raise BenchFailed("the receiving process did not start")
        session, base, port = ours.recv()
        with closing(socket.create_connection((_HOST, port))) as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Receiver(session=session, base=base, stream=stream, control=ours)
            ours.send("end")
            process.join(10)
    finally:
        if process.is_alive():
            process.kill()


async def measure(runs: int, advance: Callable[[str], None]) -> list[Row]:
    """Alternating runs of each shape; afterwards the landed bytes are compared with the sent ones."""
    prepare()
    rows: list[Row] = []
    memory: Memory = np.random.default_rng(3).integers(0, 256, _MEMORY_BYTES, np.uint8)
    with receiver() as peer:
        engine = Engine(lambda: mooncake.MooncakeDriver(_HOST), default_limits())
        await engine.start()
        try:
            await engine.register([Region("memory", memory.ctypes.data, memory.nbytes)])
            engine.add_peer(peer.session, [Region("memory", peer.base, memory.nbytes)])
            rows += [await _compare(s, runs, engine, peer, memory, advance) for s in shapes()]
        finally:
            await engine.close()
    return rows


async def _compare(
    shape: Shape,
    runs: int,
    engine: Engine,
    peer: Receiver,
    memory: Memory,
    advance: Callable[[str], None],
) -> Row:
    base = memory.ctypes.data
    blocks = [Block(base + source, peer.base + to, length) for source, to, length in shape.pairs]
    ours: list[float] = []
    other: list[float] = []
    for run in range(runs + 1):
        if run == 0:
            peer.clear()
        started = time.perf_counter()
        await engine.wait([engine.submit(peer.session, blocks)])
        wrapper_s = time.perf_counter() - started
        if run == 0:
            _require_landed(shape, memory, peer.content())
        started = time.perf_counter()
        peer.send_plainly(memory)
        socket_s = time.perf_counter() - started
        if run:  # the first one connects and touches the memory
            ours.append(_RUN_BYTES / wrapper_s)
            other.append(_RUN_BYTES / socket_s)
        advance(shape.work)
    return Row(
        work=shape.work,
        ours=ours,
        other=other,
        unit="GB/s",
        target=Target(limit=shape.least, bound="at least"),
        detail={"blocks": len(blocks), "bytes": _RUN_BYTES},
    )


def _require_landed(shape: Shape, sent: Memory, landed: Memory) -> None:
    for source, to, length in shape.pairs:
        if not np.array_equal(sent[source : source + length], landed[to : to + length]):
            raise BenchFailed(f"{shape.work}: the bytes at {to} are not those that were sent")
