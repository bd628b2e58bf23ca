"""From settings to an engine and its tokenizer."""

from __future__ import annotations

import torch

from app.engine.base import Engine, Text
from app.engine.models import model_files
from app.engine.toy import ToyEngine, ToyText


def load_engine(
    *, name: str, page_size: int, dtype: str, device: str, threads: int, layer_delay_s: float = 0.0
) -> tuple[Engine, Text]:
    """Load a model; blocks for seconds (the first time a minute, for the conversion)."""
    if name == "toy":
        return ToyEngine(page_size=page_size, layer_delay_s=layer_delay_s), ToyText()
    from app.engine.hf import HfEngine, HfText

    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    files = model_files(name)
    engine = HfEngine(
        name=name,
        files=files,
        page_size=page_size,
        dtype=getattr(torch, dtype),
        device=device,
        threads=threads,
    )
    return engine, HfText(files)
