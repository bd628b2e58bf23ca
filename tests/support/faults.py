"""Settable faults: a driver whose writes can be held, a wire between nodes, a brake on forwards."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.core.ids import Source
from app.engine.base import Forwarded, ForwardStep, LayerHooks
from app.errors import DeadlineExceeded, PeerUnavailable
from app.service.node import Node
from app.transfer.base import Block, Status
from app.transfer.client import error_from_problem
from app.transfer.fake import FakeDriver
from app.transfer.messages import Message

Held = Callable[[Block], bool]


class HeldDriver(FakeDriver):
    """A FakeDriver whose writes can be held in the engine, and whose late landings come on time.

    While `held` is true of a block, its write is pending and its bytes have not landed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: Held | None = None
        self.works = threading.Event()
        """Cleared: a submit blocks the engine's thread, as a first contact can."""
        self.works.set()
        self._guard = threading.RLock()
        self._blocks: dict[int, Block] = {}

    def hold(self, held: Held = lambda block: True) -> None:
        with self._guard:
            self.held = held

    def let_go(self) -> None:
        with self._guard:
            self.held = None
            self.land()

    def submit(self, session: str, block: Block) -> int:
        assert self.works.wait(60), "nobody set the driver to work again"
        with self._guard:
            number = super().submit(session, block)
            self._blocks[number] = block
            return number

    def land(self) -> None:
        with self._guard:
            kept = [e for e in self._landings if self.held is not None and self.held(e[2])]
            self._landings = [e for e in self._landings if e not in kept]
            heapq.heapify(self._landings)
            super().land()
            for entry in kept:
                heapq.heappush(self._landings, entry)

    def check(self, submitted: int) -> Status:
        with self._guard:
            block = self._blocks.get(submitted)
            if block is not None and self.held is not None and self.held(block):
                return Status.PENDING
            return super().check(submitted)

    def in_flight(self) -> int:
        with self._guard:
            return len(self._pending)

    def blocks(self) -> list[Block]:
        with self._guard:
            return [block for _, block in self.submitted]

    def forget_landings(self) -> None:
        """Before the memory goes away."""
        with self._guard:
            self._landings.clear()


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One control message as it left its sender."""

    source: str
    method: str
    url: str
    kind: str
    room: int | None
    message: Message
    at_s: float


@dataclass(frozen=True, kw_only=True)
class MessageFault:
    """What the wire does with one message.

    It waits for `until` and `delay_s`, is then delivered `copies` times (0: lost, and the sender's time runs
    out), and the answer may be lost. `refused`: no connection, nothing is delivered.
    """

    delay_s: float = 0.0
    until: asyncio.Event | None = None
    copies: int = 1
    lose_answer: bool = False
    refused: bool = False


_CLEAR = MessageFault()
Rule = Callable[[Sent], MessageFault | None]


@dataclass(eq=False)
class Wire:
    """Delivers messages to the applications of the nodes, in this process."""

    apps: dict[str, Any] = field(default_factory=dict)
    rule: Rule = lambda sent: None
    log: list[Sent] = field(default_factory=list)
    answers: list[tuple[Sent, int, Any]] = field(default_factory=list)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def sent(self, kind: str, room: int | None = None) -> list[Sent]:
        return [s for s in self.log if s.kind == kind and room in (None, s.room)]

    def answered(self, kind: str, room: int | None = None) -> list[tuple[int, Any]]:
        return [
            (status, body) for s, status, body in self.answers if s.kind == kind and room in (None, s.room)
        ]

    def client(self, source: str) -> WireClient:
        return WireClient(self, source)

    async def deliver(self, sent: Sent) -> tuple[int, Any]:
        base = "/".join(sent.url.split("/")[:3])
        app = self.apps.get(base)
        if app is None:
            raise PeerUnavailable(f"{sent.url}: connection refused")
        answer = await self.call(app, sent.method, sent.url, sent.message.model_dump_json().encode())
        self.answers.append((sent, answer.status_code, answer.json()))
        return answer.status_code, answer.json()

    @staticmethod
    async def call(app: Any, method: str, url: str, body: bytes | None = None) -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.request(
                method, url, content=body, headers={"Content-Type": "application/json"}, timeout=60
            )


class WireClient:
    """A ControlClient over the wire. What has been sent arrives even when its sender stops waiting."""

    def __init__(self, wire: Wire, source: str) -> None:
        self._wire = wire
        self._source = source

    async def send(self, method: str, url: str, message: Message, *, timeout_s: float) -> dict[str, Any]:
        sent = _describe(self._source, method, url, message)
        self._wire.log.append(sent)
        fault = self._wire.rule(sent) or _CLEAR
        if fault.refused:
            raise PeerUnavailable(f"{url}: connection refused")
        task = asyncio.create_task(self._carry(sent, fault))
        self._wire.tasks.add(task)
        task.add_done_callback(self._wire.tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise DeadlineExceeded(f"{url} did not answer within {timeout_s} s")
        status, content = task.result()
        if fault.lose_answer:
            raise PeerUnavailable(f"{url}: the answer was lost")
        if status >= 400:
            raise error_from_problem(status, content, url)
        assert isinstance(content, dict)
        return content

    async def _carry(self, sent: Sent, fault: MessageFault) -> tuple[int, Any]:
        if fault.until is not None:
            await fault.until.wait()
        await asyncio.sleep(fault.delay_s)
        if not fault.copies:
            await asyncio.Event().wait()
        copies = await asyncio.gather(*(self._wire.deliver(sent) for _ in range(fault.copies)))
        return copies[-1]

    async def close(self) -> None:
        """Nothing is kept open."""


def _describe(source: str, method: str, url: str, message: Message) -> Sent:
    parts = url.split("/")[3:]
    if parts[-1] in ("handshake", "heartbeat"):
        kind, room = parts[-1], None
    else:
        room = int(parts[3])
        kind = parts[4] if len(parts) > 4 else "destine"
    return Sent(
        source=source,
        method=method,
        url=url,
        kind=kind,
        room=room,
        message=message,
        at_s=time.monotonic(),
    )


END = -1
"""In place of a layer: the end of a forward, after its last layer's hook."""


