"""Empty stand-ins for modules that the peer imports and that exist for GPUs only."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Sequence
from typing import Any

_ABSENT = {
    "deep_gemm",
    "flash_attn",
    "flashinfer",
    "gguf",
    "mooncake",
    "nixl",
    "sgl_kernel",
    "torchaudio",
    "torchcodec",
    "torchvision",
}
_VERSION = "0.28.0"


class _Anything:
    """Answers every attribute and every call with itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return _VERSION if name == "__version__" else _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Before the peer's first import. Its version questions about them are answered too."""
    sys.meta_path.append(_Finder())
    version = importlib.metadata.version

    def answer(distribution_name: str) -> str:
        return _VERSION if distribution_name in _ABSENT else version(distribution_name)

    importlib.metadata.version = answer
