"""Keeps the transfer engine's listening sockets to one address.

The engine listens on every interface, without authentication, and MC_TCP_BIND_ADDRESS only changes the
address that it publishes (seen with 0.3.13.post1: the RPC socket on 0.0.0.0, the data sockets on 0.0.0.0
and [::]). It offers no other setting. So each of its wildcard listeners gets a socket filter that drops
every packet whose destination is not the configured address; connections that it accepts inherit the
filter. The filter is a classic BPF program, needs no privilege, and is in place before the session name
is told to anybody.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from pathlib import Path

from app.errors import TransferFailed

_SO_ATTACH_FILTER = 26
_SO_LOCK_FILTER = 44
_NET_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets count from the network header
_ACCEPT, _DROP = 0xFFFFFFFF, 0
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def program(address: str) -> list[Instruction]:
    """BPF that accepts packets to one address, IPv4 or IPv6."""
    wanted = ipaddress.ip_address(address)
    start = 16 if wanted.version == 4 else 24
    words = struct.unpack(f">{len(wanted.packed) // 4}I", wanted.packed)
    checks: list[tuple[int, int, int]] = [(_LOAD_BYTE, 0, wanted.version << 4)]
    checks += [(_LOAD_WORD, start + 4 * i, word) for i, word in enumerate(words)]
    code: list[Instruction] = []
    for number, (load, offset, value) in enumerate(checks):
        code.append((load, 0, 0, _NET_HEADER + offset))
        if load == _LOAD_BYTE:
            code.append((_AND, 0, 0, 0xF0))
        # a mismatch jumps over the remaining checks and the accepting return
        code.append((_JUMP_EQUAL, 0, 2 * (len(checks) - number - 1) + 1, value))
    return [*code, (_RETURN, 0, 0, _ACCEPT), (_RETURN, 0, 0, _DROP)]


def attach(listener: socket.socket, address: str) -> None:
    """Put the filter on a socket and lock it. TransferFailed when the system refuses."""
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program(address))
    buffer = ctypes.create_string_buffer(code)
    filter_program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)
        listener.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)
    except OSError as error:
        raise TransferFailed(f"cannot confine the engine's socket to {address}: {error}") from error


def confine(address: str) -> int:
    """Confine every wildcard listener of this process that is not confined yet; how many there were.

    Nothing is done for a wildcard address: then every interface is meant.
    """
    address = _literal(address) if address else ""
    if not address or ipaddress.ip_address(address).is_unspecified:
        return 0
    confined = 0
    for entry in Path("/proc/self/fd").iterdir():
        listener = _wildcard_listener(int(entry.name))
        if listener is None:
            continue
        with listener:
            if not listener.getsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER):
                attach(listener, address)
                confined += 1
    return confined


def _literal(host: str) -> str:
    """The address of a host name; an address stays as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise TransferFailed(f"the bind address {host} has no address: {error}") from error


def _wildcard_listener(number: int) -> socket.socket | None:
    """A duplicate of a descriptor if it is a TCP socket that listens on every interface."""
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # no socket: nobody else would close it
        return None
    try:
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listening and ipaddress.ip_address(found.getsockname()[0]).is_unspecified:
                return found
    except OSError:
        pass
    found.close()
    return None
