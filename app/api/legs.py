"""From a request body to a room and back: what the three request routes share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from starlette.requests import Request as HttpRequest

from app.core.ids import RoomId
from app.core.rooms import parse_room
from app.engine.sampling import Sampling
from app.errors import ClientGone, Denied, InvalidRequest, KvferryError, NotReady
from app.hosts import base_url
from app.service.decode_rooms import tell_abort
from app.service.jobs import Job, Request, TokenOut
from app.service.node import Node

log = structlog.get_logger(__name__)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A body's common parts, before anything has been validated against this node."""

    prompt: Sequence[int]
    sampling: Sampling
    max_new_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    bootstrap_host: str | None
    bootstrap_port: int | None
    bootstrap_room: int | str | None
    request_id: str
    salt: str | None = None
    store: bool = True


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one more token added. `finish` is set on the last piece: stop or length."""

    text: str
    tokens: list[TokenOut]
    new_text: str
    finish: str | None


class Leg:
    """One leg of a request on this node: enters its room and yields pieces."""

    def __init__(self, node: Node, parsed: Parsed) -> None:
        self.node = node
        url = prefill_url(node, parsed.bootstrap_host, parsed.bootstrap_port)
        limits = node.settings.limits
        default = min(limits.default_new_tokens, limits.max_new_tokens)
        self.request = Request(
            room=parse_room(parsed.bootstrap_room),
            prompt=[int(t) for t in parsed.prompt],
            max_new_tokens=default if parsed.max_new_tokens is None else parsed.max_new_tokens,
            sampling=parsed.sampling,
            stop=parsed.stop,
            ignore_eos=parsed.ignore_eos,
            bootstrap_url=url,
            request_id=parsed.request_id,
            salt=parsed.salt,
            store=parsed.store,
        )
        self.job = self._start(url)

    def _start(self, url: str) -> Job:
        node = self.node
        node.context  # noqa: B018  raises NotReady while starting
        if node.draining:
            error = NotReady("the node is draining", room=self.request.room)
            refused_leg(node, url, self.request.room, error)
            raise error
        most = node.context.engine.vocabulary
        if any(not 0 <= t < most for t in self.request.prompt):
            raise InvalidRequest(f"a token id is outside 0..{most - 1}")
        if node.prefill is not None:
            prefill = node.prefill.rooms.enter(self.request)
            node.spawn(node.prefill.run(prefill), f"prefill {prefill.room}")
            return prefill
        assert node.decode is not None
        if not url:
            raise InvalidRequest(
                "bootstrap_host and bootstrap_port are missing: decode needs its prefill node"
            )
        decode = node.decode.rooms.enter(self.request)
        node.spawn(node.decode.run(decode), f"decode {decode.room}")
        return decode

    async def pieces(self) -> AsyncIterator[Piece]:
        """Output as it comes. Raises the room's failure; closing it early gives the room up."""
        job, text, tokens = self.job, "", []
        try:
            async for token in self._tokens():
                tokens.append(token)
                shown = self._visible(tokens)
                stopped, shown = _cut(shown, self.request.stop)
                if len(shown) < len(text):
                    shown = text
                piece = Piece(text=shown, tokens=list(tokens), new_text=shown[len(text) :], finish=None)
                text = shown
                finish = "stop" if stopped else self._finish(tokens)
                yield piece if finish is None else Piece(**{**piece.__dict__, "finish": finish})
                if finish is not None:
                    break
            await self._end()
        finally:
            if not job.life.ended:
                job.fail(ClientGone("the client closed its connection", room=job.room))

    async def _tokens(self) -> AsyncIterator[TokenOut]:
        job = self.job
        if self.node.prefill is not None:
            await job.answered.wait()
            self._raise_failure()
            first: TokenOut | None = getattr(job, "first", None)
            if first is not None:
                yield first
            return
        output: asyncio.Queue[TokenOut | None] = job.output  # type: ignore[attr-defined]
        while (token := await output.get()) is not None:
            yield token
        self._raise_failure()

    def _visible(self, tokens: Sequence[TokenOut]) -> str:
        ids = [t.token for t in tokens if t.token not in self.node.context.engine.stop_tokens]
        # an unfinished character shows up as a replacement mark: hold it back
        return self.node.text.decode(ids).rstrip("\ufffd")

    def _finish(self, tokens: Sequence[TokenOut]) -> str | None:
        if tokens[-1].token in self.node.context.engine.stop_tokens and not self.request.ignore_eos:
            return "stop"
        if len(tokens) >= self.request.max_new_tokens or self.node.prefill is not None:
            return "length"
        return None

    async def _end(self) -> None:
        """A stop string ends decoding early: that is a success, and the room is told so."""
        if not self.job.life.ended and self.node.decode is not None:
            self.node.decode.finish_early(self.job)
        await self.job.answered.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.job.life.reason is not None:
            raise self.job.life.reason


def _cut(text: str, stops: Sequence[str]) -> tuple[bool, str]:
    """Whether a stop string has come, and the text before the first one."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return bool(found), text[: min(found)] if found else text


async def until_gone(http: HttpRequest) -> None:
    """Return when the client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def whole(http: HttpRequest, leg: Leg) -> Piece:
    """The last piece of a leg; gives the room up when the client goes first."""

    async def collect() -> Piece:
        last: Piece | None = None
        async for piece in leg.pieces():
            last = piece
        if last is None:
            raise KvferryError("the leg ended without output", room=leg.request.room)
        return last

    return await first_of(http, leg, collect())


async def first_of(http: HttpRequest, leg: Leg, work: Awaitable[T]) -> T:
    """Run `work`, unless the client goes first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            leg.job.fail(ClientGone("the client closed its connection", room=leg.job.room))
        return await task
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


def prefill_url(node: Node, host: str | None, port: int | None) -> str:
    """Where a request says that its prefill node is; empty when it does not, or when this is that node.

    InvalidRequest for what is no host, HostDenied for one that decode may not contact. Names are looked up,
    and their addresses checked, when the connection is made.
    """
    if node.hosts is None or not host or not port:
        return ""
    url = base_url(node.settings.http.scheme, host, port)
    node.hosts.require(host, port)
    return url


def refused_body(node: Node, body: Any, error: KvferryError) -> None:
    """As `refused_leg`, out of a body that may be anything."""
    if not isinstance(body, dict):
        return
    host, port = body.get("bootstrap_host"), body.get("bootstrap_port")
    if not isinstance(host, str) or not isinstance(port, int) or not 1 <= port <= 65535:
        return
    try:
        refused_leg(node, prefill_url(node, host, port), parse_room(body.get("bootstrap_room")), error)
    except (InvalidRequest, Denied):
        return


def refused_leg(node: Node, url: str, room: RoomId, error: KvferryError) -> None:
    """Decode refused a request before it had a room: tell prefill, so that it holds nothing for it."""
    if node.decode is None or not url or room in node.decode.rooms.table:
        return
    node.spawn(_tell(node, url, room, error), f"abort {room}")


async def _tell(node: Node, url: str, room: RoomId, error: KvferryError) -> None:
    await tell_abort(node.context, url, room, error)
