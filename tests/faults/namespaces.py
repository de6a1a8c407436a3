"""Two network namespaces and a link between them that delays, loses, and can be cut.

The link is a pair of TUN devices, one in each namespace, and a thread that carries packets between them:
so delay and loss need no netem in the kernel, and a cut is what a pulled plug is. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def enter(name):
    """Move the calling thread into a namespace (of a process just started: all of it)."""
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)


class Cabled:
    """Namespaces ``names`` with ADDRESSES, joined. delay_seconds: each way. loss: of packets, each way."""

    def __init__(self, delay_seconds, loss, seed):
        self.names = tuple(f"murmurate-{os.getpid()}-{side}" for side in "ab")
        self.whole = True
        self.carried = self.lost = 0
        self._delay, self._loss = delay_seconds, loss
        self._generator = random.Random(seed)
        self._ended = False
        self._made = []
        try:
            for name, mine in zip(self.names, ADDRESSES, strict=True):
                _ip("netns", "add", name)
                self._made.append(name)
                with ThreadPoolExecutor(1) as pool:  # a thread of its own, as it does not come back
                    device = pool.submit(_device, name).result()
                self._ends = (*getattr(self, "_ends", ()), device)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{mine}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
        except BaseException:
            self.close()
            raise
        self._carrier = threading.Thread(target=self._carry, daemon=True)
        self._carrier.start()

    def close(self):
        self._ended = True
        if hasattr(self, "_carrier"):
            self._carrier.join(5)
        for end in getattr(self, "_ends", ()):
            os.close(end)
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _carry(self):
        flying, tickets = [], itertools.count()
        other = dict(zip(self._ends, reversed(self._ends), strict=True))
        while not self._ended:
            now = time.monotonic()
            while flying and flying[0][0] <= now:
                _, _, end, packet = heapq.heappop(flying)
                if self.whole:
                    _write(end, packet)
            pause = min(0.05, flying[0][0] - now) if flying else 0.05
            for end in select.select(self._ends, [], [], max(pause, 0))[0]:
                packet = os.read(end, 65536)
                if self.whole and self._generator.random() >= self._loss:
                    self.carried += 1
                    heapq.heappush(
                        flying, (time.monotonic() + self._delay, next(tickets), other[end], packet)
                    )
                else:
                    self.lost += 1


class Bridged:
    """``size`` namespaces on one bridge of the kernel; member k has ``address(k)`` on its device "eth"."""

    def __init__(self, size):
        stem = f"mur{os.getpid() % 100000}"
        self.names = [f"{stem}-{k}" for k in range(size)]
        self._bridge = f"{stem}b"
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for k, name in enumerate(self.names):
                port = f"{stem}p{k}"
                _ip("netns", "add", name)
                _ip("link", "add", port, "type", "veth", "peer", "name", "eth", "netns", name)
                _ip("link", "set", port, "master", self._bridge, "up")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{self.address(k)}/24", "dev", "eth")
                _ip("-n", name, "link", "set", "eth", "up")
        except BaseException:
            self.close()
            raise

    def address(self, k):
        return f"10.78.0.{k + 1}"

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)


def _write(end, packet):
    with contextlib.suppress(OSError):  # the far side is full: a packet is lost
        os.write(end, packet)


def _device(name):
    enter(name)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"cable", _IFF_TUN | _IFF_NO_PI))
    return end


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not():
    """The reason why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        Cabled(0.0, 0.0, 0).close()
    except (OSError, subprocess.CalledProcessError) as problem:
        return f"network namespaces are not allowed here: {getattr(problem, 'stderr', '') or problem}"
    return None


if __name__ == "__main__":
    print(why_not())
