"""Errors as problem documents (RFC 9457), and the limits that every request meets first."""

from __future__ import annotations

from typing import Annotated, Any

import structlog
from fastapi import FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import KvferryError, LegName, NotReady
from app.obs.logging import RateLimited, log_once
from app.service.node import Node

log = structlog.get_logger(__name__)
_limited = RateLimited(log)

MEDIA_TYPE = "application/problem+json"
RoomInPath = Annotated[str, Path(pattern="^[0-9]{1,32}$", description="a number of 64 bits")]
_SLUGS = {400: "malformed", 404: "not-found", 405: "method-not-allowed", 413: "too-large"}


class Problem(BaseModel):
    """RFC 9457. `type` ends with the stable name of the error; further members say where it happened."""

    type: str = Field(examples=["urn:kvferry:problem:page-mismatch"])
    title: str
    status: int
    detail: str
    room: int | None = None
    leg: LegName | None = Field(None, description="the half of the request that failed")
    rank: int | None = None
    layer: int | None = None


def problem_response(error: KvferryError) -> JSONResponse:
    """The document of one of our errors."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem_of(error), status_code=error.status, headers=headers, media_type=MEDIA_TYPE)


def problem_of(error: KvferryError) -> dict[str, Any]:
    return {
        "type": f"urn:kvferry:problem:{error.slug}",
        "title": type(error).__name__,
        "status": error.status,
        "detail": error.message,
        **{k: _plain(v) for k, v in error.fields().items()},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _document(status: int, slug: str, title: str, detail: str) -> JSONResponse:
    body = {"type": f"urn:kvferry:problem:{slug}", "title": title, "status": status, "detail": detail}
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE)


def install(app: FastAPI, node: Node) -> None:
    """Handlers that turn every failure into a problem document, counted and logged once."""

    @app.exception_handler(KvferryError)
    async def ours(request: Request, error: KvferryError) -> JSONResponse:
        node.counters[f"problem.{error.slug}"] += 1
        if isinstance(error, NotReady):
            log.debug("request.not_ready", path=request.url.path, reason=error.message)  # probes ask often
        else:
            log_once(log, "request.failed", error, path=request.url.path)
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        node.counters["bad_messages"] += 1
        first = error.errors()[0]
        malformed = first["type"] == "json_invalid"
        where = ".".join(str(part) for part in first["loc"])
        others = len(error.errors()) - 1
        detail = f"{where}: {first['msg']}" + (f" (and {others} more)" if others else "")
        _limited.warning("request.invalid", path=request.url.path, reason=detail[:300])
        if malformed:
            return _document(400, "malformed", "Malformed", detail)
        return _document(422, "invalid-request", "InvalidRequest", detail)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code in (400, 413):
            node.counters["bad_messages"] += 1
            _limited.warning("request.invalid", path=request.url.path, reason=str(error.detail)[:300])
        slug = _SLUGS.get(error.status_code, f"http-{error.status_code}")
        return _document(error.status_code, slug, "HTTP error", str(error.detail))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        node.counters["internal_errors"] += 1
        log.error("request.bug", path=request.url.path, exc_info=error)
        return _document(500, "internal", "Internal error", "an internal error; the log has it")


class BodyLimit:
    """Refuses bodies over a size, by their declared length or while they arrive."""

    def __init__(self, app: ASGIApp, *, most: int, node: Node) -> None:
        self._app = app
        self._most = most
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._most:
            await self._refuse(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise HTTPException(413, f"the body is larger than {self._most} bytes")
            return message

        await self._app(scope, limited, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._node.counters["bad_messages"] += 1
        _limited.warning("request.too_large", path=scope["path"])
        detail = f"the body is larger than {self._most} bytes (http.max_body_bytes)"
        await _document(413, "too-large", "Body too large", detail)(scope, receive, send)
