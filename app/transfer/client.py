"""Sending control messages. aiohttp on the hot path: measured at half the cost of httpx a request."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from typing import Any, Protocol, get_args

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from app import errors
from app.errors import DeadlineExceeded, KvferryError, LegName, PeerFault, PeerRefused, PeerUnavailable
from app.hosts import AllowedHosts
from app.transfer.messages import Message


class ControlClient(Protocol):
    """One request and its JSON answer. Raises PeerFault, a refusal's own error, or DeadlineExceeded."""

    async def send(self, method: str, url: str, message: Message, *, timeout_s: float) -> dict[str, Any]: ...

    async def close(self) -> None: ...


def _by_slug() -> dict[str, type[KvferryError]]:
    found: dict[str, type[KvferryError]] = {}
    waiting: list[type[KvferryError]] = [KvferryError]
    while waiting:
        kind = waiting.pop()
        found[kind.slug] = kind
        waiting.extend(kind.__subclasses__())
    return found


_ERRORS = _by_slug()
_PLACES = ("room", "rank", "layer", "position", "page")


def error_from_problem(status: int, problem: Any, url: str) -> KvferryError:
    """The typed error that a problem document stands for; PeerRefused when it stands for none of ours."""
    if not isinstance(problem, dict):
        return PeerRefused(f"{url} answered {status}")
    slug = str(problem.get("type", "")).rpartition(":")[2]
    detail = str(problem.get("detail") or problem.get("title") or "no detail")[:2000]
    kind = _ERRORS.get(slug)
    if kind is None or kind is errors.KvferryError:
        return PeerRefused(f"{url} answered {status}: {detail}")
    places: dict[str, Any] = {key: value for key in _PLACES if type(value := problem.get(key)) is int}
    if isinstance(buffer := problem.get("buffer"), str):
        places["buffer"] = buffer[:128]
    if (leg := problem.get("leg")) in get_args(LegName):
        places["leg"] = leg
    return kind(detail, **places, peer=url)


class _Resolver(AbstractResolver):
    """Refuses names by the addresses that are about to be connected to, so no second look-up can differ."""

    def __init__(self, hosts: AllowedHosts) -> None:
        self._hosts = hosts
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not self._hosts.lists(host, port):
            self._hosts.require_addresses(host, [one["host"] for one in found], port)
        return found

    async def close(self) -> None:
        await self._inner.close()


class HttpControlClient:
    """Keep-alive connections to peers. A request is sent again once when a kept connection had died.

    `hosts` limits where it connects to; `tls` checks peers that are asked by HTTPS. Redirects are not
    followed: they would lead to hosts that nobody has checked.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        connections_per_peer: int = 32,
        hosts: AllowedHosts | None = None,
        tls: ssl.SSLContext | None = None,
        most_bytes: int = 4 << 20,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._headers = headers
        self._limit = connections_per_peer
        self._hosts = hosts
        self._tls = tls
        self._most_bytes = most_bytes

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                limit_per_host=self._limit,
                keepalive_timeout=60,
                resolver=None if self._hosts is None else _Resolver(self._hosts),
                ssl=True if self._tls is None else self._tls,
            )
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def send(self, method: str, url: str, message: Message, *, timeout_s: float) -> dict[str, Any]:
        if self._hosts is not None:
            at = URL(url)
            self._hosts.require(at.host or "", at.port or 0)
        body = message.model_dump_json().encode()
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        for last in (False, True):
            try:
                async with self._open().request(
                    method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
                ) as answer:
                    content = await self._content(answer)
                    if answer.status >= 300:
                        raise error_from_problem(answer.status, content, url)
                    if not isinstance(content, dict):
                        raise PeerFault(f"{url} answered without a JSON object")
                    return content
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # every peer message is idempotent, so a second try is safe
                if last or isinstance(error, aiohttp.ClientConnectorError):
                    raise PeerUnavailable(f"{url}: {error or type(error).__name__}") from error
            except TimeoutError as error:
                raise DeadlineExceeded(f"{url} did not answer within {timeout_s} s") from error
            except aiohttp.ClientError as error:
                raise PeerUnavailable(f"{url}: {error}") from error
        raise PeerUnavailable(f"{url} did not answer")

    async def _content(self, answer: aiohttp.ClientResponse) -> Any:
        """The answer's JSON, None when it is none. PeerFault when it is larger than any answer of a node."""
        raw = bytearray()
        async for part in answer.content.iter_any():
            raw += part
            if len(raw) > self._most_bytes:
                raise PeerFault(f"{answer.url} answers with more than {self._most_bytes} bytes")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)
