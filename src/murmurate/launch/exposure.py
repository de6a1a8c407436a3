"""Whether other hosts can reach the store of torchrun, through which strangers could execute code."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

import psutil

DANGER = (
    "under --rdzv-backend c10d torch executes what anyone who reaches it writes there. Close its port to "
    "others by a firewall, or use a private network, an ssh tunnel or --rdzv-backend etcd-v2 "
    "(docs/launchers.md)"
)


def listens_beyond_loopback(is_wanted: Callable[[Any], bool]) -> str:
    """The address and port at which other hosts can reach a wanted socket of this host; empty if none can.

    is_wanted: whether a listening socket, as psutil describes it, is to be considered.
    """
    try:
        sockets = psutil.net_connections("tcp")
    except (psutil.Error, OSError):  # some systems show sockets only to root
        return ""
    for socket in sockets:
        if socket.status != psutil.CONN_LISTEN or not socket.laddr or not is_wanted(socket):
            continue
        if not ipaddress.ip_address(socket.laddr.ip).is_loopback:
            return f"{socket.laddr.ip} port {socket.laddr.port}"
    return ""


def torchrun_listens() -> str:
    """The address and port at which other hosts can reach the store of this host's torchrun; else empty."""
    return listens_beyond_loopback(lambda socket: socket.pid is not None and _is_torchrun(socket.pid))


def _is_torchrun(pid: int) -> bool:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
    return "torch.distributed.run" in command or "torchrun" in command