class Brake:
    """Stops a node's forwards at chosen layer ends, on the forward thread, until it is released."""

    def __init__(self, node: Node) -> None:
        engine = node.context.engine
        self._forward = engine.forward
        engine.forward = self._braked  # type: ignore[method-assign]
        self.steps: list[ForwardStep] = []
        self.layers = 0
        """Layer ends so far."""
        self.reached = threading.Event()
        self._go = threading.Event()
        self._when: Callable[[ForwardStep, int], bool] = lambda step, layer: False

    def at(self, when: Callable[[ForwardStep, int], bool]) -> None:
        """Stop at the end of a layer of which this is true, before the service hears of that end."""
        self.reached.clear()
        self._go.clear()
        self._when = when

    def at_layer(self, layer: int, *, start: int | None = None) -> None:
        self.at(lambda step, at: at == layer and start in (None, step.start))

    def release(self) -> None:
        self._when = lambda step, layer: False
        self._go.set()

    def _braked(self, step: ForwardStep, hooks: LayerHooks) -> Forwarded:
        self.steps.append(step)
        done = self._forward(step, _Braked(self, step, hooks))
        self.stop(step, END)
        return done

    def stop(self, step: ForwardStep, layer: int) -> None:
        if self._when(step, layer):
            self.reached.set()
            assert self._go.wait(30), "nobody released the brake"


class _Braked:
    def __init__(self, brake: Brake, step: ForwardStep, hooks: LayerHooks) -> None:
        self._brake, self._step, self._hooks = brake, step, hooks

    def before_read(self, layer: int) -> None:
        self._hooks.before_read(layer)

    def after_write(self, layer: int, source: Source) -> None:
        self._brake.stop(self._step, layer)
        self._brake.layers += 1
        self._hooks.after_write(layer, source)


async def tick(drivers: Iterable[HeldDriver]) -> None:
    """Let late bytes land on time, although no status is asked any more."""
    while True:
        await asyncio.sleep(0.005)
        for driver in drivers:
            driver.land()
