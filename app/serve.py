"""One node as a process: bind the port, serve at once, load in the background, stop in order."""

from __future__ import annotations

import asyncio
import errno
import socket

import structlog
import uvicorn
import uvloop

from app.api.app import create_app
from app.engine.heap import give_back, settle
from app.errors import SettingsError
from app.obs.logging import configure_logging
from app.sections import HttpSettings
from app.service.node import Node
from app.settings import NodeSettings

log = structlog.get_logger(__name__)

_BACKLOG = 2048
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
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


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


def serve(settings: NodeSettings) -> int:
    """Run a node until it is told to stop; the process's exit status."""
    configure_logging(level=settings.log.level, style=settings.log.format)
    listener, moved = bind(settings.http)
    return uvloop.run(_serve(settings, listener, moved))


async def _serve(settings: NodeSettings, listener: socket.socket, moved: bool) -> int:
    node = Node(settings, url=published_url(settings.http, listener))
    if moved:
        node.counters["port_moved"] += 1
        log.warning("http.port_moved", wished=settings.http.port, url=node.url)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(node),
            http="httptools",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=15,
            timeout_keep_alive=75,
        )
    )

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
    return 1 if node.start_error else 0
