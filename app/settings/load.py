"""Reads the settings: flags over environment (KVFERRY_) over file over defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
)
from pydantic_settings import (
    SettingsError as SourceError,
)

from app.errors import SettingsError
from app.settings.credentials import client_tls, scopes, server_tls
from app.settings.node import PREFIX, NodeSettings

_OTHER_VARIABLES = {"KVFERRY_CACHE_DIR", "KVFERRY_CONFIG"}


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
    scopes(settings.auth)
    server_tls(settings.http)
    client_tls(settings.http)
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
