"""Clients that stay for the answer or leave before it, and what each of them saw."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from chaos.plan import Request


@dataclass(kw_only=True)
class Outcome:
    """`kind`: answered, failed (a typed error), broken (an end that no client can take for an answer), left,
    overdue. `complete` answers have a finish reason, and events an end."""

    number: int
    kind: str = "broken"
    seconds: float = 0.0
    status: int = 0
    error: str = ""
    tokens: list[int] = field(default_factory=list)
    complete: bool = False
    left: str = ""
    """Where its client was when it left: before_headers, before_first_token, mid_stream."""
    wrong: bool = False


async def ask(client: httpx.AsyncClient, url: str, request: Request, bound_s: float) -> Outcome:
    outcome = Outcome(number=request.number)
    began = time.monotonic()
    body: dict[str, Any] = {
        "input_ids": list(request.prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": request.new_tokens},
        "stream": request.stream,
    }
    leaves_s = request.leaves_after_s or bound_s
    with anyio.move_on_after(leaves_s) as scope:
        try:
            async with client.stream("POST", f"{url}/generate", json=body, timeout=bound_s + 5) as answer:
                outcome.status = answer.status_code
                await _read(answer, request, outcome)
        except httpx.HTTPError as error:
            outcome.kind, outcome.error = "broken", type(error).__name__
        except (ValueError, KeyError, TypeError) as error:
            outcome.kind, outcome.error = "broken", f"no answer: {type(error).__name__}"
    outcome.seconds = time.monotonic() - began
    if scope.cancelled_caught:
        outcome.kind = "left" if request.leaves_after_s else "overdue"
        outcome.left = request.client if request.leaves_after_s else ""
    return outcome


async def _read(answer: httpx.Response, request: Request, outcome: Outcome) -> None:
    if answer.status_code != 200:
        outcome.kind, outcome.error = "failed", slug_of(answer.status_code, await answer.aread())
        return
    if not request.stream:
        _take(json.loads(await answer.aread()), outcome)
        outcome.kind = "answered"
        return
    events = 0
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            outcome.kind = "answered"
            return
        piece = json.loads(line.removeprefix("data: "))
        if "error" in piece:
            outcome.kind, outcome.error = "failed", slug_of(0, json.dumps(piece["error"]).encode())
            return
        _take(piece, outcome)
        events += 1
        if request.leaves_after_events and events >= request.leaves_after_events:
            outcome.kind, outcome.left = "left", request.client
            return
    # no [DONE]: half an answer that says so
    outcome.kind, outcome.error, outcome.complete = "broken", "stream ended early", False


def _take(piece: dict[str, Any], outcome: Outcome) -> None:
    outcome.tokens = list(piece["output_ids"])
    outcome.complete = piece["meta_info"]["finish_reason"] is not None


def slug_of(status: int, raw: bytes) -> str:
    """The stable name of a problem document, wherever the router has put it; else the status."""
    text = raw.decode(errors="replace")
    mark = "urn:kvferry:problem:"
    if mark in text:
        return text.partition(mark)[2].partition('"')[0].rstrip("\\")
    try:
        found = json.loads(text)
        code = found["error"]["code"] if isinstance(found.get("error"), dict) else None
    except (ValueError, KeyError, AttributeError):
        code = None
    return f"router: {code}" if code else f"status {status}"
