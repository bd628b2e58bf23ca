"""Page lists to filter and to coalesce, and a clock for short calls. Imports numpy only."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int64]


def pages_in_runs(count: int, run: int, seed: int) -> Pages:
    """`count` page numbers in runs of about `run` (geometric), the runs in no order and never touching."""
    generator = np.random.default_rng(seed)
    lengths = np.minimum(generator.geometric(1 / run, count), count)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), count)) + 1]
    starts = generator.permutation(4 * count)[: len(lengths)] * 64
    parts = [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
    return np.concatenate(parts)[:count].astype(np.int64)


def seconds_of(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of `times` calls, after a tenth of that to warm up."""
    for _ in range(max(3, times // 10)):
        call()
    took_s = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            started = time.perf_counter_ns()
            call()
            took_s.append((time.perf_counter_ns() - started) * 1e-9)
    finally:
        gc.enable()
    return took_s
