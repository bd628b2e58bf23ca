"""POST /generate: the native request, in the form that PD routers send."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.api.legs import Leg, Parsed, Piece
from app.api.streaming import answer
from app.engine.sampling import Sampling
from app.errors import InvalidRequest
from app.service.node import Node

Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Bootstrap(BaseModel):
    """What the router adds: where the prefill node is, and the room that both legs share."""

    bootstrap_host: Annotated[str, Field(max_length=256)] | None = None
    bootstrap_port: Port | None = None
    bootstrap_room: int | str | None = None


class Caching(BaseModel):
    """What a request says about caches, on every route that takes prompts."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="prompts under different salts never share a page"
    )
    no_store: bool = Field(False, description="keep nothing of this request for later ones")


class SamplingParams(BaseModel):
    """Fields of other servers are accepted when they change nothing here, and refused otherwise."""

    model_config = ConfigDict(extra="allow")

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: Annotated[int, Field(ge=1, le=1)] = 1

    _refused = (
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "min_new_tokens",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "stop_token_ids",
    )

    @model_validator(mode="after")
    def _supported(self) -> SamplingParams:
        used = [name for name in type(self)._refused.default if (self.model_extra or {}).get(name)]  # type: ignore[attr-defined]
        if used:
            raise ValueError(f"not supported: {', '.join(used)}")
        return self


class GenerateBody(Bootstrap, Caching):
    model_config = ConfigDict(extra="allow")

    text: Annotated[str, Field(max_length=1 << 22)] | None = None
    input_ids: Tokens | None = None
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = False
    rid: Annotated[str, Field(max_length=256)] | None = None


def stops(value: str | list[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def generate_router(node: Node) -> APIRouter:
    router = APIRouter(tags=["requests"])

    @router.post("/generate", summary="One leg of a request, in the router's native form")
    async def generate(http: HttpRequest, body: GenerateBody) -> Response:
        if (body.text is None) == (body.input_ids is None):
            raise InvalidRequest("exactly one of text and input_ids is needed")
        params = body.sampling_params
        ids = body.input_ids if body.input_ids is not None else node.text.encode(body.text or "")
        leg = Leg(
            node,
            Parsed(
                prompt=ids,
                sampling=Sampling(
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=max(params.top_k, 0),
                    seed=params.sampling_seed,
                ),
                max_new_tokens=params.max_new_tokens,
                stop=stops(params.stop),
                ignore_eos=params.ignore_eos,
                bootstrap_host=body.bootstrap_host,
                bootstrap_port=body.bootstrap_port,
                bootstrap_room=body.bootstrap_room,
                request_id=body.rid or "",
                salt=body.cache_salt,
                store=not body.no_store,
            ),
        )
        started = time.monotonic()
        first_s: list[float] = []

        def render(piece: Piece) -> dict[str, Any]:
            if not first_s:
                first_s.append(time.monotonic() - started)
            return native(node, leg, piece, started, first_s[0])

        return await answer(http, leg, stream=body.stream, full=render, part=render)

    return router


def native(node: Node, leg: Leg, piece: Piece, started_s: float, first_s: float) -> dict[str, Any]:
    """The native answer: text so far, its tokens, and what is known of the transfer."""
    last = piece.tokens[-1]
    reason: dict[str, Any] | None = None
    if piece.finish == "stop":
        reason = {"type": "stop", "matched": last.token}
    elif piece.finish == "length":
        reason = {"type": "length", "length": len(piece.tokens)}
    meta: dict[str, Any] = {
        "id": leg.request.request_id or str(leg.job.room),
        "finish_reason": reason,
        "prompt_tokens": len(leg.request.prompt),
        "completion_tokens": len(piece.tokens),
        "cached_tokens": leg.job.facts.get("cached_tokens", 0),
        "e2e_latency": round(time.monotonic() - started_s, 6),
        "kvferry": {"room": leg.job.room, "first_token_s": round(first_s, 6), **leg.job.facts},
    }
    if node.settings.trace:
        meta["kvferry"]["logits"] = [t.logits for t in piece.tokens]
        meta["kvferry"]["draft_logits"] = [t.draft_logits for t in piece.tokens]
    return {"text": piece.text, "output_ids": [t.token for t in piece.tokens], "meta_info": meta}
