"""Sending control messages. aiohttp on the hot path: measured at half the cost of httpx a request."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import aiohttp

from app import errors
from app.errors import DeadlineExceeded, KvferryError, PeerFault, PeerRefused, PeerUnavailable
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


def error_from_problem(status: int, problem: Any, url: str) -> KvferryError:
    """The typed error that a problem document stands for; PeerRefused when it stands for none of ours."""
    if not isinstance(problem, dict):
        return PeerRefused(f"{url} answered {status}")
    slug = str(problem.get("type", "")).rpartition(":")[2]
    detail = str(problem.get("detail") or problem.get("title") or "no detail")[:2000]
    kind = _ERRORS.get(slug)
    if kind is None or kind is errors.KvferryError:
        return PeerRefused(f"{url} answered {status}: {detail}")
    return kind(detail, room=problem.get("room"), peer=url)


class HttpControlClient:
    """Keep-alive connections to peers. A request is sent again once when a kept connection had died."""

    def __init__(self, *, token: str | None = None, connections_per_peer: int = 32) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._headers = headers
        self._limit = connections_per_peer

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=self._limit, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def send(self, method: str, url: str, message: Message, *, timeout_s: float) -> dict[str, Any]:
        body = message.model_dump_json().encode()
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        for last in (False, True):
            try:
                async with self._open().request(
                    method, url, data=body, headers=headers, timeout=timeout
                ) as answer:
                    try:
                        content = await answer.json(content_type=None)
                    except ValueError:
                        content = None
                    if answer.status >= 400:
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

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)
