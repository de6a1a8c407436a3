"""At which address other hosts reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence

from murmurate.errors import Refusal


def own_address(leader: str, others: Sequence[str] = ()) -> str:
    """This host's address on the route to the leader's, unless MURMURATE_ADDRESS names another. Raises
    Refusal where there is no route."""
    if address := os.environ.get("MURMURATE_ADDRESS"):
        return address
    address_here = _route(leader)
    is_local = ipaddress.ip_address(address_here).is_loopback  # on the leader's host
    return _route(others[0]) if is_local and others else address_here


def _route(address: str) -> str:
    """This host's address on the route to ``address``, by IPv4 where both are possible; nothing is sent."""
    with contextlib.suppress(OSError, UnicodeError):  # the latter of names that are none, such as a..b
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, target in sorted(found, key=lambda each: each[0]):
            if ipaddress.ip_address(target[0]).is_loopback:
                return str(target[0])
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    raise Refusal(
        f"this host finds no route to {address}. Set MURMURATE_ADDRESS to the address at which the other "
        "hosts reach this one."
    )
