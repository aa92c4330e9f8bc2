"""Whether what is sent to an address stays on this machine: the one place that decides it, for the SDK, the server and `tmc`."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Say whether a key may travel to this address in the clear.

    address: host:port, an IPv6 host in brackets. Nothing is resolved: of all names only `localhost` counts, and what cannot
    be read, or could be read in two ways, is not loopback.
    """
    host, separator, port = address.rpartition(":")
    if not (separator and port.isascii() and port.isdigit()):
        return False
    if host.lower() == "localhost":
        return True
    try:
        if host.startswith("[") and host.endswith("]"):
            return ipaddress.IPv6Address(host[1:-1]).is_loopback
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False
