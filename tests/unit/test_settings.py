"""Settings: where values come from, and what stops a start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from app.cli import main
from app.errors import SettingsError
from app.reference import settings as described
from app.settings import NodeSettings, load_settings
from app.settings.credentials import secret
from app.settings.sections import DeadlineSettings, TransferSettings

PREFILL = ["--role", "prefill"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the surrounding environment reaches these tests."""
    import os

    for name in list(os.environ):
        if name.startswith("KVFERRY_") and name != "KVFERRY_CACHE_DIR":
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def refused(config: Path | None = None, flags: list[str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config=config, flags=PREFILL if flags is None else flags)
    assert "\n" not in caught.value.message
    return caught.value.message


# ---------------------------------------------------------------------- precedence


def test_a_flag_wins_over_environment_file_and_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags go over the environment, that over the file, that over the defaults; sections merge by key."""
    config = write(
        tmp_path,
        "role = 'decode'\n[cache]\npages = 11\nslots = 12\npage_size = 16\n[limits]\nmax_new_tokens = 7",
    )
    monkeypatch.setenv("KVFERRY_CACHE__PAGES", "21")
    monkeypatch.setenv("KVFERRY_CACHE__SLOTS", "22")
    settings = load_settings(config=config, flags=["--cache.pages", "31"])
    assert (settings.cache.pages, settings.cache.slots, settings.cache.page_size) == (31, 22, 16)
    assert settings.role == "decode"
    assert settings.limits.max_new_tokens == 7
    assert settings.limits.default_new_tokens == 64
    assert settings.transfer == TransferSettings()


def test_overrides_stand_with_the_file_below_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's overrides win over the file and yield to the environment."""
    monkeypatch.setenv("KVFERRY_CACHE__PAGES", "90")
    settings = load_settings(overrides={"role": "prefill", "cache": {"pages": 80, "slots": 8}})
    assert (settings.cache.pages, settings.cache.slots) == (90, 8)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVFERRY_CONFIG names the file where no flag does."""
    monkeypatch.setenv("KVFERRY_CONFIG", str(write(tmp_path, "role = 'decode'")))
    assert load_settings().role == "decode"


def test_every_described_key_can_be_set_by_flag_variable_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag and the variable that the reference names for a key are known ones, with its default."""
    keys = [s for s in described() if s.default]
    assert len(keys) > 40
    flags = [part for s in keys for part in (s.flag, str(s.default))]
    plain = load_settings(flags=PREFILL).masked()
    assert load_settings(flags=[*PREFILL, *flags]).masked() == plain
    for setting in keys:
        monkeypatch.setenv(setting.variable, str(setting.default))
    assert load_settings(config=write(tmp_path, "role = 'prefill'")).masked() == plain


def test_settings_are_frozen() -> None:
    """Nothing changes a setting after the start."""
    settings = load_settings(flags=PREFILL)
    with pytest.raises(ValueError, match="frozen"):
        settings.cache.pages = 3  # type: ignore[misc]


# ---------------------------------------------------------------------- unknown and malformed


def test_an_unknown_key_in_the_file_is_named(tmp_path: Path) -> None:
    """A misspelt key, in a section or beside it, stops the start."""
    assert refused(write(tmp_path, "[transfer]\ngroup_layer = 4")) == "unknown key: transfer.group_layer"
    assert refused(write(tmp_path, "[transfers]\ngroup_layers = 4")) == "unknown key: transfers"


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable stops the start; variables of others do not."""
    monkeypatch.setenv("KVFERRY_TRANSFER__GROUP_LAYER", "4")
    monkeypatch.setenv("OTHER_THING", "4")
    assert refused() == "unknown environment variable: KVFERRY_TRANSFER__GROUP_LAYER"


def test_an_unknown_flag_is_named_without_its_value() -> None:
    """A misspelt flag stops the start; what follows it might be a secret and is not repeated."""
    assert refused(flags=[*PREFILL, "--auth.tokn", "hidden"]) == "unknown flag: --auth.tokn"
    assert refused(flags=[*PREFILL, "--auth.tokn=hidden"]) == "unknown flag: --auth.tokn"
    assert refused(flags=[*PREFILL, "stray"]) == "unexpected argument: stray"


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ([], "role"),
        (["--role", "both"], "role"),
        ([*PREFILL, "--http.port", "many"], "http.port"),
        ([*PREFILL, "--http.port"], "http.port"),
        ([*PREFILL, "--http.port", "70000"], "http.port"),
        ([*PREFILL, "--cache.pages", "0"], "cache.pages"),
        ([*PREFILL, "--transfer.mode", "eager"], "transfer.mode"),
        ([*PREFILL, "--http.advertise", "http://prefill"], "http.advertise"),
        ([*PREFILL, "--http.advertise", "prefill:8000"], "http.advertise"),
    ],
)
def test_a_bad_value_is_refused_by_its_key(flags: list[str], key: str) -> None:
    """The message of a bad value names its key."""
    assert key in refused(flags=flags)


def test_a_bad_variable_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of a bad value out of the environment names its key."""
    monkeypatch.setenv("KVFERRY_CACHE__PAGES", "some")
    assert refused().startswith("cache.pages: ")


@pytest.mark.parametrize("content", [b"role = ", b"\xff\xfe", None])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    """A file that is missing, no TOML or no UTF-8 stops the start and is named."""
    path = tmp_path / "node.toml"
    if content is not None:
        path.write_bytes(content)
    assert refused(path).startswith(f"{path}: ")


# ---------------------------------------------------------------------- combinations


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (["--prefill.chunk-tokens", "100"], ["prefill.chunk_tokens", "cache.page_size"]),
        (["--cache.pages", "63"], ["cache.pages", "prefill.max_input_tokens"]),
        (["--deadlines.quarantine-s", "24"], ["deadlines.quarantine_s", "transfer.progress_timeout_s"]),
        (["--transfer.deadline-s", "40"], ["deadlines.quarantine_s", "transfer.deadline_s"]),
        (["--deadlines.lease-s", "6"], ["deadlines.quarantine_s", "deadlines.lease_s"]),
        (["--deadlines.heartbeat-s", "2"], ["deadlines.lease_s", "deadlines.heartbeat_s"]),
        (["--http.host", "0.0.0.0", "--http.advertise", "a"], ["http.host", "auth.token"]),
        (["--http.host", "192.0.2.1"], ["http.host", "auth.token"]),
        (["--http.host", "0.0.0.0", "--auth.token", "t"], ["http.host", "http.advertise"]),
        (["--http.host", "::", "--auth.token", "t"], ["http.host", "http.advertise"]),
        (["--model.layer-delay-s", "0.1"], ["model.layer_delay_s"]),
        (["--model.name", "toy", "--model.device", "cuda"], ["model.device"]),
        (["--auth.token", "t", "--auth.token-file", "/dev/null"], ["auth.token", "auth.token_file"]),
    ],
)
def test_a_contradiction_names_its_keys(flags: list[str], keys: list[str]) -> None:
    """Settings that are valid alone and not together stop the start, naming each key involved."""
    message = refused(flags=[*PREFILL, *flags])
    assert [key for key in keys if key not in message] == []


