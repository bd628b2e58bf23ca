"""Settings of a node: flags over environment (KVFERRY_) over file over defaults.

Parsed once into frozen objects. An unknown key or an invalid combination stops the start and names the
key. Nested keys are written `transfer.group_layers` in the file's table [transfer], as
KVFERRY_TRANSFER__GROUP_LAYERS in the environment and as --transfer.group-layers on the command line.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import (
    SettingsError as SourceError,
)

from app.errors import SettingsError
from app.sections import (
    AuthSettings,
    CacheSettings,
    CpSettings,
    DeadlineSettings,
    DiagnosticSettings,
    HiCacheSettings,
    HttpSettings,
    LimitSettings,
    LogSettings,
    ModelSettings,
    PrefillSettings,
    TransferSettings,
)

PREFIX = "KVFERRY_"
_OTHER_VARIABLES = {"KVFERRY_CACHE_DIR", "KVFERRY_CONFIG"}
_TOKEN = re.compile(r"[!-~]+")
"""Visible ASCII: what a header carries unchanged."""


class Scope(StrEnum):
    """What a token is good for."""

    READ = "read"
    REQUEST = "request"
    PEER = "peer"
    ADMIN = "admin"


_TOKENS: Mapping[str, frozenset[Scope]] = {
    "token": frozenset({Scope.READ, Scope.REQUEST, Scope.ADMIN}),
    "read_token": frozenset({Scope.READ}),
    "request_token": frozenset({Scope.REQUEST}),
    "peer_token": frozenset({Scope.PEER}),
}


class NodeSettings(BaseSettings):
    """Everything about one node."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, cli_kebab_case=True
    )

    role: Literal["prefill", "decode"] = Field(description="what this node does")
    trace: bool = Field(False, description="show page and logit digests in answers; costs time")
    http: HttpSettings = HttpSettings()
    auth: AuthSettings = AuthSettings()
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    hicache: HiCacheSettings = HiCacheSettings()
    prefill: PrefillSettings = PrefillSettings()
    cp: CpSettings = CpSettings()
    transfer: TransferSettings = TransferSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    diagnostics: DiagnosticSettings = DiagnosticSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # the file arrives as init values: below the environment, above the defaults
        return env_settings, init_settings

    @model_validator(mode="after")
    def _combinations(self) -> NodeSettings:
        if self.prefill.chunk_tokens % self.cache.page_size:
            raise ValueError(
                f"prefill.chunk_tokens ({self.prefill.chunk_tokens}) is no multiple of cache.page_size "
                f"({self.cache.page_size}): chunk boundaries lie on the page grid"
            )
        pages = -(-self.prefill.max_input_tokens // self.cache.page_size)
        if self.role == "prefill" and pages > self.cache.pages * self.cp.size:
            raise ValueError(
                f"cache.pages ({self.cache.pages}) cannot hold prefill.max_input_tokens "
                f"({self.prefill.max_input_tokens}): {pages} pages"
            )
        self._parallel()
        if self.deadlines.quarantine_s <= self.transfer.progress_timeout_s * 3:
            raise ValueError(
                f"deadlines.quarantine_s ({self.deadlines.quarantine_s}) must outlive the engine's own timeout "
                f"(3 x transfer.progress_timeout_s = {self.transfer.progress_timeout_s * 3})"
            )
        longest_s = self.deadlines.lease_s + self.transfer.deadline_s + self.transfer.late_landing_s
        if self.deadlines.quarantine_s <= longest_s:
            raise ValueError(
                f"deadlines.quarantine_s ({self.deadlines.quarantine_s}) must outlive a write: deadlines.lease_s, "
                f"transfer.deadline_s and transfer.late_landing_s are {longest_s:g} together"
            )
        if self.deadlines.lease_s <= 2 * self.deadlines.heartbeat_s:
            raise ValueError(
                f"deadlines.lease_s ({self.deadlines.lease_s:g}) must outlive two heartbeats, or one lost answer "
                f"ends a room: deadlines.heartbeat_s is {self.deadlines.heartbeat_s:g}"
            )
        self._guarded()
        if _is_any(self.http.host) and not self.http.advertise:
            raise ValueError(
                f"http.host ({self.http.host}) is every address: http.advertise must name one for the peers"
            )
        toy = self.model.name.startswith("toy")
        if self.model.layer_delay_s and not toy:
            raise ValueError("model.layer_delay_s is for the toy models only")
        if self.model.device == "cuda" and toy:
            raise ValueError("model.device (cuda): the toy models run on cpu only")
        if self.hicache.enabled and self.cache.reuse == "off":
            raise ValueError("hicache needs cache.reuse: without it nothing is kept in any tier")
        if self.hicache.lost_s <= self.hicache.load_s:
            raise ValueError(
                f"hicache.lost_s ({self.hicache.lost_s:g}) must outlive a copy: hicache.load_s is "
                f"{self.hicache.load_s:g}"
            )
        if self.cache.dtype != "auto" and toy:
            raise ValueError(f"cache.dtype ({self.cache.dtype}): the toy models store bytes")
        return self

    def _guarded(self) -> None:
        """Tokens and certificates: half of either protects nothing."""
        given = {name: self._given(name) for name in _TOKENS}
        for name in given:
            if getattr(self.auth, name) is not None and getattr(self.auth, f"{name}_file") is not None:
                raise ValueError(f"auth.{name} and auth.{name}_file are both set: one of them is enough")
        if not _is_loopback(self.http.host) and not given["token"]:
            raise ValueError(f"http.host ({self.http.host}) is no loopback address: auth.token must be set")
        narrower = next((name for name in given if given[name]), None)
        if narrower is not None and not given["token"]:
            raise ValueError(f"auth.{narrower} is set and auth.token is not: everything else would be open")
        http = self.http
        if (http.tls_cert is None) != (http.tls_key is None):
            raise ValueError("http.tls_cert and http.tls_key go together: one of them is missing")
        if http.tls_ca is not None and http.tls_cert is None:
            raise ValueError("http.tls_ca is set: without http.tls_cert peers are asked by plain HTTP")

    def _given(self, name: str) -> bool:
        return getattr(self.auth, name) is not None or getattr(self.auth, f"{name}_file") is not None

    def _parallel(self) -> None:
        """What context parallelism goes together with."""
        cp = self.cp
        if cp.size > 1 and self.role == "decode":
            raise ValueError(f"cp.size ({cp.size}): a decode node has one rank")
        if cp.size > 1 and not cp.shared_kv:
            raise ValueError(f"cp.shared_kv is off: cp.size ({cp.size}) needs it, a copy a rank is not kept")
        if cp.shared_kv and cp.size == 1:
            raise ValueError("cp.shared_kv is on: it needs a cp.size above 1")
        if cp.shared_kv and cp.split == "round_robin":
            raise ValueError(
                "cp.split (round_robin): materialisation and transfer of shared KV (cp.shared_kv) do not know it"
            )

    def secret(self, name: str = "token") -> str | None:
        """A token, out of the settings or its file. SettingsError, without the token, when it is none."""
        key, token = f"auth.{name}", None
        value, path = getattr(self.auth, name), getattr(self.auth, f"{name}_file")
        if value is not None:
            token = value.get_secret_value()
        elif path is not None:
            key = f"auth.{name}_file"
            try:
                token = path.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                # the error of a decoder would show a part of the file
                why = error if isinstance(error, OSError) else "it is no text"
                raise SettingsError(f"{key}: cannot read {path}: {why}") from None
        # an empty token would be matched by an empty one
        if token is not None and not _TOKEN.fullmatch(token):
            raise SettingsError(f"{key}: a token is visible ASCII characters without spaces, at least one")
        return token

    def peer_secret(self) -> str | None:
        """What this node shows to its peers."""
        return self.secret("peer_token") or self.secret()

    def scopes(self) -> dict[str, frozenset[Scope]]:
        """Every token with what it is good for. SettingsError, without the tokens, when two are one."""
        tokens = {name: token for name in _TOKENS if (token := self.secret(name)) is not None}
        if len(set(tokens.values())) < len(tokens):
            raise SettingsError(
                f"auth: two of {', '.join(tokens)} are one token; its scopes would be unclear"
            )
        scopes = dict(_TOKENS)
        if "peer_token" not in tokens:
            scopes["token"] |= {Scope.PEER}
        return {token: scopes[name] for name, token in tokens.items()}

    def server_tls(self) -> ssl.SSLContext | None:
        """For the node's own port. SettingsError when certificate and key cannot be used."""
        http = self.http
        if http.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # a key that needs a password would ask the terminal for it
            context.load_cert_chain(http.tls_cert, http.tls_key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise SettingsError(f"http.tls_cert or http.tls_key: cannot use them: {error}") from error
        return context

    def client_tls(self) -> ssl.SSLContext | None:
        """For calls to peers, whose names and certificates are checked. SettingsError for a bad CA file."""
        http = self.http
        if http.tls_cert is None:
            return None
        try:
            return ssl.create_default_context(cafile=http.tls_ca)
        except (OSError, ValueError) as error:
            raise SettingsError(f"http.tls_ca: cannot use {http.tls_ca}: {error}") from error

    def masked(self) -> dict[str, Any]:
        """Effective settings as plain values, secrets masked."""
        return self.model_dump(mode="json")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def load_settings(
    *,
    config: Path | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> NodeSettings:
    """Read every source. SettingsError, naming the key, on anything unknown or invalid."""
    config = config or (Path(os.environ["KVFERRY_CONFIG"]) if os.environ.get("KVFERRY_CONFIG") else None)
    values: dict[str, Any] = {}
    if config is not None:
        try:
            values = tomllib.loads(config.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{config}: {error}") from error
    values = _merge(values, overrides or {})
    _refuse_unknown_variables()
    try:
        given = _flags(flags)
        settings = _Layered(given, values)()
    except (ValidationError, SourceError) as error:
        raise SettingsError(_explain(error)) from error
    settings.scopes()
    settings.server_tls()
    settings.client_tls()
    return settings


def _flags(flags: Sequence[str]) -> dict[str, Any]:
    """Command-line flags as nested values, parsed with the same fields."""
    if not flags:
        return {}
    source = CliSettingsSource[Any](
        NodeSettings, cli_parse_args=list(flags), cli_prog_name="python -m app", cli_exit_on_error=False
    )
    return dict(source())


class _Layered:
    """Flags above environment above file."""

    def __init__(self, flags: dict[str, Any], file: dict[str, Any]) -> None:
        self.flags = flags
        self.file = file

    def __call__(self) -> NodeSettings:
        flags = self.flags

        class Layered(NodeSettings):
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], *args: Any, **kwargs: Any
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                above = InitSettingsSource(settings_cls, init_kwargs=flags)
                return (above, *super().settings_customise_sources(settings_cls, *args, **kwargs))

        return Layered(**self.file)


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = (
            _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
        )
    return merged


def _refuse_unknown_variables() -> None:
    """pydantic-settings ignores variables it does not know; a misspelt one would be lost silently."""
    known = set()
    for name, info in NodeSettings.model_fields.items():
        known.add(f"{PREFIX}{name}".upper())
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            known |= {f"{PREFIX}{name}__{key}".upper() for key in section.model_fields}
    unknown = [v for v in os.environ if v.upper().startswith(PREFIX) and v.upper() not in known]
    unknown = sorted(set(unknown) - _OTHER_VARIABLES)
    if unknown:
        raise SettingsError(f"unknown environment variable: {', '.join(unknown)}")


def _explain(error: ValidationError | SourceError) -> str:
    if not isinstance(error, ValidationError):
        return _explain_source(str(error))
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        unknown = item["type"] == "extra_forbidden"
        lines.append(f"unknown key: {key}" if unknown else f"{key}: {message}" if key else message)
    return "; ".join(lines)


def _explain_source(text: str) -> str:
    """What a source could not parse. An unknown flag is named without its value, which may be a secret."""
    text = text.removeprefix("error parsing CLI: ")
    unknown = text.removeprefix("unrecognized arguments: ")
    if unknown == text:
        return text
    flags = [word.partition("=")[0] for word in unknown.split() if word.startswith("-")]
    return f"unknown flag: {', '.join(flags)}" if flags else f"unexpected argument: {unknown}"
