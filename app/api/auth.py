"""Who may call what: every route has a scope, and every scope its tokens.

The scope follows from method and path, and what is not listed needs the highest one, so a new route is
closed until somebody opens it. The check runs before the body is read: whoever has no token cannot make a
node parse, look up or call anything.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import structlog
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from app.api.problems import problem_response
from app.errors import Denied, ScopeMissing, TokenMissing, TokenWrong
from app.obs.logging import RateLimited
from app.service.node import Node
from app.settings.credentials import Scope

log = structlog.get_logger(__name__)
_limited = RateLimited(log)

_OPEN = {"/livez", "/readyz", "/health", "/server_info", "/model_info", "/v1/models"}
"""What probes and routers ask: nothing of any request."""
_REQUESTS = {"/generate", "/v1/completions", "/v1/chat/completions"}
_READING = {"GET", "HEAD"}


def needed(method: str, path: str) -> Scope | None:
    """The scope of a call; None when anybody may make it."""
    if path.startswith("/v1/peer/"):
        return Scope.PEER
    if method in _READING:
        return None if path in _OPEN else Scope.READ
    return Scope.REQUEST if method == "POST" and path in _REQUESTS else Scope.ADMIN


class Tokens:
    """Tokens by what they are good for. None are known where none are set: everything is allowed then."""

    def __init__(self, scopes: Mapping[str, frozenset[Scope]]) -> None:
        # digests: of one length, so that comparing them tells nothing about the length of a token
        self._scopes = [(_digest(token), allowed) for token, allowed in scopes.items()]

    def require(self, authorization: bytes | None, scope: Scope) -> None:
        """TokenMissing, TokenWrong, or ScopeMissing when it is a token for something else."""
        if not self._scopes:
            return
        kind, _, token = (authorization or b"").partition(b" ")
        if kind.lower() != b"bearer" or not token.strip():
            raise TokenMissing("this call needs 'Authorization: Bearer TOKEN'")
        given, found = _digest(token.strip()), None
        for known, allowed in self._scopes:  # all of them, whichever it is
            if hmac.compare_digest(given, known):
                found = allowed
        if found is None:
            raise TokenWrong("the token is wrong")
        if scope not in found:
            raise ScopeMissing(f"the token is not for this call, which needs the scope {scope}", scope=scope)


def _digest(token: str | bytes) -> bytes:
    return hashlib.sha256(token if isinstance(token, bytes) else token.encode()).digest()


class Guard:
    """The middleware that asks for tokens."""

    def __init__(self, app: ASGIApp, *, tokens: Tokens, node: Node) -> None:
        self._app = app
        self._tokens = tokens
        self._node = node

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Denied as error:
                self._node.counters[f"problem.{error.slug}"] += 1
                _limited.warning("request.denied", path=scope["path"], reason=error.message)
                await problem_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Connection) -> None:
        wanted = needed(scope["method"], scope["path"])
        if wanted is None:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) > 1:  # two readers could take different ones
            raise TokenMissing("this call has more than one Authorization header")
        self._tokens.require(given[0] if given else None, wanted)


def with_security(document: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with the scope of each route."""
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["token"] = {"type": "http", "scheme": "bearer", "description": "where tokens are set"}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            scope = needed(method.upper(), path)
            if scope is not None:
                # a role name, as OpenAPI 3.1 allows for bearer tokens
                operation["security"] = [{"token": [str(scope)]}]
    return document
