"""Request traces: one JSON object a line, with the length of a prompt and the ids of its blocks of 512 tokens.

Equal ids are the same tokens behind the same prefix. The tokens themselves are made up from the ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import BenchFailed

BLOCK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Request:
    at_s: float
    """Since the start of the trace."""
    tokens: int
    blocks: npt.NDArray[np.int64]
    """The last one may be a part of a block."""

    def prompt(self) -> npt.NDArray[np.int64]:
        """Tokens that are equal where the ids of the blocks are."""
        tokens = self.blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        return (tokens.reshape(-1) & 0x7FFFFFFF)[: self.tokens]


def read(path: Path) -> list[Request]:
    """BenchFailed when it cannot be read, or holds something else."""
    try:
        with path.open() as lines:
            return [_request(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchFailed(f"the trace {path} cannot be read: {error}") from error


def _request(line: dict[str, object]) -> Request:
    tokens, ids = line["input_length"], line["hash_ids"]
    if not isinstance(tokens, int) or not isinstance(ids, Sequence) or tokens < 1:
        raise ValueError(f"no request: {line}")
    if len(ids) != -(-tokens // BLOCK_TOKENS):
        raise ValueError(f"{len(ids)} blocks for {tokens} tokens")
    return Request(
        at_s=float(line["timestamp"]) / 1e3,  # type: ignore[arg-type]
        tokens=tokens,
        blocks=np.asarray(ids, dtype=np.int64),
    )
