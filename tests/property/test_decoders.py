"""Everything that reads bytes from outside: a value, or one typed error, whatever comes."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.api.auth import Tokens
from app.api.generate import GenerateBody
from app.api.openai import ChatBody, CompletionBody
from app.core.ids import MAX_ROOM, RoomId
from app.core.rooms import parse_room
from app.core.slots import Metadata, SlotFormat, SlotRef
from app.errors import BadInput, Corruption, Denied, InvalidRequest, KvferryError, SettingsError
from app.hosts import AllowedHosts, Rule, base_url
from app.settings import load_settings
from app.settings.credentials import Scope, secret
from app.transfer.client import error_from_problem
from app.transfer.messages import (
    Abort,
    Accepted,
    Ahead,
    Complete,
    Destination,
    Drained,
    Failed,
    Introduction,
    Message,
    Told,
)

_QUICK = settings(max_examples=150, deadline=None)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
_FORM = SlotFormat(hidden=3, top_k=2)
_REF = SlotRef(index=4, generation=9, room=RoomId(7))
_RECORD = _FORM.encode(
    _REF.room,
    _REF.generation,
    Metadata(
        first_token=5,
        log_probability=-0.5,
        hidden=np.arange(3, dtype=np.float32),
        top_tokens=np.arange(2, dtype=np.int32),
        top_log_probabilities=np.zeros(2, np.float32),
    ),
)
_USED = 40 + 4 * 3 + 8 * 2
"""Bytes of the record that mean something: its head, the hidden state, two tokens with their scores."""


# ---------------------------------------------------------------------- metadata records


@pytest.mark.case("O1")
@_QUICK
@given(at=st.integers(0, _USED - 1), flip=st.integers(1, 255))
def test_a_record_with_a_changed_byte(at: int, flip: int) -> None:
    """A metadata record of which any byte has changed is never read."""
    assert _FORM.decode(_RECORD, _REF) is not None
    damaged = bytearray(_RECORD)
    damaged[at] ^= flip
    with pytest.raises(Corruption, match="slot 4"):
        _FORM.decode(bytes(damaged), _REF)


@pytest.mark.case("O1")
@_QUICK
@given(record=st.binary(min_size=_FORM.slot_bytes, max_size=_FORM.slot_bytes))
@example(record=bytes(_FORM.slot_bytes))
def test_any_bytes_as_a_record(record: bytes) -> None:
    """Bytes that nobody wrote as a record are nothing when they are zeroes, and corruption otherwise."""
    try:
        assert _FORM.decode(record, _REF) is None
    except Corruption:
        assert any(record)
    else:
        assert not any(record[:40])


@pytest.mark.case("O1")
@_QUICK
@given(
    room=st.integers(0, MAX_ROOM),
    generation=st.integers(0, 2**63),
    widths=st.tuples(st.integers(0, 65535), st.integers(0, 65535)),
)
def test_a_valid_record_of_somebody_else(room: int, generation: int, widths: tuple[int, int]) -> None:
    """A record with a right checksum is still refused when it names another room, use or width."""
    body = struct.pack("<QQQifHH", 0x4B56464552525932, room, generation, 1, 0.0, *widths)
    tail = bytes(_USED - 40)
    record = (body + struct.pack("<I", zlib.crc32(tail, zlib.crc32(body))) + tail).ljust(
        _FORM.slot_bytes, b"\0"
    )
    if (room, generation, widths) == (_REF.room, _REF.generation, (3, 2)):
        assert _FORM.decode(record, _REF) is not None
        return
    with pytest.raises(Corruption):
        _FORM.decode(record, _REF)


# ---------------------------------------------------------------------- messages and bodies


@pytest.mark.contract(126)
@pytest.mark.case("O1")
@pytest.mark.parametrize(
    "kind",
    [Abort, Accepted, Ahead, Complete, Destination, Drained, Failed, Introduction, Told,
     GenerateBody, CompletionBody, ChatBody],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
@_QUICK
@given(raw=st.binary(max_size=300) | _JSON.map(lambda value: json.dumps(value).encode()))
@example(raw=b"[" * 10_000)
@example(raw=b'{"reason": "\xed\xa0\x80"}')
@example(raw=b'{"pages": [1e999], "slot": NaN}')
def test_any_bytes_as_a_message(kind: Any, raw: bytes) -> None:
    """Any bytes are a message that can be sent again, or a ValidationError."""
    try:
        found = kind.model_validate_json(raw)
    except ValidationError:
        return
    if issubclass(kind, Message):  # the others take further fields, NaN among them
        assert kind.model_validate_json(found.model_dump_json()) == found


@_QUICK
@given(value=st.none() | st.booleans() | st.integers() | st.text(max_size=40))
@example(value="9" * 10_000)
@example(value="٧")
@example(value="1_0")
def test_any_value_as_a_room(value: Any) -> None:
    """A room is a number of 64 bits in plain digits, or InvalidRequest."""
    try:
        room = parse_room(value)
    except InvalidRequest:
        return
    assert 0 <= room <= MAX_ROOM
    assert str(room) == str(value).lstrip("0") or (room == 0 and not str(value).strip("0"))


@_QUICK
@given(
    problem=_JSON
    | st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "detail", "title", "room"), _JSON))
)
@example(problem={"type": "urn:kvferry:problem:corruption", "detail": "x" * 9000, "room": "7"})
def test_any_answer_as_an_error(problem: Any) -> None:
    """Whatever a peer answers with an error is one of our errors, its text bounded."""
    error = error_from_problem(502, problem, "http://127.0.0.1:1")
    assert isinstance(error, KvferryError)
    assert len(error.message) < 2100


# ---------------------------------------------------------------------- hosts, tokens, files


@pytest.mark.case("O2")
@_QUICK
@given(
    host=st.text(max_size=30) | st.from_regex(r"[0-9a-fx:.\[\]%@/?#]{1,24}", fullmatch=True),
    port=st.integers(1, 65535),
)
@example(host="127.0.0.1@x", port=1)
def test_any_text_as_a_host(host: str, port: int) -> None:
    """A host that passes gives a url with that host, and nothing else of the text gets into it."""
    from yarl import URL

    try:
        url = base_url("http", host, port)
    except InvalidRequest:
        return
    parsed = URL(url)
    assert (parsed.scheme, parsed.port, parsed.user, parsed.password) == ("http", port, None, None)
    assert (parsed.path, parsed.query_string, parsed.fragment) == ("/", "", "")
    assert parsed.host is not None
    allowed = AllowedHosts([Rule.parse("10.0.0.0/8")])
    try:
        allowed.require(host, port)
    except (Denied, BadInput):
        return
    # a name, which its addresses decide about, or an address of that network
    assert parsed.host.startswith("10.") or not parsed.host.replace(".", "").isdigit()


@_QUICK
@given(entry=st.text(max_size=30) | st.from_regex(r"[0-9a-z:./\[\]]{1,20}", fullmatch=True))
def test_any_text_as_a_rule(entry: str) -> None:
    """An entry of the allowed hosts is a rule or a ValueError."""
    try:
        rule = Rule.parse(entry)
    except ValueError:
        return
    assert (rule.name is None) != (rule.network is None)


@pytest.mark.case("O2")
@_QUICK
@given(header=st.none() | st.binary(max_size=60))
def test_any_header_as_a_token(header: bytes | None) -> None:
    """No header but the right one passes."""
    tokens = Tokens({"the-right-token": frozenset({Scope.READ})})
    try:
        tokens.require(header, Scope.READ)
    except Denied:
        return
    assert header is not None and header.split()[1:] == [b"the-right-token"]


@pytest.mark.case("O2")
@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=60))
@example(content=b"\xff\xfesecret")
@example(content=b"")
@example(content=b"good-token\r\n")
def test_any_bytes_as_a_token_file(content: bytes) -> None:
    """A token file holds one token, or the start ends with its key and without its content."""
    refused = found = None
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        try:
            settings = load_settings(overrides={"role": "prefill", "auth": {"token_file": file.name}})
            found = secret(settings.auth)
        except SettingsError as error:
            refused = error.message
    if refused is not None:
        assert refused.startswith("auth.token_file: ")
        assert len(content) < 6 or repr(content)[2:-1] not in refused
        return
    assert found == content.decode().strip()
    assert found and found.isascii() and " " not in found


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
@example(content=b"role = 'prefill'\n[http]\nport = 1e999")
@example(content=b"[[http]]")
def test_any_bytes_as_a_settings_file(content: bytes) -> None:
    """A settings file is read, or the start ends with a SettingsError."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        try:
            load_settings(config=Path(file.name), flags=["--role", "prefill"])
        except SettingsError:
            return
