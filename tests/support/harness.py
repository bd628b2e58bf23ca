"""A prefill node and decode nodes in one event loop, with the toy model and settable faults.

Writes go by address through `HeldDriver`s (one a node, kept in `drivers`), messages through a `Wire`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from app.api.app import create_app
from app.core.pages import pages_for
from app.core.rooms import parse_room
from app.core.slots import SLOT_GRAIN
from app.engine.load import load_engine
from app.engine.local import LocalRun, run_locally
from app.engine.sampling import Sampling
from app.errors import IntegrityError
from app.service.context import NodeContext
from app.service.decode_job import DecodeJob
from app.service.decode_rooms import DecodeRooms
from app.service.jobs import Job, Request
from app.service.node import Node
from app.service.prefill_job import PrefillJob
from app.service.prefill_rooms import PrefillRooms
from app.settings import NodeSettings, load_settings
from app.tiers.device import DevicePool
from app.transfer.base import Block
from app.transfer.messages import Message
from tests.support.faults import Brake, HeldDriver, Wire, tick
from tests.support.inprocess import WITHIN_S, Legs
from tests.support.patience import comes_true

PAGE = 16

_ports = itertools.count(20_000)
_rooms = itertools.count(secrets.randbits(40) << 16)

_BASE: dict[str, Any] = {
    "trace": True,
    "model": {"name": "toy"},
    # most of these tests count pages that move: what is reused has tests of its own
    "cache": {"page_size": PAGE, "pages": 64, "slots": 8, "reuse": "off"},
    "prefill": {"chunk_tokens": 8 * PAGE, "max_input_tokens": 64 * PAGE},
    "transfer": {
        "digests": "full",
        "retries": 0,
        "late_landing_s": 0.05,
        "progress_timeout_s": 1,
        "deadline_s": 15.0,
    },
    "deadlines": {"quarantine_s": 20.0, "message_s": 5.0, "drain_s": 10.0},
}


def node_settings(role: str, **sections: dict[str, Any] | Any) -> NodeSettings:
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in _BASE.items()}
    for key, value in sections.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return load_settings(overrides={"role": role, **merged})


def is_slot(block: Block) -> bool:
    """Whether a write carries a metadata record."""
    return block.length == SLOT_GRAIN


def page_list(job: Job) -> list[int]:
    """The pages that a job has been given."""
    assert job.pages is not None
    return [int(page) for page in job.pages]


async def eventually(condition: Callable[[], Any], *, within_s: float = WITHIN_S) -> None:
    """Return when the condition holds; an assertion fails when it does not in time."""
    assert await comes_true(condition, within_s), "the condition did not come true"


def prompt_of(tokens: int, *, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + i // 31) % 251 for i in range(tokens)]


@functools.cache
def _local(
    model: str, prompt: tuple[int, ...], new_tokens: int, chunk_tokens: int, proposals: int
) -> LocalRun:
    engine, _ = load_engine(name=model, page_size=PAGE, dtype="auto", device="cpu", threads=1)
    with DevicePool(engine.geometry, pages_for(len(prompt) + new_tokens, PAGE), 1) as pool:
        engine.bind([pool])
        return run_locally(
            engine, list(prompt), chunk_tokens=chunk_tokens, new_tokens=new_tokens, proposals=proposals
        )


__all__ = [
    "PAGE",
    "WITHIN_S",
    "Cluster",
    "Legs",
    "eventually",
    "is_slot",
    "node_settings",
    "page_list",
    "prompt_of",
]


class Cluster:
    """Nodes by role; the first of each is `prefill` and `decode`."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.nodes: list[Node] = []
        self.apps: dict[Node, Any] = {}
        self.drivers: dict[Node, HeldDriver] = {}
        """The first rank's."""
        self.ranks: dict[Node, list[HeldDriver]] = {}
        self._contexts: list[NodeContext] = []
        self._checks: list[Callable[[], None]] = []
        self._ticking: asyncio.Task[None] | None = None
        self._pumped: list[HeldDriver] = []

    # ------------------------------------------------------------------ nodes

    async def start(
        self, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
    ) -> Cluster:
        """One node of each role, with these settings over the common ones."""
        await self.add("prefill", **(prefill or {}))
        await self.add("decode", **(decode or {}))
        return self

    def build(self, role: str, *, real: bool = False, **sections: Any) -> Node:
        """A node that has not been started; a `real` one moves its bytes with the real transfer engine."""
        url = f"http://127.0.0.1:{next(_ports)}"
        settings = node_settings(role, **sections)
        drivers = [] if real else [HeldDriver() for _ in range(settings.cp.size)]
        waiting = iter(drivers)
        node = Node(
            settings,
            url=url,
            # a rank that rebuilds its engine gets the first one again
            driver=None if real else lambda: next(waiting, drivers[0]),
            client=self.wire.client(url),
        )
        self.nodes.append(node)
        self.ranks[node] = drivers
        if drivers:
            self.drivers[node] = drivers[0]
        self.apps[node] = self.wire.apps[url] = create_app(node)
        return node

    async def add(self, role: str, **sections: Any) -> Node:
        node = self.build(role, **sections)
        await node.start()
        self._contexts.append(node.context)
        self._checks.append(functools.partial(_check, node, node.context))
        self._pumped += self.ranks[node]
        if self._ticking is None:
            self._ticking = asyncio.create_task(tick(self._pumped))
        return node

    def _first(self, role: str) -> Node:
        return next(node for node in self.nodes if node.settings.role == role)

    @property
    def prefill(self) -> Node:
        return self._first("prefill")

    @property
    def decode(self) -> Node:
        return self._first("decode")

    @property
    def prefill_rooms(self) -> PrefillRooms:
        assert self.prefill.prefill is not None
        return self.prefill.prefill.rooms

    @property
    def decode_rooms(self) -> DecodeRooms:
        assert self.decode.decode is not None
        return self.decode.decode.rooms

    @property
    def writer(self) -> HeldDriver:
        """The driver that writes: prefill's."""
        return self.drivers[self.prefill]

    def brake(self, node: Node) -> Brake:
        return Brake(node)

    def pages_in(self, node: Node, blocks: Sequence[Block]) -> set[int]:
        """The pages of a node that writes go to; the metadata slots are left out."""
        found: set[int] = set()
        for block in blocks:
            for layout in node.context.layouts[0].values():
                offset = block.destination - layout.base
                if 0 <= offset < layout.region.length:
                    first = offset % layout.layer_stride // layout.spec.item_bytes
                    found |= set(range(first, first + block.length // layout.spec.item_bytes))
        return found

    def hold_room(self, legs: Legs) -> None:
        """Hold every write to the pages that a request has at decode."""
        decode = legs.decode
        assert decode.pages is not None
        pages, node = set(decode.pages.tolist()), self.decode
        for writer in self.ranks[self.prefill]:
            writer.hold(lambda block: bool(self.pages_in(node, [block]) & pages))

    async def call(self, node: Node, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        """A request of a client to a node's application."""
        return await self.wire.call(self.apps[node], method, f"{node.url}{path}", body)

    async def post(self, node: Node, path: str, message: Message, method: str = "POST") -> tuple[int, str]:
        """A control message by hand: the answer's status, and the name of its problem."""
        answer = await self.call(node, method, path, message.model_dump_json().encode())
        return answer.status_code, answer.json().get("type", "").rpartition(":")[2]

    # ------------------------------------------------------------------ requests

    def request(
        self, prompt: Sequence[int], *, room: int | None = None, new_tokens: int = 4, **more: Any
    ) -> Request:
        return Request(
            room=parse_room(next(_rooms) if room is None else room),
            prompt=list(prompt),
            max_new_tokens=new_tokens,
            sampling=Sampling(),
            bootstrap_url=more.pop("bootstrap_url", self.prefill.url),
            **more,
        )

    def start_prefill(self, request: Request, node: Node | None = None) -> PrefillJob:
        node = node or self.prefill
        assert node.prefill is not None
        job = node.prefill.rooms.enter(request)
        node.spawn(node.prefill.run(job), f"prefill {job.room}")
        return job

    def start_decode(
        self, request: Request, node: Node | None = None, *, first_position: int = 0
    ) -> DecodeJob:
        node = node or self.decode
        assert node.decode is not None
        job = node.decode.rooms.enter(request)
        job.first_position = first_position
        node.spawn(node.decode.run(job), f"decode {job.room}")
        return job

    def start_both(
        self,
        prompt: Sequence[int],
        *,
        decode: Node | None = None,
        first_position: int = 0,
        **options: Any,
    ) -> Legs:
        """The same request to both nodes, as a router does."""
        request = self.request(prompt, **options)
        return Legs(
            request=request,
            prefill=self.start_prefill(request),
            decode=self.start_decode(request, decode, first_position=first_position),
        )

    async def serve(self, prompt: Sequence[int], **options: Any) -> Legs:
        """A request from beginning to end, compared with a run without any transfer."""
        legs = self.start_both(prompt, **options)
        await self.expect_local(legs)
        return legs

    async def expect_local(self, legs: Legs) -> None:
        """Both legs succeed with equal pages at both ends, then the local run's logits, then its tokens."""
        tokens = await legs.answered()
        prefill, decode = legs.prefill, legs.decode
        assert (prefill.life.reason, decode.life.reason) == (None, None)
        assert prefill.facts["page_digest"] == decode.facts["page_digest"]
        settings = self.prefill.settings
        local = _local(
            settings.model.name,
            tuple(legs.request.prompt),
            legs.request.max_new_tokens,
            settings.prefill.chunk_tokens,
            self.decode.settings.model.draft_tokens if self.decode.context.engine.draft else 0,
        )
        assert prefill.first is not None
        assert [prefill.first.logits, *(t.logits for t in tokens[1:])] == local.logits
        drafts = [prefill.first.draft_logits, *(t.draft_logits for t in tokens[1:])]
        assert [one for one in drafts if one is not None] == local.draft_logits
        assert [t.token for t in tokens] == local.tokens
        counts = decode.facts.get("proposed_tokens", 0), decode.facts.get("accepted_tokens", 0)
        assert counts == (local.proposed, local.accepted)

    # ------------------------------------------------------------------ free = initial

    def held(self, node: Node) -> dict[str, int]:
        """What a node holds beyond its initial state."""
        context = node.context
        service = node.prefill or node.decode
        assert service is not None
        return {
            "pages": context.cache.pages - context.cache.free_pages - context.cache.cached_pages,
            "pins": context.cache.pins,
            "leases": context.cache.leases,
            "slots": context.slots.count - context.slots.free_slots,
            "rooms": len(service.rooms.table),
            "chunks": len(node.prefill.rooms.fifos) if node.prefill else 0,
            "holds": len(context.quarantine),
            "waiting": context.gate.waiting + context.forwards.waiting,
            "writes": sum(driver.in_flight() for driver in self.ranks[node]),
        }

    async def free(self, *, within_s: float = WITHIN_S) -> None:
        """Assert that every started node comes back to its initial state, with its tables intact."""
        nodes = [node for node in self.nodes if node._context is not None]
        until = time.monotonic() + within_s
        while any(any(self.held(node).values()) for node in nodes):
            shown = {node.settings.role: self.held(node) for node in nodes}
            assert time.monotonic() < until, f"not free: {shown}"
            await asyncio.sleep(0.002)
        for node in nodes:
            node.check_integrity()
            assert node.counters["task_faults"] == 0, "a task ended with a fault"
            assert node.counters["internal_errors"] == 0, "a handler ended with a fault"
            assert all(driver.checked_after_end == 0 for driver in self.ranks[node])

    def check_integrity(self) -> None:
        for check in self._checks:
            check()

    async def close(self) -> None:
        for driver in self._pumped:
            driver.works.set()
            driver.let_go()
        for node in self.nodes:
            await node.stop(grace_s=5)
        tasks = [*self.wire.tasks, *([self._ticking] if self._ticking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for driver in self._pumped:
            driver.forget_landings()


def _check(node: Node, context: NodeContext) -> None:
    """As Node.check_integrity, for a node that may have been stopped."""
    context.cache.check_integrity()
    context.slots.check_integrity()
    service = node.prefill or node.decode
    if service is None:
        raise IntegrityError("a started node has a service")
    service.rooms.table.check_integrity()
    if node.prefill is not None:
        node.prefill.rooms.fifos.check_integrity()