def test_what_contradicts_for_one_role_may_suit_the_other() -> None:
    """Only prefill has to hold the longest prompt at once."""
    assert load_settings(flags=["--role", "decode", "--cache.pages", "63"]).cache.pages == 63


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    """Only addresses that others can reach need a token."""
    assert secret(load_settings(flags=[*PREFILL, "--http.host", host]).auth) is None


@pytest.mark.case("O1")
def test_loopback_is_the_default() -> None:
    """A node that was told nothing is not reachable from outside."""
    assert load_settings(flags=PREFILL).http.host == "127.0.0.1"


# ---------------------------------------------------------------------- deadlines


def _times() -> Iterator[tuple[str, str]]:
    for section, model in (("deadlines", DeadlineSettings), ("transfer", TransferSettings)):
        for key in model.model_fields:
            if key.endswith("_s"):
                yield section, key


@pytest.mark.case("F10")
def test_no_deadline_can_be_infinite() -> None:
    """Each deadline has a finite default and refuses infinity, zero, nothing and no number."""
    found = list(_times())
    assert len(found) > 12
    for section, key in found:
        default = getattr(getattr(load_settings(flags=PREFILL), section), key)
        assert 0 < default <= 86_400
        for bad in (float("inf"), float("nan"), "inf", "1e400", 0, -1, None):
            with pytest.raises(SettingsError, match=rf"^{section}\.{key}: "):
                load_settings(overrides={"role": "prefill", section: {key: bad}})


def test_every_setting_that_is_a_time_is_bounded() -> None:
    """No key that ends in _s, wherever it is, may hold infinity."""

    def fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
        for key, info in model.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                yield from fields(info.annotation)
            else:
                yield key, info

    open_ended = [
        key
        for key, info in fields(NodeSettings)
        if key.endswith("_s")
        and not any(hasattr(m, "le") for m in (*info.metadata, *get_args(info.annotation)))
    ]
    assert open_ended == []


# ---------------------------------------------------------------------- secrets


def test_secrets_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a token nor the content of a token file is printed with the effective settings."""
    path = tmp_path / "token"
    path.write_text("from-a-file\n")
    assert main(["config", *PREFILL, "--auth.token", "given-directly"]) == 0
    assert main(["config", *PREFILL, "--auth.token-file", str(path)]) == 0
    shown = capsys.readouterr()
    assert "given-directly" not in shown.out + shown.err
    assert "from-a-file" not in shown.out + shown.err
    assert "**********" in shown.out
    assert str(path) in shown.out
    settings = load_settings(flags=[*PREFILL, "--auth.token", "given-directly"])
    assert "given-directly" not in repr(settings) + str(settings) + json.dumps(settings.masked())
    assert secret(settings.auth) == "given-directly"


def test_a_token_file_is_read_and_stripped(tmp_path: Path) -> None:
    """The line end of a token file is no part of the token."""
    path = tmp_path / "token"
    path.write_text("secret\n")
    settings = load_settings(flags=[*PREFILL, "--http.host", "192.0.2.1", "--auth.token-file", str(path)])
    assert secret(settings.auth) == "secret"


@pytest.mark.case("O2")
@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"caf\xc3\xa9", b"\xff", None])
def test_a_token_file_without_a_token_stops_the_start(tmp_path: Path, content: bytes | None) -> None:
    """An empty token would be matched by an empty one: it is refused at start, without being shown."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    message = refused(flags=[*PREFILL, "--auth.token-file", str(path)])
    assert message.startswith("auth.token_file: ")
    assert "words" not in message


@pytest.mark.parametrize("token", ["", " ", "a b", "é"])
def test_a_token_that_no_header_carries_stops_the_start(token: str) -> None:
    """A token is visible ASCII characters; the message does not repeat it."""
    message = refused(flags=[*PREFILL, f"--auth.token={token}"])
    assert message == "auth.token: a token is visible ASCII characters without spaces, at least one"
