"""Reference text that is generated from the code: the table of settings and the state diagrams.

docs/lifecycle.md and the table in docs/operations.md are compared with it in tests; `python -m app
reference` brings them up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.core.lifecycle import TABLES, mermaid
from app.core.prefix_tree import TRANSITIONS, Residency
from app.settings import NodeSettings

BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key, as the file and the flags write it. `default` is None where there is none."""

    key: str
    values: str
    default: str | None
    meaning: str

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "KVFERRY_" + self.key.replace(".", "__").upper()


def settings() -> Iterator[Setting]:
    """Every key of a node's settings, in the order of their definition."""
    for name, info in NodeSettings.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            for key, field in section.model_fields.items():
                yield _setting(f"{name}.{key}", field)
        else:
            yield _setting(name, info)


def settings_table() -> str:
    """All settings as a Markdown table."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for s in settings():
        default = "required" if s.default is None else f"`{s.default}`" if s.default else "none"
        lines.append(f"| `{s.key}` | {s.values} | {default} | {s.meaning} |")
    return "\n".join(lines) + "\n"


def lifecycle_document() -> str:
    """docs/lifecycle.md: one state diagram a side."""
    parts = [
        "# The life of a room",
        "Generated from the tables in `app/core/lifecycle.py` by `python -m app lifecycle "
        "> docs/lifecycle.md`. An event\nthat a table does not list is refused and changes nothing; events "
        "that may arrive late and change nothing\nare left out here.",
    ]
    parts += [f"## {name}\n\n```mermaid\n{mermaid(table)}```" for name, table in TABLES.items()]
    parts += [
        "# Where the pages of a prefix are",
        "A node of the prefix tree; the table is `TRANSITIONS` of `app/core/prefix_tree.py`, which is the native "
        "core's own.\nA reader sees a node in L1 in the states `l1`, `l1+pending` and `l1+l2`, and from L2 in `l1+l2`, "
        "`l2` and\n`loading`.",
        f"```mermaid\n{residency_diagram()}```",
    ]
    return "\n\n".join(parts) + "\n"


def residency_diagram() -> str:
    """The moves between the states of a node of the prefix tree."""
    names = {state: state.replace("+", "_and_") for state in Residency}
    lines = ["stateDiagram-v2", f"    [*] --> {names[Residency.ABSENT]}"]
    lines += [f'    state "{state}" as {name}' for state, name in names.items() if name != state]
    lines += [f"    {names[before]} --> {names[after]}: {event}" for before, event, after in TRANSITIONS]
    return "\n".join(lines) + "\n"


def with_settings_table(document: str) -> str:
    """A document with the table between its two marks replaced by the current one."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{settings_table()}{END}{after}"


def _setting(key: str, info: FieldInfo) -> Setting:
    default = info.default
    shown = None if default is PydanticUndefined else _plain(default)
    return Setting(key=key, values=_values(info), default=shown, meaning=info.description or "")


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(info: FieldInfo) -> str:
    kind: Any = info.annotation
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    kinds = [k for k in (get_args(kind) or (kind,)) if k is not type(None)]
    name = {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(kinds[0], "text")
    if kinds[0] is Path:
        name = "path"
    if kinds[0] is SecretStr:
        name = "secret"
    limits = {k: getattr(m, k) for m in info.metadata for k in ("gt", "ge", "le") if hasattr(m, k)}
    low = f"over {limits['gt']}" if "gt" in limits else f"from {limits['ge']}" if "ge" in limits else ""
    high = f"to {limits['le']}" if "le" in limits else ""
    return " ".join(part for part in (name, low, high) if part)
