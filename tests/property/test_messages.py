"""Whatever a peer says is decoded or refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.core.geometry import BufferSpec
from app.errors import BadInput
from app.transfer.blocks import BufferLayout
from app.transfer.messages import (
    Abort,
    BufferPlace,
    Complete,
    Destination,
    Failed,
    Introduction,
    Message,
    RankEndpoint,
    RankSent,
)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
_QUICK = settings(max_examples=60, deadline=None)

PLACE = BufferPlace.of(
    BufferLayout(
        spec=BufferSpec(owner="target", kind="kv", layer_ids=(0, 2), item_bytes=64, dtype="uint8"),
        base=1 << 20,
        layer_stride=640,
        pages=10,
    )
)
GOOD: list[Message] = [
    Destination(
        instance="d" * 32,
        prefill_instance="p" * 32,
        prompt_tokens=130,
        first_position=0,
        pages=(4, 5, 9),
        slot=3,
        generation=8,
    ),
    Complete(
        instance="p" * 32,
        generation=8,
        sent_bytes=4096,
        ranks=(
            RankSent(rank=0, positions=((0, 2), (4, 1)), sent_bytes=4096),
            RankSent(rank=1, positions=(), sent_bytes=0),
        ),
        digests=(1, 2**64 - 1),
    ),
    Failed(instance="p" * 32, generation=8, slug="deadline", reason="too late"),
    Abort(instance="d" * 32, reason="the client has gone"),
    Introduction(
        instance="p" * 32,
        role="prefill",
        url="http://127.0.0.1:1",
        capabilities=("drain-ack",),
        fingerprint={"page_size": 64},
        ranks=(RankEndpoint(rank=0, session="127.0.0.1:2", buffers=(PLACE,), slots_base=0, slots_bytes=512),),
    ),
]
_IDS = [type(m).__name__ for m in GOOD]


@pytest.mark.parametrize("message", GOOD, ids=_IDS)
def test_a_message_survives_its_own_wire(message: Message) -> None:
    """Encoding and decoding a message gives an equal one."""
    assert type(message).model_validate_json(message.model_dump_json()) == message


@pytest.mark.contract(126)
@pytest.mark.parametrize("message", GOOD, ids=_IDS)
@_QUICK
@given(data=st.data())
def test_a_damaged_message_is_refused_or_valid(message: Message, data: st.DataObject) -> None:
    """Replacing, dropping or adding any field gives a valid message or a ValidationError, nothing else."""
    body: dict[str, Any] = json.loads(message.model_dump_json())
    name = data.draw(st.sampled_from([*body, "unknown"]))
    if data.draw(st.booleans()):
        body[name] = data.draw(_JSON)
    else:
        body.pop(name, None)
    try:
        found = type(message).model_validate_json(json.dumps(body))
    except ValidationError:
        return
    assert set(body) <= set(type(message).model_fields)
    assert type(message).model_validate_json(found.model_dump_json()) == found


@pytest.mark.contract(126)
@_QUICK
@given(raw=st.binary(max_size=200))
@example(raw=pickle.dumps({"reason": "x"}))
@example(raw=b'{"reason": "\xff\xfe"}')
def test_any_bytes_are_no_message(raw: bytes) -> None:
    """Random bytes, bad UTF-8 and pickles are refused by every message type."""
    for kind in (Destination, Complete, Failed, Abort, Introduction):
        with pytest.raises(ValidationError):
            kind.model_validate_json(raw)


@pytest.mark.contract(126)
@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (0, {"pages": [-1]}),
        (0, {"pages": [1 << 20]}),
        (0, {"pages": ["4"] * 3 + [None]}),
        (0, {"prompt_tokens": 0}),
        (0, {"generation": 0}),
        (0, {"slot": 1 << 20}),
        (0, {"instance": "short"}),
        (0, {"extra": 1}),
        (1, {"settle_s": -1}),
        (1, {"settle_s": 1e9}),
        (1, {"digests": [2**64]}),
        (1, {"sent_bytes": -1}),
        (2, {"reason": "x" * 2001}),
        (4, {"role": "router"}),
        (4, {"ranks": []}),
    ],
)
def test_values_out_of_range_are_refused(index: int, changes: dict[str, Any]) -> None:
    """Negative, oversized, misspelt and unknown parts of a message raise a ValidationError."""
    body = json.loads(GOOD[index].model_dump_json()) | changes
    with pytest.raises(ValidationError):
        type(GOOD[index]).model_validate(body)


@pytest.mark.contract(126)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_stride": 639}, "layers of 640 bytes lie 639 apart"),
        ({"base": 2**64 - 1279}, "above the address space"),
    ],
)
def test_memory_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    """Layers that overlap and buffers beyond the address space are refused at the handshake."""
    body = json.loads(PLACE.model_dump_json())
    assert BufferPlace.model_validate(body).layout().address(2, 9) == (1 << 20) + 640 + 9 * 64
    with pytest.raises(ValidationError, match=message):
        BufferPlace.model_validate(body | changes)


def test_unordered_layers_are_refused_when_they_are_used() -> None:
    """A place whose layers are not ascending passes the wire and is refused as bad input."""
    place = PLACE.model_copy(update={"layer_ids": (2, 0)})
    with pytest.raises(BadInput, match="ascending and unique"):
        place.layout()
