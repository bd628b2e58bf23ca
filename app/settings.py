"""Settings of a node: flags over environment (KVFERRY_) over file over defaults.

Parsed once into frozen objects. An unknown key or an invalid combination stops the start and names the
key. Nested keys are written `transfer.group_layers` in the file's table [transfer], as
KVFERRY_TRANSFER__GROUP_LAYERS in the environment and as --transfer.group-layers on the command line.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
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

PREFIX = "KVFERRY_"
_OTHER_VARIABLES = {"KVFERRY_CACHE_DIR", "KVFERRY_CONFIG"}

Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""Always finite: no deadline may be switched off."""
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpSettings(Section):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="0 takes any free port; the bound one is published")
    port_taken: Literal["fail", "any"] = Field("fail", description="what to do when the port is taken")
    advertise: str = Field("", description="host that peers use to reach this node; default: host")
    max_body_bytes: int = Field(4 << 20, ge=1024)


class AuthSettings(Section):
    token: SecretStr | None = Field(None, description="needed for every call that changes state")
    token_file: Path | None = Field(None, description="file that holds the token")


class ModelSettings(Section):
    name: Literal["smollm2", "toy"] = "smollm2"
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: float32 on CPU (five times as fast there), bfloat16 on CUDA"
    )
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(
        1, ge=1, le=256, description="threads of one forward; equal at both ends for equal bits"
    )
    layer_delay_s: float = Field(0.0, ge=0, le=60, description="toy model only: time that a layer takes")


class CacheSettings(Section):
    page_size: int = Field(64, ge=1, le=4096, description="tokens a page")
    pages: Count = Field(256, description="L1 pages of this node")
    slots: Count = Field(64, description="metadata slots: rooms that decode may await at once")


class PrefillSettings(Section):
    chunk_tokens: int = Field(2048, ge=1, description="tokens a forward; a multiple of the page size")
    max_input_tokens: Count = 4096


class TransferSettings(Section):
    mode: Literal["per_layer", "monolithic"] = "per_layer"
    group_layers: Count = 8
    taper: bool = Field(True, description="shrink the groups toward the last layer")
    digests: Literal["off", "sampled", "full"] = "sampled"
    lanes: int = Field(4, ge=1, le=64, description="TCP connections the engine keeps for each peer")
    window_descriptors: int = Field(16, ge=1, le=512)
    window_bytes: int = Field(32 << 20, ge=1 << 16)
    descriptor_bytes: int = Field(1 << 20, ge=1 << 12)
    retries: int = Field(2, ge=0, le=10)
    retry_after_s: Seconds = 1.1
    progress_timeout_s: int = Field(8, ge=1, le=600, description="the engine's own timeout")
    deadline_s: Seconds = 30.0
    late_landing_s: Seconds = Field(10.0, description="how long a failed write may still land")


class DeadlineSettings(Section):
    handshake_s: Seconds = 5.0
    message_s: Seconds = 5.0
    bootstrap_s: Seconds = Field(30.0, description="prefill: from the request to decode's pages")
    parked_s: Seconds = Field(30.0, description="prefill: from decode's pages to the request")
    queue_s: Seconds = Field(120.0, description="waiting for pages or a forward")
    forward_s: Seconds = Field(300.0, description="one prompt's forwards")
    stall_s: Seconds = Field(60.0, description="a forward without a layer's progress is dead")
    transfer_s: Seconds = Field(300.0, description="decode: from the announcement to the last byte")
    decode_s: Seconds = Field(600.0, description="decode: all steps of one request")
    drain_s: Seconds = Field(20.0, description="waiting for a drain acknowledgement")
    quarantine_s: Seconds = Field(45.0, description="pages whose writer was not proven idle")
    tombstone_s: Seconds = Field(30.0, description="how long an aborted room is remembered")


class LimitSettings(Section):
    queued_requests: Count = 256
    max_new_tokens: Count = 1024
    default_new_tokens: Count = 64


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class NodeSettings(BaseSettings):
    """Everything about one node."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, cli_kebab_case=True
    )

    role: Literal["prefill", "decode"]
    trace: bool = Field(False, description="show page and logit digests in answers; costs time")
    http: HttpSettings = HttpSettings()
    auth: AuthSettings = AuthSettings()
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    prefill: PrefillSettings = PrefillSettings()
    transfer: TransferSettings = TransferSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()

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
        if self.role == "prefill" and pages > self.cache.pages:
            raise ValueError(
                f"cache.pages ({self.cache.pages}) cannot hold prefill.max_input_tokens "
                f"({self.prefill.max_input_tokens}): {pages} pages"
            )
        if self.deadlines.quarantine_s <= self.transfer.progress_timeout_s * 3:
            raise ValueError(
                f"deadlines.quarantine_s ({self.deadlines.quarantine_s}) must outlive the engine's own timeout "
                f"(3 x transfer.progress_timeout_s = {self.transfer.progress_timeout_s * 3})"
            )
        if not _is_loopback(self.http.host) and self.auth.token is None and self.auth.token_file is None:
            raise ValueError(f"http.host ({self.http.host}) is no loopback address: auth.token must be set")
        if self.model.layer_delay_s and self.model.name != "toy":
            raise ValueError("model.layer_delay_s is for the toy model only")
        return self

    def secret(self) -> str | None:
        """The token, out of the settings or its file."""
        if self.auth.token is not None:
            return self.auth.token.get_secret_value()
        if self.auth.token_file is not None:
            return self.auth.token_file.read_text().strip()
        return None

    def masked(self) -> dict[str, Any]:
        """Effective settings as plain values, secrets masked."""
        return self.model_dump(mode="json")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{config}: {error}") from error
    values = _merge(values, overrides or {})
    _refuse_unknown_variables()
    try:
        given = _flags(flags)
        return _Layered(given, values)()
    except (ValidationError, SourceError) as error:
        raise SettingsError(_explain(error)) from error


def _flags(flags: Sequence[str]) -> dict[str, Any]:
    """Command-line flags as nested values, parsed with the same fields."""
    if not flags:
        return {}
    source = CliSettingsSource[Any](
        NodeSettings, cli_parse_args=list(flags), cli_prog_name="python -m app serve", cli_exit_on_error=True
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
        return str(error)
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        unknown = item["type"] == "extra_forbidden"
        lines.append(f"unknown key: {key}" if unknown else f"{key}: {message}" if key else message)
    return "; ".join(lines)
