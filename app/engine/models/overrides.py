"""What settings add to a model's config before it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FREQUENCY, _OFFSET = "index_topk_freq", "index_skip_topk_offset"


def merge_overrides(
    overrides: Mapping[str, Any] | None, freq: int | None, offset: int | None
) -> dict[str, Any]:
    """Config overrides with the index top-k settings in them.

    Frequency and offset decide which layers compute an index of their own. An offset of 0 means unset, and so
    does None: then the override of that name stays, or the model's own value. All other keys are kept.
    """
    merged = {k: v for k, v in (overrides or {}).items() if not (k == _OFFSET and v == 0)}
    if freq:
        merged[_FREQUENCY] = freq
    if offset:
        merged[_OFFSET] = offset
    return merged
