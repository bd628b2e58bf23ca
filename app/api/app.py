"""The HTTP application of a node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError

from app import __version__
from app.api.admin import admin_router
from app.api.auth import Guard, Tokens, with_security
from app.api.generate import generate_router
from app.api.legs import refused_body
from app.api.openai import openai_router
from app.api.peer import peer_router
from app.api.problems import MEDIA_TYPE, BodyLimit, Problem, install
from app.errors import InvalidRequest, KvferryError
from app.service.node import Node
from app.settings.credentials import scopes

_REQUEST_PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")

_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The caller's fault",
        "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
    },
    "5XX": {
        "description": "This or the other node",
        "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
    },
}


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The document, made once, with the scope that each route needs."""
        if self.openapi_schema is None:
            self.openapi_schema = with_security(super().openapi())
        return self.openapi_schema


def create_app(node: Node) -> FastAPI:
    """The application over a node. Who serves it starts and stops the node."""
    app = _App(
        title="kvferry",
        version=__version__,
        summary="Moves KV cache from prefill to decode nodes while the forward still runs",
        responses=_RESPONSES,
        lifespan=_lifespan(node),
    )
    app.include_router(admin_router(node))
    app.include_router(peer_router(node))
    app.include_router(generate_router(node))
    app.include_router(openai_router(node))
    install(app, node)
    _tell_prefill_of_refusals(app, node)
    app.add_middleware(BodyLimit, most=node.settings.http.max_body_bytes, node=node)
    # added last, so it comes first: before a body is read
    app.add_middleware(Guard, tokens=Tokens(scopes(node.settings.auth)), node=node)
    return app


def _lifespan(node: Node) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await node.stop()

    return lifespan


def _tell_prefill_of_refusals(app: FastAPI, node: Node) -> None:
    """A request that decode refuses before it has a room is refused at prefill as well, promptly."""
    invalid: Any = app.exception_handlers[RequestValidationError]
    ours: Any = app.exception_handlers[KvferryError]

    @app.exception_handler(RequestValidationError)
    async def refused(request: Request, error: RequestValidationError) -> Any:
        if request.url.path in _REQUEST_PATHS:
            refused_body(node, error.body, InvalidRequest("decode refused the request as invalid"))
        return await invalid(request, error)

    @app.exception_handler(InvalidRequest)
    async def not_served(request: Request, error: InvalidRequest) -> Any:
        if request.url.path in _REQUEST_PATHS:
            refused_body(node, await request.json(), error)
        return await ours(request, error)
