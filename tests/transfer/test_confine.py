"""The engine's listeners serve the configured address only."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from app.errors import TransferFailed
from app.transfer.confine import attach, confine, program


def reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=0.3).close()
    except OSError:
        return False
    return True


@pytest.mark.case("O1")
@pytest.mark.parametrize(("family", "wildcard"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_wildcard_listener_serves_one_address(family: socket.AddressFamily, wildcard: str) -> None:
    """After confinement a wildcard listener is reached at the configured address and at no other."""
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((wildcard, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert reachable("127.0.0.2", port), "the test needs a listener that is open at first"
        assert confine("127.0.0.1") >= 1
        assert reachable("127.0.0.1", port)
        assert not reachable("127.0.0.2", port)
        assert confine("127.0.0.1") == 0, "a confined listener is left as it is"


def test_bound_listeners_are_left_alone() -> None:
    """A listener with an address of its own needs no filter, and a wildcard setting means every interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        confine("127.0.0.1")
        assert reachable("127.0.0.2", listener.getsockname()[1])
    assert confine("0.0.0.0") == 0
    assert confine("") == 0


def test_the_filter_cannot_be_taken_off() -> None:
    """The filter is locked, and a second one is a typed error."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        attach(listener, "127.0.0.1")
        with pytest.raises(TransferFailed, match="cannot confine"):
            attach(listener, "127.0.0.2")


def test_every_mismatch_jumps_to_the_drop() -> None:
    """In both families each comparison's false branch lands on the last instruction."""
    for address in ("10.1.2.3", "fd00::1"):
        code = program(address)
        jumps = [(at, false) for at, (kind, _, false, _) in enumerate(code) if kind == 0x15]
        assert jumps
        assert all(at + 1 + false == len(code) - 1 for at, false in jumps)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_looking_for_listeners_leaves_no_descriptor() -> None:
    """Pipes, files and sockets are looked at and left: the process has as many descriptors afterwards."""
    read, write = os.pipe()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        before = descriptors()
        for _ in range(3):
            confine("127.0.0.1")
        after = descriptors()
    os.close(read)
    os.close(write)
    assert after == before
