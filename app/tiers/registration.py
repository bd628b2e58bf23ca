"""Pinning of host memory: a GPU copies asynchronously only from and to memory that its driver has registered.

A registrar registers whole mappings and keeps the account of what is registered at this moment. It raises what
its runtime says; the pool that asked turns that into an error that names the setting.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch

from app.errors import BadInput, IntegrityError, NoCapacity

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process, not only the one that registers."""


class Registrar(Protocol):
    """`address` is the first byte of a mapping. What was registered is unregistered by its owner, once."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        ...

    def register(self, address: int, length: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class NoRegistrar:
    """Where copies are the processor's: nothing has to be pinned, and nothing is."""

    pinned_bytes = 0

    def register(self, address: int, length: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


class CudaRegistrar:
    """Pins for one device of CUDA; views made on that device may address the memory.

    `runtime` has cudaHostRegister, cudaHostUnregister and cudaGetErrorString; torch's by default. A runtime
    that stands in for it goes with the device "cpu".
    """

    def __init__(self, device: torch.device | str, *, runtime: Any = None) -> None:
        self._device = torch.device(device)
        self._runtime = torch.cuda.cudart() if runtime is None else runtime  # type: ignore[no-untyped-call]
        self._registered: dict[int, int] = {}

    @property
    def pinned_bytes(self) -> int:
        return sum(self._registered.values())

    def register(self, address: int, length: int) -> None:
        """NoCapacity, with the runtime's words, when it refuses."""
        if address in self._registered:
            raise BadInput(f"the memory at {address:#x} is registered already")
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            code = self._runtime.cudaHostRegister(address, length, _PORTABLE)
        if int(code):
            self._forget_error()
            raise NoCapacity(f"cannot pin {length} bytes: {self._explain(code)}", code=int(code))
        self._registered[address] = length

    def unregister(self, address: int) -> None:
        """IntegrityError for memory that is not registered, and when the runtime refuses: it then still is."""
        if address not in self._registered:
            raise IntegrityError(f"the memory at {address:#x} is not registered")
        code = self._runtime.cudaHostUnregister(address)
        if int(code):
            raise IntegrityError(f"cannot unpin the memory at {address:#x}: {self._explain(code)}")
        del self._registered[address]

    def check_integrity(self) -> None:
        """When all pools are closed nothing is registered any more."""
        if self._registered:
            raise IntegrityError(
                f"{len(self._registered)} mappings of {self.pinned_bytes} bytes are still pinned"
            )

    def _forget_error(self) -> None:
        """The runtime keeps its last error, and torch would raise it at its next call, whatever that is."""
        if self._device.type == "cuda":
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)

    def _explain(self, code: Any) -> str:
        return str(self._runtime.cudaGetErrorString(code))


def registrar_for(device: torch.device | str) -> Registrar:
    """The registrar that copies between the host and `device` need."""
    place = torch.device(device)
    return CudaRegistrar(place) if place.type == "cuda" else NoRegistrar()
