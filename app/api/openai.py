"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.api.generate import Bootstrap, Caching, Tokens, stops
from app.api.legs import Leg, Parsed, Piece
from app.api.streaming import answer
from app.engine.sampling import Sampling
from app.service.node import Node

_REFUSED = (
    "best_of",
    "echo",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "response_format",
    "tools",
    "functions",
    "suffix",
    "json_schema",
    "regex",
    "ebnf",
    "logprobs",
    "top_logprobs",
)


class OpenAiBody(Bootstrap, Caching):
    """Fields that both routes share. Others are accepted when they change nothing, and refused otherwise."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(max_length=256)] = ""
    max_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool = False
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    rid: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _supported(self) -> OpenAiBody:
        used = [name for name in _REFUSED if (self.model_extra or {}).get(name)]
        if used:
            raise ValueError(f"not supported: {', '.join(used)}")
        return self


class CompletionBody(OpenAiBody):
    prompt: Annotated[str, Field(max_length=1 << 22)] | Tokens


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(max_length=32)]
    content: Annotated[str, Field(max_length=1 << 22)]


class ChatBody(OpenAiBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = None


def openai_router(node: Node) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["requests"])

    def start(body: OpenAiBody, prompt: list[int], most: int | None) -> Leg:
        return Leg(
            node,
            Parsed(
                prompt=prompt,
                sampling=Sampling(
                    temperature=body.temperature, top_p=body.top_p, top_k=max(body.top_k, 0), seed=body.seed
                ),
                max_new_tokens=most,
                stop=stops(body.stop),
                ignore_eos=body.ignore_eos,
                bootstrap_host=body.bootstrap_host,
                bootstrap_port=body.bootstrap_port,
                bootstrap_room=body.bootstrap_room,
                request_id=body.rid or "",
                salt=body.cache_salt,
                store=not body.no_store,
            ),
        )

    @router.post("/completions", summary="Continue a text")
    async def completions(http: HttpRequest, body: CompletionBody) -> Response:
        prompt = node.text.encode(body.prompt) if isinstance(body.prompt, str) else list(body.prompt)
        leg = start(body, prompt, body.max_tokens)
        frame = _Frame(node, leg, "text_completion")
        return await answer(
            http,
            leg,
            stream=body.stream,
            full=lambda p: frame.wrap(p, {"text": p.text}, usage=True),
            part=lambda p: frame.wrap(p, {"text": p.new_text}),
        )

    @router.post("/chat/completions", summary="Answer a conversation")
    async def chat(http: HttpRequest, body: ChatBody) -> Response:
        prompt = node.text.chat([m.model_dump() for m in body.messages])
        leg = start(body, prompt, body.max_completion_tokens or body.max_tokens)
        whole, chunk = _Frame(node, leg, "chat.completion"), _Frame(node, leg, "chat.completion.chunk")
        return await answer(
            http,
            leg,
            stream=body.stream,
            full=lambda p: whole.wrap(p, {"message": {"role": "assistant", "content": p.text}}, usage=True),
            part=lambda p: chunk.wrap(p, {"delta": {"role": "assistant", "content": p.new_text}}),
        )

    return router


class _Frame:
    """The envelope around one choice."""

    def __init__(
        self,
        node: Node,
        leg: Leg,
        kind: Literal["text_completion", "chat.completion", "chat.completion.chunk"],
    ) -> None:
        self._leg = leg
        self._fixed = {
            "id": leg.request.request_id or f"room-{leg.job.room}",
            "object": kind,
            "created": int(time.time()),
            "model": node.context.engine.name,
        }

    def wrap(self, piece: Piece, content: dict[str, Any], *, usage: bool = False) -> dict[str, Any]:
        choice = {"index": 0, **content, "finish_reason": piece.finish}
        document: dict[str, Any] = {**self._fixed, "choices": [choice]}
        if usage:
            prompt, completion = len(self._leg.request.prompt), len(piece.tokens)
            document["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        return document
