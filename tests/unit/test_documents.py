"""Documents that are generated, or that have to keep up with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from app.api.document import openapi_document
from app.reference import lifecycle_document, settings_table

ROOT = Path(__file__).parents[2]


def test_the_kept_openapi_document_is_current() -> None:
    """openapi/openapi.json is what `python -m app openapi` writes."""
    assert (ROOT / "openapi" / "openapi.json").read_text() == openapi_document()


def test_the_state_diagrams_are_current() -> None:
    """docs/lifecycle.md is what `python -m app lifecycle` prints."""
    assert (ROOT / "docs" / "lifecycle.md").read_text() == lifecycle_document()


def test_the_settings_table_is_current() -> None:
    """docs/operations.md holds the table that `python -m app settings` prints, every key with its default."""
    assert settings_table() in (ROOT / "docs" / "operations.md").read_text()


def test_every_route_is_documented() -> None:
    """docs/operations.md names each route of the HTTP interface."""
    text = (ROOT / "docs" / "operations.md").read_text()
    missing = [path for path in json.loads(openapi_document())["paths"] if f"`{path}`" not in text]
    assert missing == []


def test_every_marked_promise_is_stated() -> None:
    """Each number and case that a test is marked with has its sentence in docs/contracts.md."""
    text = (ROOT / "docs" / "contracts.md").read_text()
    stated = set(re.findall(r"^- \*\*([A-Z]?[0-9]+)\.\*\*", text, flags=re.MULTILINE))
    marked: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for mark in re.findall(r"mark\.(?:contract|case)\(([^)]*)\)", path.read_text()):
            marked |= set(re.findall(r"[A-Z]?[0-9]+", mark))
    assert "97" in marked
    assert sorted(marked - stated) == []
