"""Checks what a node needs on this machine, a line each.

    ok    the check has passed
    note  nothing to fail on, but worth knowing
    FAIL  a node with these settings would not start, or would not serve

Nothing is loaded or left behind: the transfer engine runs in a process of its own, weights stay on disk.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import resource
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app.core.geometry import CacheGeometry
from app.core.slots import SlotFormat
from app.engine.models.overrides import merge_overrides
from app.obs.cgroups import cgroup_limit
from app.settings import NodeSettings

OVERHEAD_BYTES = 400 << 20
"""What a node takes beside its model and its pools, at most."""
_TRANSPORT_LIMIT_S = 30.0
_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Shared libraries of the transfer engine that its wheel does not bring, and Debian's packages."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check. A `note` is good and asks for attention."""

    good: bool
    name: str
    detail: str
    note: bool = False

    def line(self) -> str:
        mark = ("note" if self.note else "ok  ") if self.good else "FAIL"
        return f"{mark}  {self.name}: {self.detail}"


def _ok(name: str, detail: str) -> Finding:
    return Finding(good=True, name=name, detail=detail)


def _note(name: str, detail: str) -> Finding:
    return Finding(good=True, name=name, detail=detail, note=True)


def _fail(name: str, detail: str) -> Finding:
    return Finding(good=False, name=name, detail=detail)


async def examine(settings: NodeSettings) -> list[Finding]:
    """Every check, in order; none of them raises."""
    checks: tuple[tuple[str, Callable[[NodeSettings], list[Finding] | Awaitable[list[Finding]]]], ...] = (
        ("libraries", libraries),
        ("http port", http_port),
        ("http address", http_address),
        ("device", device),
        ("model", model),
        ("memory", memory),
        ("shared memory", shared_memory),
        ("locked memory", locked_memory),
        ("transport", transport),
    )
    findings: list[Finding] = []
    for name, check in checks:
        try:
            found = check(settings)
            findings += found if isinstance(found, list) else await found
        except Exception as error:
            findings.append(_fail(name, f"the check itself failed: {type(error).__name__}: {error}"))
    return findings


# ---------------------------------------------------------------------- libraries and network


def libraries(settings: NodeSettings) -> list[Finding]:
    """What the transfer engine links against, whatever transport it uses."""
    missing: dict[str, str] = {}
    for library, package in _LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing[library] = package
    if missing:
        install = f"apt-get install {' '.join(missing.values())}"
        return [_fail("libraries", f"{', '.join(missing)} not found; on Debian: {install}")]
    return [_ok("libraries", f"{', '.join(_LIBRARIES)} load")]


def http_port(settings: NodeSettings) -> list[Finding]:
    """Whether the node could listen where it is told to."""
    http, name = settings.http, "http port"
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((http.host, http.port))
            listener.listen(1)
        except OSError as error:
            where = f"{http.host}:{http.port}"
            if http.port_taken == "any" and http.port:
                return [_note(name, f"{where}: {error.strerror}; any other will do (http.port_taken)")]
            return [_fail(name, f"{where}: {error.strerror}")]
    shown = "any free port" if http.port == 0 else f"{http.host}:{http.port} is free"
    return [_ok(name, shown)]


def http_address(settings: NodeSettings) -> list[Finding]:
    """Peers use this name for both HTTP and the transfer engine, so it has to resolve."""
    name, host = "http address", settings.http.advertise or settings.http.host
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        return [_fail(name, f"{host} does not resolve here: {error.strerror} (http.advertise)")]
    return [_ok(name, f"peers use {host} ({', '.join(sorted(found))})")]


# ---------------------------------------------------------------------- model and memory


def device(settings: NodeSettings) -> list[Finding]:
    if settings.model.device == "cpu":
        return [_ok("device", f"cpu, {settings.model.threads} of {os.cpu_count()} threads a forward")]
    import torch

    if not torch.cuda.is_available():
        return [_fail("device", "model.device is cuda and torch finds none")]
    return [_ok("device", torch.cuda.get_device_name())]


def model(settings: NodeSettings) -> list[Finding]:
    """Whether the weights are there, converted or as a package."""
    from app.engine.models.files import missing_package, model_folder

    name = settings.model.name
    if name == "toy":
        return [_ok("model", "toy: needs no weights")]
    folder = model_folder(name)
    if (folder / "config.json").exists():
        return [_ok("model", f"{name}: {folder}")]
    package = missing_package(name)
    if package is not None:
        return [_fail("model", f"{name}: neither {folder} nor the package {package} is there")]
    return [_note("model", f"{name}: not converted yet, a minute at the first start (python -m app prepare)")]


def geometry_of(settings: NodeSettings) -> CacheGeometry | None:
    """The buffers that the node would have, without its weights; None before the first conversion."""
    from app.engine.load import geometry_of

    model = settings.model
    return geometry_of(
        name=model.name,
        page_size=settings.cache.page_size,
        dtype=model.dtype,
        device=model.device,
        cache_dtype=settings.cache.dtype,
        kv=model.kv,
        draft=model.draft,
        overrides=merge_overrides(model.overrides, model.index_topk_freq, model.index_skip_topk_offset),
    )


