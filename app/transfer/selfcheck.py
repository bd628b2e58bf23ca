"""Proves that the transfer engine moves bytes on this machine: two engines, one write, bytes compared.

It runs as a process of its own (`python -m app.transfer.selfcheck HOST BIND`): the engine can hang or end
the process that loads it, and it reads its environment once. The answer is one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import psutil

from app.errors import KvferryError
from app.transfer import mooncake
from app.transfer.base import Block, Region, Status

BYTES = 16_384
_PROGRESS_S = 5


def run(host: str, bind: str) -> dict[str, Any]:
    """One write from engine to engine. `stage` says how far it came; `error` is absent on success."""
    answer: dict[str, Any] = {"stage": "load"}
    try:
        mooncake.prepare(mooncake.environment(bind=bind, lanes=1, progress_timeout_s=_PROGRESS_S))
        mooncake.load_engine_class()
        answer["stage"] = "start"
        sender, receiver = mooncake.MooncakeDriver(host), mooncake.MooncakeDriver(host)
        # a listener on every interface is open unless the driver has confined it
        confined = sender.confined + receiver.confined > 0
        answer |= {"transport": sender.transport, "listens": [bind] if confined else _listening()}
        answer["stage"] = "write"
        answer["seconds"] = _write(sender, receiver)
    except KvferryError as error:
        answer["error"] = error.message
    return answer


def _write(sender: mooncake.MooncakeDriver, receiver: mooncake.MooncakeDriver) -> float:
    """Seconds until the bytes were read back. KvferryError when they were not."""
    pattern = os.urandom(BYTES)
    source, target = (ctypes.c_char * BYTES).from_buffer_copy(pattern), (ctypes.c_char * BYTES)()
    sender.register(Region("source", ctypes.addressof(source), BYTES))
    receiver.register(Region("target", ctypes.addressof(target), BYTES))
    started_s = time.monotonic()
    if not sender.probe(receiver.session):
        raise KvferryError(f"{receiver.session} cannot be reached: the engine had no answer to its probe")
    block = Block(ctypes.addressof(source), ctypes.addressof(target), BYTES)
    submitted = sender.submit(receiver.session, block)
    if submitted <= 0:
        raise KvferryError(f"{receiver.session} cannot be reached: the engine refused the write")
    # the caller bounds the time: it ends this process
    while (status := sender.check(submitted)) is Status.PENDING:
        time.sleep(0.0005)
    if status is not Status.DONE:
        raise KvferryError(f"the write to {receiver.session} failed")
    if bytes(target) != pattern:
        raise KvferryError(f"the bytes at {receiver.session} are not those that were sent")
    return time.monotonic() - started_s


def _listening() -> list[str]:
    """Where the engines of this process accept connections."""
    found = psutil.Process().net_connections(kind="tcp")
    return sorted({str(c.laddr.ip) for c in found if c.status == psutil.CONN_LISTEN})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(sys.argv[1], sys.argv[2])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the engine's own exit handlers are not to be trusted
