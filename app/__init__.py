"""kvferry: moves the KV cache of large language models from prefill to decode nodes."""

__version__ = "0.1.0"
