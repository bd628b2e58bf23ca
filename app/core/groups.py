"""Which layers are sent together.

What stays exposed after a forward is its last group, so the groups may shrink toward the last layer
(`taper`): 30 layers in groups of 8 are 8 8 8 6, or tapered 8 8 8 4 2, at the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import BadInput


def plan_groups(layers: Sequence[int], size: int, *, taper: bool = False) -> tuple[tuple[int, ...], ...]:
    """Consecutive groups of at most `size` layers, in the order given."""
    if size < 1:
        raise BadInput(f"a group has at least one layer, not {size}")
    groups: list[tuple[int, ...]] = []
    at = 0
    while at < len(layers):
        left = len(layers) - at
        take = min(size, left)
        if taper and 2 < left <= size:
            take = 1 << (left - 1).bit_length() - 1
        groups.append(tuple(layers[at : at + take]))
        at += take
    return tuple(groups)
