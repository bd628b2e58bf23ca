"""Pinned host memory as a device of CUDA addresses it, for kernels that read and write L2 in place."""

from __future__ import annotations

from typing import Any, Final

import torch

from app.core.pairings import BACKEND_KEY
from app.errors import SettingsError

_WIDE: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


class _HostMemory:
    """What torch needs to make a tensor of the device over an address; keeps the memory alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "strides": tuple(tensor.stride()),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def device_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of `device` over registered host memory, of the same shape and strides.

    SettingsError when the device cannot address it: a copy in its place would lose what is written.
    """
    try:
        view = torch.as_tensor(_HostMemory(host), device=device)
    except (RuntimeError, ValueError) as error:
        raise SettingsError(
            f"{BACKEND_KEY} (kernel): {device} cannot address host memory: {error}"
        ) from error
    if view.data_ptr() != host.data_ptr():
        raise SettingsError(
            f"{BACKEND_KEY} (kernel): host memory was registered for another device than {device}"
        )
    return view


def widest(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views uint8 [pages, item_bytes] in the widest integers that both allow: index kernels move one a thread."""
    for size, dtype in _WIDE:
        if all(_aligned(t, size) for t in (a, b)):
            return a.view(dtype), b.view(dtype)
    return a, b


def _aligned(tensor: torch.Tensor, size: int) -> bool:
    values = (tensor.data_ptr(), tensor.shape[-1], *tensor.stride()[:-1])
    return all(value % size == 0 for value in values)
