"""Which hosts this node may be told to contact.

A request names its prefill node, and decode calls it. Without a limit every client could make decode send
messages, with the peers' token in them, to any host and port that decode reaches.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from app.errors import HostDenied, InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_NUMERIC = re.compile(r"[0-9.]+|(?i:0x)[0-9a-fA-F.x]*|.*:.*")
"""What a connecting library may read as an address, `2130706433` and `127.1` included."""


def literal(host: str) -> Address | None:
    """The address that a host is, None for a name. InvalidRequest when it is neither."""
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if "%" in inner:
            raise ValueError("an address with a zone means something on its own machine only")
        address = ipaddress.ip_address(inner)
    except ValueError:
        if _NUMERIC.fullmatch(host) or not _NAME.fullmatch(host):
            raise InvalidRequest(f"{host[:80]!r} is no host name and no address") from None
        return None
    return _plain(address)


def base_url(scheme: str, host: str, port: int) -> str:
    """A node's url. InvalidRequest for what is no host: it could carry a user, a path or another host."""
    address = literal(host)
    shown = host if address is None else f"[{address}]" if address.version == 6 else str(address)
    return f"{scheme}://{shown}:{port}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry: a name or a network, on one port or on all."""

    name: str | None = None
    network: Network | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """`prefill-0`, `prefill-0:8001`, `10.1.0.0/16`, `10.1.2.3:8001`, `[fd00::/8]:8001`. ValueError."""
        inner, port = text, None
        found = re.fullmatch(r"\[(.+)\](?::([0-9]+))?", text) or re.fullmatch(r"([^:]+):([0-9]+)", text)
        if found is not None:
            inner, port = found[1], None if found[2] is None else int(found[2])
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"{text!r} has no port of 1 to 65535")
        try:
            return cls(network=ipaddress.ip_network(inner), port=port)
        except ValueError:
            if "/" in inner or _NUMERIC.fullmatch(inner) or not _NAME.fullmatch(inner):
                raise ValueError(f"{text!r} is no name, address or network") from None
        return cls(name=inner.lower(), port=port)

    def __str__(self) -> str:
        return f"{self.name or self.network}" + ("" if self.port is None else f" port {self.port}")


class AllowedHosts:
    """The rules of one node. A name that is not listed counts by its addresses, all of them."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)

    def require(self, host: str, port: int) -> None:
        """HostDenied, InvalidRequest for what is no host. A name that may resolve well passes for now."""
        address = literal(host)
        if address is not None:
            self.require_addresses(host, [str(address)], port)
        elif not self.lists(host, port) and all(rule.network is None for rule in self._rules):
            self._deny(host, port)

    def lists(self, name: str, port: int) -> bool:
        """Whether it is listed by name: then its addresses do not matter."""
        return any(rule.name == name.lower() and rule.port in (None, port) for rule in self._rules)

    def require_addresses(self, host: str, addresses: Sequence[str], port: int) -> None:
        """HostDenied unless every address that a host has is in a network of the rules."""
        for text in addresses:
            address = _plain(ipaddress.ip_address(text))
            if not any(
                rule.network is not None and rule.port in (None, port) and address in rule.network
                for rule in self._rules
            ):
                self._deny(host, port)

    def _deny(self, host: str, port: int) -> None:
        # without its addresses: the answer is no name service for whoever asks
        raise HostDenied(f"{host} port {port} is no prefill node of this one (limits.bootstrap_hosts)")

    def __str__(self) -> str:
        return ", ".join(map(str, self._rules)) or "none"


def allowed_hosts(entries: Sequence[str], bound_to: str) -> AllowedHosts:
    """The rules of the settings; without any, loopback or the networks that the node listens on."""
    if entries:
        return AllowedHosts(Rule.parse(entry) for entry in entries)
    return AllowedHosts(Rule(network=network) for network in networks_of(bound_to))


def networks_of(host: str) -> list[Network]:
    """The networks behind a listening address: loopback as a whole, every other interface's for a wildcard."""
    addresses = _addresses(host)
    if any(address.is_loopback for address in addresses):
        return [ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")]
    every = not addresses or any(address.is_unspecified for address in addresses)
    found: list[Network] = []
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            at = ipaddress.ip_address(entry.address.partition("%")[0])
            if at.is_loopback or at.is_link_local or not (every or at in addresses):
                continue
            bits = _prefix(entry.netmask, at)
            found.append(ipaddress.ip_network(f"{at}/{bits}", strict=False))
    return found


def _addresses(host: str) -> list[Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        pass
    try:
        return [ipaddress.ip_address(str(info[4][0])) for info in socket.getaddrinfo(host or None, None)]
    except OSError:
        return []


def _prefix(netmask: str | None, address: Address) -> int:
    """How long a network's prefix is; without a mask the network is the address alone."""
    if not netmask:
        return address.max_prefixlen
    return int(ipaddress.ip_address(netmask)).bit_count()


def _plain(address: Address) -> Address:
    """An IPv4 address that is written as an IPv6 one is that IPv4 address."""
    return getattr(address, "ipv4_mapped", None) or address
