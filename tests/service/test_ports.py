"""The port that a node publishes is the one it has bound."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from app.errors import SettingsError
from app.serve import bind, published_url
from app.settings.sections import HttpSettings


@pytest.mark.case("J5")
def test_a_taken_port_moves_when_that_is_allowed() -> None:
    """With http.port_taken = any the published url has the port that was bound, not the one wished for."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        http = HttpSettings(port=port, port_taken="any")
        listener, moved = bind(http)
        with closing(listener):
            bound = listener.getsockname()[1]
            assert moved and bound != port
            assert published_url(http, listener) == f"http://127.0.0.1:{bound}"
            with closing(socket.create_connection(("127.0.0.1", bound), timeout=5)):
                pass


@pytest.mark.case("J5")
def test_a_taken_port_stops_the_start_otherwise() -> None:
    """With http.port_taken = fail, the default, the start stops and names the setting and the address."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"http\.port: cannot listen on 127\.0\.0\.1:{port}"):
            bind(HttpSettings(port=port))


@pytest.mark.case("J5")
def test_a_free_port_is_taken_as_wished() -> None:
    """Port 0 publishes the port the system chose, a free port itself; the advertised host replaces the bound one."""
    first, moved = bind(HttpSettings(port=0))
    port = first.getsockname()[1]
    first.close()
    http = HttpSettings(port=port, advertise="node-1.example")
    listener, moved = bind(http)
    with closing(listener):
        assert not moved
        assert published_url(http, listener) == f"http://node-1.example:{port}"


@pytest.mark.case("K3")
@pytest.mark.parametrize("wished", ["any", "one"])
def test_eight_at_once_bind_eight_ports(wished: str) -> None:
    """Eight nodes that start at once, all wishing for one port or for any, listen on eight distinct ports."""
    port = 0
    if wished == "one":
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
    http = HttpSettings(port=port, port_taken="any")
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: bind(http), range(8)))
    try:
        ports = {listener.getsockname()[1] for listener, _ in results}
        assert len(ports) == 8
        assert sum(moved for _, moved in results) == (7 if wished == "one" else 0)
        for number in ports:
            with closing(socket.create_connection(("127.0.0.1", number), timeout=5)):
                pass
    finally:
        for listener, _ in results:
            listener.close()
