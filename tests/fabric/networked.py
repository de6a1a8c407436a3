"""Members of a network fabric in the test's own process, and a cable between two that can be cut."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from murmurate.fabric.network.authenticated_store import AuthenticatedStore
from murmurate.fabric.network.crypto import PeerRecord
from murmurate.fabric.network.endpoint import digest
from murmurate.fabric.network.fabric import NetworkFabric
from waiting import DEADLINE_SECONDS

SECRET = b"the run's secret"
RUN = "a run"
N = 5


@contextlib.contextmanager
def members(size, stores=None, each=None, **options):
    """All of them, met; closed at the end. each: further options, by rank."""
    shared = dist.HashStore()
    settings = {"run_id": RUN, "secret": SECRET, "deadline_seconds": 20.0, "silence_seconds": 1.0} | options

    def start(rank):
        return NetworkFabric(
            rank, size, (stores or {}).get(rank, shared), **settings | (each or {}).get(rank, {})
        )

    with ThreadPoolExecutor(size) as pool:
        fabrics = list(pool.map(start, range(size)))
    try:
        yield fabrics
    finally:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda fabric: fabric.close(5.0), fabrics))


def at_once(*functions):
    """Call them in a thread each; their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(2 * DEADLINE_SECONDS) for future in [pool.submit(f) for f in functions]]


def channels(fabrics, name="model", like=None):
    return [fabric.channel(name, torch.zeros(N) if like is None else like) for fabric in fabrics]


def fill(value):
    return torch.full((N,), float(value))


class Cable:
    """Carries bytes to a port, both ways; ``cut`` makes it swallow them, as a pulled plug does."""

    def __init__(self, port):
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._ended = False
        self._lines = []
        self.carried_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """What is under way is lost; connections neither end nor carry anything."""
        self._whole.clear()

    def mend(self):
        """New connections work; the old ones stay dead."""
        self._whole.set()

    def snap(self):
        """End all connections in their middle; new ones work."""
        lines, self._lines = self._lines, []
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._ended = True
        self._whole.set()
        self._listener.close()
        self.snap()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near):
        self._whole.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        self._lines += [near, far]
        swallows = False
        other = {near: far, far: near}
        with near, far, contextlib.suppress(OSError, ValueError):
            while not self._ended:
                ready, _, _ = select.select([near, far], [], [], 0.05)
                swallows = swallows or not self._whole.is_set()
                if swallows:
                    if self._whole.is_set():
                        return
                    continue
                for line in ready:
                    data = line.recv(1 << 16)
                    if not data:
                        return
                    other[line].sendall(data)
                    self.carried_bytes += len(data)


class Detour(dist.Store):
    """A store whose reader finds rank 0 at the end of a cable instead of where it is."""

    def __init__(self, store):
        super().__init__()
        self._store = store
        self.cable = None

    def set(self, key, value):
        self._store.set(key, value)

    def check(self, keys):
        return self._store.check(keys)

    def wait(self, keys, timeout):
        self._store.wait(keys, timeout)

    def get(self, key):
        text = self._store.get(key)
        if not key.endswith("/0"):
            return text
        card = PeerRecord.read(board(self._store).authenticated("0", text))
        if self.cable is None:
            self.cable = Cable(card.port)
        detoured = PeerRecord(0, card.address, self.cable.port, card.key, card.incarnation)
        other = dist.HashStore()
        board(other).set("0", detoured.pack())
        return other.get(key)


def board(store, secret=SECRET):
    """Where the members keep their records."""
    return AuthenticatedStore(store, f"murmurate/{digest(RUN, size_bytes=16).hex()}/0", secret)


@contextlib.contextmanager
def cabled(**options):
    """(rank 0, rank 1), the cable between them."""
    store = dist.HashStore()
    detour = Detour(store)
    with members(2, {0: store, 1: detour}, **options) as fabrics:
        try:
            yield fabrics, detour.cable
        finally:
            detour.cable.mend()
    detour.cable.close()
