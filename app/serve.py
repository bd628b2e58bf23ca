"""One node as a process: bind the port, serve at once, load in the background, stop in order.

The first SIGTERM (or SIGINT) drains: no new rooms, while peers and probes are still answered until the live
ones have ended. The second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import uvicorn
import uvloop

from app.api.app import create_app
from app.engine.heap import give_back, settle
from app.errors import SettingsError
from app.obs.logging import configure_logging
from app.service.node import Node
from app.settings import NodeSettings
from app.settings.credentials import server_tls
from app.settings.sections import HttpSettings

log = structlog.get_logger(__name__)

_BACKLOG = 2048
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ANSWERS_S = 5
"""What answers get to go out once their rooms have ended."""
_IDLE_S = 1.0


def bind(http: HttpSettings) -> tuple[socket.socket, bool]:
    """A listening socket, and whether it is on another port than wished (http.port_taken = any)."""
    try:
        return _listen(http.host, http.port), False
    except OSError as error:
        taken, where = error.errno == errno.EADDRINUSE, f"{http.host}:{http.port}"
        if http.port_taken == "any" and taken:
            return _listen(http.host, 0), True
        key = "http.port" if taken or error.errno == errno.EACCES else "http.host"
        raise SettingsError(f"{key}: cannot listen on {where}: {error.strerror}") from error


def _listen(host: str, port: int) -> socket.socket:
    """Bound and listening at once: two sockets may be bound to one port as long as neither listens."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def published_url(http: HttpSettings, listener: socket.socket) -> str:
    """The url that peers use: the advertised host with the port that was really bound."""
    host = http.advertise or http.host
    return f"{http.scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


async def _give_back_when_idle(node: Node) -> None:
    """Forwards leave freed memory with the C library; a node that has nothing to do does without it."""
    seen = given = 0
    while True:
        await asyncio.sleep(_IDLE_S)
        if node.draining:
            return
        count = node.context.forwards.count
        if count == seen != given and not node.rooms():
            await asyncio.to_thread(give_back)
            given = count
        seen = count


class _Server(uvicorn.Server):
    """Leaves the signals to us: the server would close the door before the rooms have ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stop:
    """Drains the node at the first signal. The second one finds the system's own handler in place."""

    def __init__(self, node: Node, server: uvicorn.Server) -> None:
        self._node = node
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        for each in _STOP_SIGNALS:
            self._loop.add_signal_handler(each, self._asked, each)

    def _asked(self, number: signal.Signals) -> None:
        for each in _STOP_SIGNALS:
            self._loop.remove_signal_handler(each)
            # the system's: it works even when this loop no longer turns
            signal.signal(each, signal.SIG_DFL)
        finish_s = self._node.settings.deadlines.shutdown_s
        log.info("node.draining", signal=number.name, finish_s=finish_s, rooms=self._node.live_rooms)
        self._node.draining = True
        self._draining = asyncio.create_task(self._drain(finish_s))

    def done(self) -> None:
        if self._draining is not None:
            self._draining.cancel()

    async def _drain(self, finish_s: float) -> None:
        try:
            if not await self._node.drain(finish_s=finish_s):
                log.warning("node.rooms_left", rooms=self._node.live_rooms)
        finally:
            self._server.should_exit = True


MakeNode = Callable[[NodeSettings, str], Node]
"""A node for these settings that publishes this url."""


def _node(settings: NodeSettings, url: str) -> Node:
    return Node(settings, url=url)


def serve(settings: NodeSettings, make: MakeNode = _node) -> int:
    """Run a node until it is told to stop; the process's exit status."""
    configure_logging(level=settings.log.level, style=settings.log.format)
    listener, moved = bind(settings.http)
    return uvloop.run(_serve(settings, listener, moved, make))


async def _serve(settings: NodeSettings, listener: socket.socket, moved: bool, make: MakeNode) -> int:
    node = make(settings, published_url(settings.http, listener))
    if moved:
        node.counters["port_moved"] += 1
        log.warning("http.port_moved", wished=settings.http.port, url=node.url)
    config = uvicorn.Config(
        create_app(node),
        http="httptools",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_ANSWERS_S,
        timeout_keep_alive=75,
    )
    config.load()
    config.ssl = server_tls(settings.http)
    server = _Server(config)
    stop = _Stop(node, server)

    async def start() -> None:
        try:
            await node.start()
        except Exception as error:
            node.start_error = f"the node did not start: {error}"
            log.error("node.start_failed", reason=str(error), exc_info=error)
            server.should_exit = True
            return
        settle()
        await _give_back_when_idle(node)

    starting = asyncio.create_task(start())
    log.info("node.listening", url=node.url, role=settings.role)
    await server.serve(sockets=[listener])
    starting.cancel()
    await node.stop()
    stop.done()
    log.info("node.stopped", url=node.url)
    return 1 if node.start_error else 0
