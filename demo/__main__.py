"""Two nodes and the router on loopback; three prompts; every answer compared with a run without transfer.

python -m demo [--model smollm2 | glm-dsa-tiny] [--cp RANKS]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console
from rich.table import Table

from app.obs.logging import configure_logging
from demo.cluster import Cluster, ClusterError, cluster
from demo.prompts import Prompt, demo_prompts

NEW_TOKENS = 12
CHUNK_TOKENS = 512
THREADS = 2
PROPOSALS = 2
PAGES = 64
MODELS = ("smollm2", "glm-dsa-tiny")


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str
    cp: int

    @property
    def flags(self) -> list[str]:
        """Of both nodes. Exact reuse: the second prompt starts like the first, and its bits have to stay equal."""
        return [
            "--model.name", self.model, "--model.threads", str(THREADS), "--cache.pages", str(PAGES),
            "--model.draft-tokens", str(PROPOSALS), "--cache.reuse", "exact", "--trace", "true",
            "--prefill.chunk-tokens", str(CHUNK_TOKENS),
        ]  # fmt: skip

    @property
    def prefill_flags(self) -> list[str]:
        return ["--cp.size", str(self.cp), "--cp.shared-kv", "true"] if self.cp > 1 else []


if TYPE_CHECKING:
    from app.engine.base import Engine, Text
    from app.engine.local import LocalRun

console = Console(highlight=False, width=110)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered prompt, and what both nodes recorded of its room."""

    text: str
    tokens: list[int] | None
    logits: list[str] | None
    draft_logits: list[str | None] | None
    sent: dict[str, Any]
    landed: dict[str, Any]


def options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks of the prefill node")
    known = parser.parse_args(arguments)
    if not 1 <= known.cp <= 64:
        parser.error("--cp is from 1 to 64")
    return Options(model=known.model, cp=known.cp)


def main() -> int:
    """The number of answers that differ is the exit status (0: all equal)."""
    chosen = options()
    started = time.monotonic()
    configure_logging(level="warning", style="console")
    say(f"loading {chosen.model} for the reference")
    from app.engine.load import load_engine
    from app.engine.local import LocalPair

    def load(ranks: int) -> tuple[Engine, Text]:
        return load_engine(
            name=chosen.model, page_size=64, dtype="auto", device="cpu", threads=THREADS, ranks=ranks
        )

    engine, text = load(1)
    prompts = demo_prompts(text)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        say(f"starting a prefill node ({chosen.cp} ranks), a decode node and the router")
        with cluster(Path(folder), flags=chosen.flags, prefill_flags=[chosen.prefill_flags]) as running:
            answers = [ask(running, number, prompt) for number, prompt in enumerate(prompts, 1)]
            say("stopping everything")
    reference = LocalPair(load(chosen.cp)[0], engine, pages=PAGES, ranks=chosen.cp)
    equal = 0
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        say(f"prompt {number}: the same model without any transfer")
        run = reference.run(
            prompt.tokens, chunk_tokens=CHUNK_TOKENS, new_tokens=NEW_TOKENS, proposals=PROPOSALS
        )
        same = compare(answer, run, text.decode(visible(run.tokens, engine.stop_tokens)))
        equal += same
        console.print(f"  [dim]{'equal' if same else 'DIFFERENT'}[/dim]")
    reference.close()
    console.print(table(prompts, answers))
    console.print(f"[dim]{time.monotonic() - started:.0f} s[/dim]")
    console.print(f"demo: {len(prompts)} requests, {equal} equal")
    return len(prompts) - equal


def say(text: str) -> None:
    console.print(f"[dim]demo: {text}[/dim]")


def shown(text: str) -> str:
    """Random weights answer in random bytes: control characters must not reach the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text).replace("[", "\\[")


def visible(tokens: list[int], stops: frozenset[int]) -> list[int]:
    return [t for t in tokens if t not in stops]


def ask(running: Cluster, number: int, prompt: Prompt) -> Answer:
    """Send one prompt through the router and print its answer."""
    assert running.router is not None
    say(f"prompt {number}: {prompt.title} ({len(prompt.tokens)} tokens)")
    url = running.router.url
    with httpx.Client(timeout=300) as client:
        if prompt.question is None:
            text, tokens, traced = _generate(client, url, prompt)
        else:
            text, tokens, traced = _stream(client, url, prompt), None, {}
    sent = running.prefill[0].get("/rooms")["ended"][-1]
    landed = running.decode[0].get("/rooms")["ended"][-1]
    return Answer(
        text=text,
        tokens=tokens,
        logits=traced.get("logits"),
        draft_logits=traced.get("draft_logits"),
        sent=sent,
        landed=landed,
    )


def _generate(client: httpx.Client, url: str, prompt: Prompt) -> tuple[str, list[int], dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    body = {"input_ids": prompt.tokens, "sampling_params": sampling}
    answer = client.post(f"{url}/generate", json=body).raise_for_status().json()
    console.print(f"  {shown(answer['text']).strip()}")
    return answer["text"], answer["output_ids"], answer["meta_info"]["kvferry"]


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
            console.print(shown(piece), end="")
            text += piece
    console.print()
    return text


def compare(answer: Answer, run: LocalRun, text: str) -> bool:
    """Page digests first, then logits bit for bit, main and draft, then tokens, then text."""
    if answer.sent["page_digest"] != answer.landed["page_digest"]:
        return False
    # the first token's logits stay on the prefill node, and so do the draft's beside them
    if answer.logits is not None and answer.logits[1:] != run.logits[1:]:
        return False
    drafts = [one for one in (answer.draft_logits or [])[1:] if one is not None]
    if answer.draft_logits is not None and drafts != run.draft_logits[1:]:
        return False
    if answer.tokens is not None and answer.tokens != run.tokens:
        return False
    if answer.landed.get("accepted_tokens", 0) != run.accepted:
        return False
    # random bytes may end in the middle of a character, which an answer leaves out
    return answer.text == text.rstrip("\ufffd")


def table(prompts: list[Prompt], answers: list[Answer]) -> Table:
    """What each request cost."""
    shown = Table(title="one row a request")
    for name in ("request", "prompt tokens", "pages", "MB sent", "groups"):
        shown.add_column(name, justify="left" if name == "request" else "right")
    for name in ("cached", "forward s", "exposed ms", "first token s"):
        shown.add_column(name, justify="right")
    for prompt, answer in zip(prompts, answers, strict=True):
        shown.add_row(
            prompt.title,
            str(len(prompt.tokens)),
            str(answer.sent["pages"]),
            f"{answer.sent['sent_bytes'] / 1e6:.1f}",
            str(answer.sent["groups"]),
            f"{answer.sent['cached_tokens']}/{answer.landed['cached_tokens']}",
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
