"""The Mooncake driver: the calls that are known to be safe, and nothing else.

Only `transfer_submit_write` with `transfer_check_status` is used: it gives exact terminal states without
blocking. The batch calls, the waiting calls and the `_on_cuda` variants are never called: they spin,
return early, or end the process.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from app.errors import SettingsError, TransferFailed
from app.transfer.base import Block, Region, Status
from app.transfer.confine import confine

_STATUS = {int(status): status for status in Status}
"""A look-up costs a fifth of an enum's call, and there are several of them a write."""
_EMPTY_POLLS, _EMPTY_POLL_S = 1000, 0.005
"""A write of no bytes has ended by the first look at it, as far as was seen."""
_NEEDED = ("transfer_submit_write", "transfer_check_status", "register_memory", "send_probe")


def environment(*, bind: str, lanes: int, progress_timeout_s: int) -> dict[str, str]:
    """Variables the engine reads once, when it is imported.

    The queue limits are raised because a full queue can wedge a peer for ever: flow control is our own
    window. The bind address is the one that the engine publishes; confine.py makes it the only one that
    is served.
    """
    return {
        "MC_TCP_BIND_ADDRESS": bind,
        "MC_FORCE_TCP": "1",
        "MC_TCP_LANES_PER_PEER": str(lanes),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(progress_timeout_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(progress_timeout_s),
        "MC_TRANSFER_TIMEOUT": str(progress_timeout_s * 3),
        "GLOG_minloglevel": "2",
        "MC_LOG_LEVEL": "ERROR",
    }


def prepare(values: dict[str, str]) -> None:
    """Put the variables in place. SettingsError when the engine was imported under other ones."""
    changed = {k: v for k, v in values.items() if os.environ.get(k) != v}
    if changed and "mooncake.engine" in sys.modules:
        raise SettingsError(f"the transfer engine is loaded already; too late to set {sorted(changed)}")
    os.environ.update(changed)


def load_engine_class() -> Any:
    """The engine's class. SettingsError with what to do when it is missing or too old."""
    try:
        from mooncake.engine import TransferEngine as Engine
    except ImportError as error:
        raise SettingsError(
            f"cannot load the transfer engine: {error}; install mooncake-transfer-engine-non-cuda and, "
            "on Debian, the packages libibverbs1, libnuma1 and libcurl4"
        ) from error
    require_async_api(Engine)
    return Engine


def require_async_api(engine: Any) -> None:
    """SettingsError when the asynchronous calls are missing."""
    missing = [name for name in _NEEDED if not hasattr(engine, name)]
    if missing:
        raise SettingsError(
            f"this transfer engine lacks {', '.join(missing)}: upgrade mooncake-transfer-engine to 0.3.13 "
            "or newer"
        )


class MooncakeDriver:
    """One engine instance in peer-to-peer handshake mode. The session name holds the real port."""

    addressed = True

    def __init__(self, host: str) -> None:
        self._engine = load_engine_class()()
        code = self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise TransferFailed(f"the transfer engine did not start on {host}: code {code}")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self.confined = confine(os.environ.get("MC_TCP_BIND_ADDRESS", ""))
        self.transport = "tcp" if os.environ.get("MC_FORCE_TCP") == "1" else "engine's choice"

    def register(self, region: Region) -> None:
        code = self._engine.register_memory(region.base, region.length)
        if code:
            raise TransferFailed(f"cannot register {region.name} ({region.length} bytes): code {code}")

    def unregister(self, region: Region) -> None:
        self._engine.unregister_memory(region.base)

    def submit(self, session: str, block: Block) -> int:
        return int(self._engine.transfer_submit_write(session, block.source, block.destination, block.length))

    def check(self, submitted: int) -> Status:
        if submitted <= 0:
            raise TransferFailed(f"{submitted} is no transfer: asking about it would end the process")
        return _STATUS[self._engine.transfer_check_status(submitted)]

    def probe(self, session: str) -> bool:
        """As the protocol says. A write of no bytes makes the engine ask the peer for its regions, and sends nothing.

        Without it the first real submit asks: it would block for up to a minute where a peer has just stopped, and
        its bytes would land after everybody has given them up.
        """
        engine = self._engine  # a close meanwhile waits for this call
        if engine.send_probe(session) != 0:
            return False
        submitted = int(engine.transfer_submit_write(session, 0, 0, 0))
        if submitted <= 0:
            return False
        for _ in range(_EMPTY_POLLS):
            status = _STATUS[engine.transfer_check_status(submitted)]
            if status is not Status.PENDING:
                return status is Status.DONE
            time.sleep(_EMPTY_POLL_S)
        return False

    def close(self) -> None:
        self._engine = None
