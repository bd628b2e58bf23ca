"""From settings to an engine and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch

from app.core.geometry import CacheGeometry
from app.engine.base import Engine, Text
from app.engine.models.files import model_files, model_folder
from app.engine.models.toy import ToyEngine, ToyText
from app.engine.paged.splits import Split
from app.errors import SettingsError


def load_engine(
    *,
    name: str,
    page_size: int,
    dtype: str,
    device: str,
    threads: int,
    layer_delay_s: float = 0.0,
    cache_dtype: str = "auto",
    kv: Literal["together", "apart"] = "together",
    ranks: int = 1,
    split: Split = "zigzag",
    draft: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Engine, Text]:
    """Load a model; blocks for seconds (the first time a minute, for the conversion).

    `cache_dtype` "auto" keeps pages in the compute dtype. `draft` says whether a model that has a draft loads it.
    `overrides` change the config of a model that is made from one; others refuse them.
    """
    if overrides and name != "glm-dsa-tiny":
        raise SettingsError(f"model.overrides: the config of {name} comes with its weights")
    if name == "toy":
        return ToyEngine(page_size=page_size, layer_delay_s=layer_delay_s, ranks=ranks), ToyText()
    if name == "toy-dsa":
        return ToyEngine(
            page_size=page_size,
            layer_delay_s=layer_delay_s,
            ranks=ranks,
            draft=draft,
            index_layers=tuple(range(0, 12, 2)),
        ), ToyText()
    compute = compute_dtype(dtype, device)
    if name == "glm-dsa-tiny":
        from app.engine.models.glm import load_glm

        return load_glm(
            name=name,
            page_size=page_size,
            dtype=compute,
            cache_dtype=cache_dtype,
            device=device,
            threads=threads,
            ranks=ranks,
            split=split,
            draft=draft,
            overrides=overrides,
        ), ToyText()
    from app.engine.models.hf import HfText
    from app.engine.models.llama import load_llama

    files = model_files(name)
    engine = load_llama(
        name=name,
        files=files,
        page_size=page_size,
        dtype=compute,
        cache_dtype=cache_dtype,
        kv=kv,
        device=device,
        threads=threads,
        ranks=ranks,
        split=split,
    )
    return engine, HfText(files)


def geometry_of(
    *,
    name: str,
    page_size: int,
    dtype: str,
    device: str,
    cache_dtype: str = "auto",
    kv: Literal["together", "apart"] = "together",
    draft: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> CacheGeometry | None:
    """The buffers that the engine would have, without loading weights; None before the first conversion."""
    if name in ("toy", "toy-dsa", "glm-dsa-tiny"):
        engine, _ = load_engine(
            name=name,
            page_size=page_size,
            dtype=dtype,
            device="cpu",
            threads=1,
            cache_dtype=cache_dtype,
            draft=draft,
            overrides=overrides,
        )
        return engine.geometry
    path = model_folder(name) / "config.json"
    if not path.exists():
        return None
    from app.engine.models.llama import kv_geometry

    config = SimpleNamespace(**json.loads(path.read_text()))
    compute = compute_dtype(dtype, device)
    return kv_geometry(config, page_size=page_size, dtype=compute, cache_dtype=cache_dtype, kv=kv)[0]


def compute_dtype(dtype: str, device: str) -> torch.dtype:
    """What a model computes in: on CPU float32 is five times as fast as bfloat16."""
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    found: torch.dtype = getattr(torch, dtype)
    return found
