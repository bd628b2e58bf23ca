"""The runtime contract of a node, as readable parts and one hash.

Two nodes exchange pages only when every part is equal: a page has no header, so a difference in page
size, dtype, layer ids or weights would be decoded as plausible nonsense.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.core.geometry import CacheGeometry
from app.core.slots import SlotFormat
from app.errors import FingerprintMismatch

PROTOCOL_VERSION = 2
_ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """`parts` is flat: dotted names to plain JSON values."""

    parts: Mapping[str, Any]

    @cached_property
    def hash(self) -> str:
        canonical = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Part name -> (ours, theirs), for the parts that are not equal."""
        names = sorted(set(self.parts) | set(other.parts))
        pairs = {n: (self.parts.get(n, _ABSENT), other.parts.get(n, _ABSENT)) for n in names}
        return {n: p for n, p in pairs.items() if p[0] != p[1]}

    def require_equal(self, other: Fingerprint, peer: str) -> None:
        """Raise FingerprintMismatch, showing each part that differs."""
        found = self.differences(other)
        if found:
            shown = "; ".join(f"{n}: ours {ours}, theirs {theirs}" for n, (ours, theirs) in found.items())
            raise FingerprintMismatch(f"peer {peer} has another runtime contract: {shown}", differences=found)


def build_fingerprint(
    *,
    geometry: CacheGeometry,
    model: str,
    model_revision: str,
    compute_dtype: str,
    draft: str | None,
    digest_mode: str,
    slots: SlotFormat,
    hidden_size: int,
    reuse: str = "any",
) -> Fingerprint:
    """Collect the parts. `model_revision` is a digest of the model's config and weights.

    `hidden_size` is the target's; the draft's own, which may differ, is that of the metadata slots.
    """
    drafts = [b.name for b in geometry.buffers if b.owner == "draft"]
    parts: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "page_size": geometry.page_size,
        "model": model,
        "model_revision": model_revision,
        "compute_dtype": compute_dtype,
        "draft": draft or "none",
        "digest_mode": digest_mode,
        "slot_bytes": slots.slot_bytes,
        "hidden_size": hidden_size,
        "draft_hidden_size": slots.hidden,
        "draft_top_k": slots.top_k,
        # a node is a whole model: heads are never shared out among tensor-parallel ranks
        "tensor_parallel": 1,
        "reuse": reuse,
        "draft_buffers": {"start": len(geometry.buffers) - len(drafts), "count": len(drafts)},
        "state_layer_ids": {b.name: list(b.layer_ids) for b in geometry.buffers if b.kind == "index"},
    }
    for name, described in geometry.describe().items():
        for key, value in described.items():
            parts[f"buffer.{name}.{key}"] = value
    return Fingerprint(parts=parts)