def _weights_bytes(settings: NodeSettings) -> int:
    """Weights in memory: the files hold bfloat16. Models without files are small."""
    from app.engine.load import compute_dtype
    from app.engine.models.files import model_folder

    if settings.model.name != "smollm2":
        return 0
    files = model_folder(settings.model.name).glob("*.safetensors")
    item = compute_dtype(settings.model.dtype, settings.model.device).itemsize
    return sum(file.stat().st_size for file in files) * item // 2


def _pool_bytes(settings: NodeSettings) -> int | None:
    """Of all ranks, and the metadata slots of the plainest kind."""
    geometry = geometry_of(settings)
    if geometry is None:
        return None
    pools = geometry.pool_bytes(settings.cache.pages) * settings.cp.size
    return pools + SlotFormat().offset(settings.cache.slots)


def memory(settings: NodeSettings) -> list[Finding]:
    """Pools, weights and overhead against the control group's limit and what is available."""
    pools = _pool_bytes(settings)
    if pools is None:
        return [_note("memory", "not known before the model is converted (python -m app prepare)")]
    weights = _weights_bytes(settings)
    if settings.model.device == "cuda":
        return [_device_memory(pools, weights)]
    limit = cgroup_limit()
    available = psutil.virtual_memory().available
    need = weights + pools + OVERHEAD_BYTES
    most = min(available, limit) if limit is not None else available
    shown = (
        f"{_mib(need)} needed (pools {_mib(pools)} by cache.pages = {settings.cache.pages}, "
        f"weights {_mib(weights)}, rest {_mib(OVERHEAD_BYTES)}); available {_mib(available)}, "
        f"cgroup limit {'none' if limit is None else _mib(limit)}"
    )
    return [_ok("memory", shown) if need <= most else _fail("memory", shown)]


def _device_memory(pools: int, weights: int) -> Finding:
    import torch

    if not torch.cuda.is_available():
        return _fail("memory", "model.device is cuda and torch finds none")
    free, _ = torch.cuda.mem_get_info()
    shown = f"{_mib(pools + weights)} of device memory needed (cache.pages), {_mib(free)} free"
    return _ok("memory", shown) if pools + weights <= free else _fail("memory", shown)


def shared_memory(settings: NodeSettings) -> list[Finding]:
    """CPU pools lie in a memfd: it has to be allowed and mappable in full. Its size is not /dev/shm's."""
    shm = Path("/dev/shm")
    size = f"/dev/shm {_mib(shutil.disk_usage(shm).total)}" if shm.is_dir() else "no /dev/shm"
    pools = _pool_bytes(settings) or 1 << 20
    try:
        handle = os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, pools)
            mmap.mmap(handle, pools).close()
        finally:
            os.close(handle)
    except OSError as error:
        return [
            _fail("shared memory", f"cannot map {_mib(pools)} of shared memory: {error.strerror}; {size}")
        ]
    return [_ok("shared memory", f"{_mib(pools)} can be mapped; {size}, which the pools do not use")]


def locked_memory(settings: NodeSettings) -> list[Finding]:
    """RDMA registers locked memory; TCP, the only transport so far, does not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else _mib(soft)
    return [_ok("locked memory", f"memlock {limit}; TCP locks none")]


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


# ---------------------------------------------------------------------- transfer engine


async def transport(settings: NodeSettings, *, limit_s: float = _TRANSPORT_LIMIT_S) -> list[Finding]:
    """Two real engines in another process: one writes to the other, under the host that peers would use."""
    http = settings.http
    command = (sys.executable, "-m", "app.transfer.selfcheck", http.advertise or http.host, http.host)
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await child.communicate()
    except TimeoutError:
        return [_fail("transport", f"the engine has not moved a byte within {limit_s:g} s")]
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return _judge(output, child.returncode)


def _judge(output: bytes, status: int | None) -> list[Finding]:
    try:
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return [_fail("transfer engine", f"its process ended with {status} and without an answer")]
    stage, error = answer["stage"], answer.get("error")
    if stage == "load":
        return [_fail("transfer engine", str(error))]
    findings = [_ok("transfer engine", "mooncake loads")]
    if error:
        return [*findings, _fail("transport", str(error))]
    moved = f"{answer['transport']}: a write has landed and was read back after {answer['seconds']:.4f} s"
    findings.append(_ok("transport", moved))
    where = ", ".join(answer["listens"])
    if {"0.0.0.0", "::"} & set(answer["listens"]):
        warning = f"the engine serves {where} and asks nobody for a token: let only peers reach it"
        return [*findings, _note("data port", warning)]
    return [*findings, _ok("data port", f"the engine serves {where} only, and asks nobody for a token")]
