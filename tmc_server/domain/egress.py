"""Which addresses the center may ask: an allow-list, checked on every address that a name resolves to.

An entry is HOST:PORT or NETWORK/BITS:PORT, with * for any port. A target that names its host must be listed. Instances
that discovery gives need no entry, unless they live where nobody should be sent by mistake: loopback, link-local, the
metadata services of clouds, multicast, reserved ranges, and forms of IPv6 that hide an IPv4 address (mapped, NAT64, 6to4,
Teredo, ISATAP). Such addresses are refused unless a network entry names them, whatever the way they were found.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tmc_common.addresses import HostPort

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# A table of our own: the standard library's is_global says yes to 6to4 and NAT64 in Python 3.11. It refuses every range of
# IANA's special-purpose registries except private use (10/8, 172.16/12, 192.168/16, 100.64/10, fc00::/7), where services
# live, and every part of IPv6 that is not assigned to unicast. tests/unit/server/test_egress.py holds the registries.
_NEVER = [
    ipaddress.ip_network(text)
    for text in (
        # IPv4: this host, loopback, link-local, protocol assignments, documentation, 6to4 relays, AS112, AMT, benchmarks,
        # multicast, reserved.
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        # IPv6 below global unicast: loopback, mapped and compatible IPv4, translation (NAT64), discard.
        "::/3",
        # Inside global unicast: protocol assignments with Teredo, documentation, 6to4, AS112, documentation again.
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "2620:4f:8000::/48",
        "3fff::/20",
        # Above it: segment routing (5f00::/16) and what is unassigned, link-local, site-local, multicast.
        "4000::/2",
        "8000::/2",
        "c000::/3",
        "e000::/4",
        "f000::/5",
        "f800::/6",
        "fe00::/8",
        "ff00::/8",
        # Metadata and host services of clouds at addresses that look like any other: Alibaba, Azure, AWS, Google, Scaleway.
        "100.100.100.200/32",
        "168.63.129.16/32",
        "fd00:ec2::/32",
        "fd20:ce::254/128",
        "fd00:42::42/128",
    )
]
_NAME = re.compile(
    r"(?=.{1,253}\Z)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.?"
)
_HEXADECIMAL = re.compile(r"0[xX]")


@dataclass(frozen=True, slots=True)
class Place:
    """host:port as somebody wrote it. literal: the host is an address, not a name."""

    host: str
    port: int
    literal: Address | None

    def __str__(self) -> str:
        return str(HostPort(self.host, self.port))


def parse_place(text: str) -> Place:
    """Parse host:port. Raises ValueError unless the host is a plain name or an address in its usual form.

    Numbers in other notations (2130706433, 0x7f.1, 0177.0.0.1, 127.1), which a resolver would take, are refused.
    """
    host, port = HostPort.parse(text)
    if not port:
        raise ValueError(f"{text!r} has no port")
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host) or _HEXADECIMAL.match(host):
            raise ValueError(f"{text!r} has no host that is a name or a plain address") from None
        return Place(host.rstrip(".").lower(), port, None)
    if "%" in host:
        raise ValueError(f"{text!r} is not HOST:PORT; an IPv6 address has no zone here")
    return Place(str(literal), port, literal)


@dataclass(frozen=True, slots=True)
class _Entry:
    host: str
    network: Network | None
    port: int | None  # None: any

    def allows_port(self, port: int) -> bool:
        return self.port is None or self.port == port


class Egress:
    """The allow-list. entries: see the module. Raises ValueError for an entry that cannot be read."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = [_parse_entry(entry) for entry in entries]

    def lists(self, place: Place) -> bool:
        """Return whether an entry names this host and port as written."""
        if place.literal is not None:
            return self._in_networks(place.literal, place.port)
        return any(e.host == place.host and e.allows_port(place.port) for e in self._entries)

    def may_resolve(self, place: Place, *, listed: bool) -> bool:
        """Return whether any address of this name could be permitted; if not, the name is not resolved."""
        return listed or any(e.network is not None and e.allows_port(place.port) for e in self._entries)

    def permits(self, address: Address, port: int, *, listed: bool) -> bool:
        """Return whether this resolved address may be connected to. listed: its name is listed, or it is from discovery."""
        if self._in_networks(address, port):
            return True
        return listed and not (_is_isatap(address) or any(address in network for network in _NEVER))

    def _in_networks(self, address: Address, port: int) -> bool:
        return any(e.network is not None and address in e.network and e.allows_port(port) for e in self._entries)


def _is_isatap(address: Address) -> bool:
    """An interface identifier 0000:5efe or 0200:5efe (RFC 5214) in any prefix: the last four bytes are an IPv4 address.

    The universal and the group bit may be set or not: routers do not look at them.
    """
    return address.version == 6 and (int(address) >> 32) & 0xFCFF_FFFF == 0x5EFE


def _parse_entry(text: str) -> _Entry:
    host, _, port = text.rpartition(":")
    if port != "*" and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ValueError(f"{text!r} must be HOST:PORT or NETWORK/BITS:PORT; * is any port")
    number = None if port == "*" else int(port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        return _Entry("", ipaddress.ip_network(host), number)
    except ValueError:
        place = parse_place(f"{host}:{number or 1}")
        return _Entry(place.host, None, number)
