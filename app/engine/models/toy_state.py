"""The arithmetic of the toy engine: rows out of tokens, and a state that a draft can carry one row further.

    row p of layer l     hash of (row p-1, token p), repeated to the row's length
    index row p          hash of row p of the same layer
    sum after row p      over rows 0..p, layers and words: word * odd number of its place    (mod 2**64)
    state after row p    the sum, and the hash that row p+1 of each layer will be chained to
    token after row p    a function of the sum

One changed byte anywhere changes the sum: each factor is odd. And who has the state after row p and the token at
p+1 can compute row p+1 and so the state after it, without the pages: that is how the draft is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

HASH_BYTES = 16
SUM_BYTES = 8
INDEX_ROW_BYTES = 32
TOKENS = 95
FIRST_TOKEN = 32


def chained(above: bytes, token: int, layer: int) -> bytes:
    """The hash of a row under the row before it."""
    return xxhash.xxh3_128_digest(above + token.to_bytes(4, "little"), seed=layer)


def index_of(row: bytes, layer: int) -> bytes:
    """The hash of an index row beside its row's hash."""
    return xxhash.xxh3_128_digest(b"index" + row, seed=layer)


def filled(digests: Sequence[bytes], row_bytes: int) -> Bytes:
    """`[rows, row_bytes]`: each hash, repeated."""
    times = row_bytes // HASH_BYTES + 1
    joined = b"".join((digest * times)[:row_bytes] for digest in digests)
    return np.frombuffer(joined, np.uint8).reshape(len(digests), row_bytes).copy()


def mixed(values: Any) -> Words:
    """The finaliser of splitmix64, over arrays or single numbers."""
    x = np.asarray(values, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=256)
def _column_factors(words: int, tag: int) -> Words:
    return mixed(np.arange(1, words + 1, dtype=np.uint64) + np.uint64(tag << 20)) | np.uint64(1)


def row_sums(rows: Bytes, first_position: int, tag: int) -> Words:
    """What each row adds to the sum; `tag` tells buffers and layers apart."""
    missing = -rows.shape[1] % SUM_BYTES
    padded = np.pad(rows, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(rows)
    words = padded.view(np.uint64)
    columns = _column_factors(words.shape[1], tag)
    positions = np.arange(first_position, first_position + len(rows), dtype=np.uint64)
    odd = mixed(positions + np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
    with np.errstate(over="ignore"):
        result: Words = (words * columns).sum(axis=1, dtype=np.uint64) * odd
    return result


def token_of(total: int) -> int:
    return FIRST_TOKEN + int(mixed(total)) % TOKENS


def logits_of(seed: int, token: int, vocabulary: int, stop: int) -> npt.NDArray[np.float32]:
    """Noise of a seed, under which `token` stands out; the stop token never does."""
    logits = np.random.default_rng(seed).standard_normal(vocabulary).astype(np.float32)
    logits[stop] = -10.0
    logits[token] += 10.0
    return logits
