"""Two nodes and the router on loopback; three prompts; every answer compared with a run without transfer."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from demo.cluster import Cluster, ClusterError, cluster
from demo.prompts import Prompt, demo_prompts

NEW_TOKENS = 12
CHUNK_TOKENS = 512
THREADS = 2
_FLAGS = (
    "--model.name", "smollm2", "--model.threads", str(THREADS), "--cache.pages", "64",
    "--trace", "true",
)  # fmt: skip

console = Console(highlight=False, width=110)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered prompt, and what both nodes recorded of its room."""

    text: str
    tokens: list[int] | None
    logits: list[str] | None
    sent: dict[str, Any]
    landed: dict[str, Any]


def main() -> int:
    """The number of answers that differ is the exit status (0: all equal)."""
    started = time.monotonic()
    say("loading the model for the reference")
    from app.engine.load import load_engine

    engine, text = load_engine(name="smollm2", page_size=64, dtype="auto", device="cpu", threads=THREADS)
    prompts = demo_prompts(text)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        say("starting a prefill node, a decode node and the router")
        flags = [*_FLAGS, "--prefill.chunk-tokens", str(CHUNK_TOKENS)]
        with cluster(Path(folder), flags=flags) as running:
            answers = [ask(running, number, prompt) for number, prompt in enumerate(prompts, 1)]
            say("stopping everything")
    from app.engine.local import run_locally
    from app.tiers.device import DevicePool

    engine.bind(DevicePool(engine.geometry, 64, 1))
    equal = 0
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        say(f"prompt {number}: the same model without any transfer")
        run = run_locally(engine, prompt.tokens, chunk_tokens=CHUNK_TOKENS, new_tokens=NEW_TOKENS)
        same = compare(answer, run.tokens, run.logits, text.decode(visible(run.tokens, engine.stop_tokens)))
        equal += same
        console.print(f"  [dim]{'equal' if same else 'DIFFERENT'}[/dim]")
    console.print(table(prompts, answers))
    console.print(f"[dim]{time.monotonic() - started:.0f} s[/dim]")
    console.print(f"demo: {len(prompts)} requests, {equal} equal")
    return len(prompts) - equal


def say(text: str) -> None:
    console.print(f"[dim]demo: {text}[/dim]")


def visible(tokens: list[int], stops: frozenset[int]) -> list[int]:
    return [t for t in tokens if t not in stops]


def ask(running: Cluster, number: int, prompt: Prompt) -> Answer:
    """Send one prompt through the router and print its answer."""
    assert running.router is not None
    say(f"prompt {number}: {prompt.title} ({len(prompt.tokens)} tokens)")
    url = running.router.url
    with httpx.Client(timeout=300) as client:
        if prompt.question is None:
            text, tokens, logits = _generate(client, url, prompt)
        else:
            text, tokens, logits = _stream(client, url, prompt), None, None
    sent = running.prefill[0].get("/rooms")["ended"][-1]
    landed = running.decode[0].get("/rooms")["ended"][-1]
    return Answer(text=text, tokens=tokens, logits=logits, sent=sent, landed=landed)


def _generate(client: httpx.Client, url: str, prompt: Prompt) -> tuple[str, list[int], list[str]]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    body = {"input_ids": prompt.tokens, "sampling_params": sampling}
    answer = client.post(f"{url}/generate", json=body).raise_for_status().json()
    console.print(f"  {answer['text'].strip()}")
    return answer["text"], answer["output_ids"], answer["meta_info"]["kvferry"]["logits"]


def _stream(client: httpx.Client, url: str, prompt: Prompt) -> str:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt.question}],
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        "stream": True,
    }
    text = ""
    console.print("  ", end="")
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            piece = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"]
            console.print(piece, end="")
            text += piece
    console.print()
    return text


def compare(answer: Answer, tokens: list[int], logits: list[str], text: str) -> bool:
    """Page digests first, then logits bit for bit, then tokens, then text."""
    if answer.sent["page_digest"] != answer.landed["page_digest"]:
        return False
    # the first token's logits stay on the prefill node
    if answer.logits is not None and answer.logits[1:] != logits[1:]:
        return False
    if answer.tokens is not None and answer.tokens != tokens:
        return False
    return answer.text == text


def table(prompts: list[Prompt], answers: list[Answer]) -> Table:
    """What each request cost."""
    shown = Table(title="one row a request")
    for name in ("request", "prompt tokens", "pages", "MB sent", "groups"):
        shown.add_column(name, justify="left" if name == "request" else "right")
    for name in ("forward s", "exposed ms", "first token s"):
        shown.add_column(name, justify="right")
    for prompt, answer in zip(prompts, answers, strict=True):
        shown.add_row(
            prompt.title,
            str(len(prompt.tokens)),
            str(answer.sent["pages"]),
            f"{answer.sent['sent_bytes'] / 1e6:.1f}",
            str(answer.sent["groups"]),
            f"{answer.sent['forward_s']:.2f}",
            f"{answer.sent['exposed_s'] * 1e3:.1f}",
            f"{answer.landed['first_token_s']:.2f}",
        )
    return shown


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        console.print(f"[red]demo: {error}[/red]")
        sys.exit(1)
