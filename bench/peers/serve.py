"""The peer's process: one JSON request a line on stdin, one JSON answer a line on stdout.

`python -m bench.peers.serve`, in the peer's environment and the repository's root. A request is
{"do": name, ...}; an answer is {"ok": ...} or {"error": text}.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints must not look like an answer
    requests = _requests()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": requests[request.pop("do")](**request)}
        except Exception as error:  # whatever goes wrong in the peer is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _requests() -> dict[str, Callable[..., Any]]:
    from bench import lists, prompts
    from bench.churn import Load, churn

    forests: list[prompts.Forest] = []

    def upstream() -> Any:
        from bench.peers import upstream

        return upstream

    def grow(nodes: int) -> None:
        forests.clear()
        forests.append(prompts.Forest(upstream().RadixTree(), nodes))

    def filtered(pages: int, run: int, times: int) -> list[float]:
        chunk = lists.pages_in_runs(pages, run, 5)
        return lists.seconds_of(upstream().owner_filter(chunk, 3, 8), times)

    def coalesced(pages: int, run: int, times: int) -> list[float]:
        pair = [lists.pages_in_runs(pages, run, seed) for seed in (5, 6)]
        return lists.seconds_of(upstream().coalescing(*pair), times)

    return {
        "version": lambda: importlib.metadata.version("sglang"),
        "churn": lambda seed, **load: asdict(churn(upstream().host_pool(load["pages"]), Load(**load), seed)),
        "grow": grow,
        "match": lambda numbers: forests[0].match(numbers),
        "insert": lambda numbers: forests[0].insert(numbers),
        "evict": lambda times: forests[0].evict(times),
        "filter": filtered,
        "coalesce": coalesced,
    }


if __name__ == "__main__":
    main()
