"""Command line: serve, config, doctor, prepare, and what generates reference text."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from app.errors import KvferryError, SettingsError

_SETTINGS_COMMANDS = ("serve", "config", "doctor")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m app", description="kvferry: one node of a PD deployment")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "start one node"),
        ("config", "print the effective settings, secrets masked"),
        ("doctor", "check what a node needs on this machine"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text}; any setting is a flag: --http.port 8001 (python -m app settings lists them)",
            allow_abbrev=False,
        )
        command.add_argument("--config", type=Path, help="settings file (TOML)")
    prepare = commands.add_parser("prepare", help="convert a packaged model into the cache folder")
    prepare.add_argument("model", choices=["smollm2"])
    commands.add_parser("settings", help="print the table of settings")
    commands.add_parser("openapi", help="write openapi/openapi.json")
    commands.add_parser("lifecycle", help="print the state diagrams")
    commands.add_parser("reference", help="bring openapi/ and the generated parts of docs/ up to date")
    known, flags = parser.parse_known_args(arguments)
    try:
        if flags and known.command not in _SETTINGS_COMMANDS:
            raise SettingsError(f"{known.command} takes no such argument: {flags[0]}")
        return _COMMANDS[known.command](known, flags)
    except KvferryError as error:
        print(f"kvferry: {error.message}", file=sys.stderr)  # noqa: T201  the command line's own output
        return 2


def _settings(known: argparse.Namespace, flags: list[str]) -> Any:
    from app.settings import load_settings

    return load_settings(config=known.config, flags=flags)


def _say(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


def _serve(known: argparse.Namespace, flags: list[str]) -> int:
    from app.serve import serve

    return serve(_settings(known, flags))


def _config(known: argparse.Namespace, flags: list[str]) -> int:
    _say(json.dumps(_settings(known, flags).masked(), indent=2))
    return 0


def _doctor(known: argparse.Namespace, flags: list[str]) -> int:
    from app.doctor import examine

    findings = asyncio.run(examine(_settings(known, flags)))
    for finding in findings:
        _say(finding.line())
    return 0 if all(f.good for f in findings) else 1


def _prepare(known: argparse.Namespace, flags: list[str]) -> int:
    from app.engine.models.files import model_files

    _say(f"{known.model}: {model_files(known.model).folder}")
    return 0


def _openapi(known: argparse.Namespace, flags: list[str]) -> int:
    from app.api.document import openapi_document

    path = Path("openapi/openapi.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(openapi_document())
    _say(f"wrote {path}")
    return 0


def _lifecycle(known: argparse.Namespace, flags: list[str]) -> int:
    from app.reference import lifecycle_document

    _say(lifecycle_document())
    return 0


def _table(known: argparse.Namespace, flags: list[str]) -> int:
    from app.reference import settings_table

    _say(settings_table())
    return 0


def _reference(known: argparse.Namespace, flags: list[str]) -> int:
    from app.reference import lifecycle_document, with_settings_table

    operations, lifecycle = Path("docs/operations.md"), Path("docs/lifecycle.md")
    if not operations.exists():
        raise SettingsError(f"no {operations} here: run this in the project's own folder")
    operations.write_text(with_settings_table(operations.read_text()))
    lifecycle.write_text(lifecycle_document())
    _say(f"wrote {operations}\nwrote {lifecycle}")
    return _openapi(known, flags)


_COMMANDS = {
    "serve": _serve,
    "config": _config,
    "doctor": _doctor,
    "prepare": _prepare,
    "settings": _table,
    "openapi": _openapi,
    "lifecycle": _lifecycle,
    "reference": _reference,
}
