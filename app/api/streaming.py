"""Server-sent events: the first piece decides the status, a later failure ends the stream with an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.api.legs import Leg, Piece, first_of, whole
from app.api.problems import problem_of
from app.errors import KvferryError

Render = Callable[[Piece], dict[str, Any]]


def event(data: dict[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


async def answer(http: HttpRequest, leg: Leg, *, stream: bool, full: Render, part: Render) -> Response:
    """The response of a leg: one document, or events that end with [DONE].

    A failure before the first token has its own status. After it the stream ends with an `error` event
    and without [DONE], so that half an answer never passes for a whole one.
    """
    if not stream:
        return JSONResponse(full(await whole(http, leg)))
    pieces = leg.pieces()
    first: Piece = await first_of(http, leg, anext(pieces))

    async def events() -> AsyncIterator[bytes]:
        try:
            yield event(part(first))
            async for piece in pieces:
                yield event(part(piece))
            yield event("[DONE]")
        except KvferryError as error:
            yield event({"error": problem_of(error)})
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
