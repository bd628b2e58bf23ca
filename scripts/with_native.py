"""Runs pytest with the native module of another build: with_native.py FOLDER [pytest arguments]."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def main(folder: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    (path,) = Path(folder).glob("_native*.so")
    spec = importlib.util.spec_from_file_location("app._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
