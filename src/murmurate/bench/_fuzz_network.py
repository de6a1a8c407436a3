"""Hostile byte streams against a live fabric of two members.

The members exchange vectors through a proxy that damages some of the traffic. Meanwhile an attacker sends
them noise, or openings of a connection (hello and first handshake message) that are forged, cut, changed or
repeated, or keeps connections open and sends nothing. The members check every value that they receive, so
that values that are wrong without an error are counted, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

_RUN, _SECRET = "fuzz", b"the secret of a run under attack"
_VECTOR_NUMBERS = 20_000  # numbers in a vector
_MEMBERS_BEGIN_SECONDS, _PROGRESS_SECONDS = 60.0, 30.0
_PLAIN_BYTES = 49  # the hello: unencrypted fields, with which a connection opens
_OPENING_BYTES = _PLAIN_BYTES + 56  # the first message of the handshake follows
_RECORDED_BYTES = 4096  # a session is recorded, to be replayed, until there are so many bytes
_ANSWER_BYTES = 64  # the most that a listener sends to a peer that is not authenticated
_TIMEOUT_SECONDS = 1.0
_HALF_OPEN = 30  # connections that the attacker keeps open
_CHECK_EVERY = 25  # attempts


def attack(count: int, seed: int) -> dict[str, int]:
    """The number of each outcome of ``count`` attempts drawn from ``seed``.

    attempts: how many were made; after a hang there are no more. accepted: attempts in which the attacker was
    taken for a member. refused: connections and frames that the members refused. silent: wrong results at a
    member without an error (a value that was not sent, a lost message, a mean without the other member).
    exchanges: number of exchanges that the members made meanwhile. tracebacks: of the members. hangs: how
    often the members made no exchange, or one did not end, for a long time. peak_bytes: growth of the
    members' resident memory. Raises RuntimeError if they do not begin.
    """
    generator = random.Random(seed)
    outcomes: Counter[str] = Counter(attempts=0, accepted=0, tracebacks=0, hangs=0, silent=0)
    with tempfile.TemporaryDirectory(prefix="murmurate-") as folder:
        attacker = _Attacker(generator, Path(folder))
        try:
            attacker.begin()
            for number in range(count):
                outcomes["attempts"] += 1
                outcomes["accepted"] += attacker.attempt()
                if number % _CHECK_EVERY == _CHECK_EVERY - 1 and not attacker.members_go_on():
                    outcomes["hangs"] += 1
                    break
            outcomes.update(attacker.end())
        finally:
            attacker.close()
    return dict(outcomes)


class _Attacker:
    """Starts two members and the proxy between them, and attacks the members."""

    def __init__(self, generator: random.Random, folder: Path) -> None:
        self._generator, self._folder = generator, folder
        self._proxy = _Proxy(random.Random(generator.random()), folder / "proxied-port")
        self._members: list[subprocess.Popen[str]] = []
        self._half_open: list[socket.socket] = []
        self._ports: list[int] = []
        self._initial_bytes = self._peak_bytes = 0

    def begin(self) -> None:
        """Start the members, and wait for their first exchanges. Raises RuntimeError if there are none."""
        for rank in range(2):
            words = f"{rank}, Path({str(self._folder)!r}), {self._proxy.port}"
            command = f"from murmurate.bench._fuzz_network import Path, member; member({words})"
            with (self._folder / f"{rank}.log").open("w") as log:
                self._members.append(
                    subprocess.Popen(
                        [sys.executable, "-c", command],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        text=True,
                    )
                )
        end = time.monotonic() + _MEMBERS_BEGIN_SECONDS
        while min(self._progress()) < 5:
            if time.monotonic() > end or any(member.poll() is not None for member in self._members):
                raise RuntimeError(f"the members did not begin: {self._output()}")
            time.sleep(0.05)
        self._ports = [json.loads((self._folder / f"{rank}.port").read_text()) for rank in range(2)]
        self._initial_bytes = self._peak_bytes = self._resident_bytes()

    def attempt(self) -> bool:
        """Make one attack, drawn at random; returns whether the attacker was taken for a member."""
        self._note_peak()
        attacks = [self._open_connection, self._damage_traffic, self._damage_the_store]
        attacks += [self._send_stream] * 7
        return self._generator.choice(attacks)()

    def members_go_on(self) -> bool:
        """Whether each member makes another exchange in time."""
        before, end = self._progress(), time.monotonic() + _PROGRESS_SECONDS
        while time.monotonic() < end:
            if all(now > then for now, then in zip(self._progress(), before, strict=True)):
                return True
            time.sleep(0.01)
        return False

    def end(self) -> Counter[str]:
        """End the members; returns the number of each outcome that is known only now."""
        self._note_peak()
        outcomes: Counter[str] = Counter(refused=0, exchanges=min(self._progress()))
        for member in self._members:
            with contextlib.suppress(OSError):
                assert member.stdin is not None
                member.stdin.close()
        for rank, member in enumerate(self._members):
            try:
                member.wait(_PROGRESS_SECONDS)
            except subprocess.TimeoutExpired:
                outcomes["hangs"] += 1
                continue
            with contextlib.suppress(OSError, ValueError):
                outcomes["refused"] += sum(
                    json.loads((self._folder / f"{rank}.refused").read_text()).values()
                )
        outcomes["tracebacks"] = self._output().count("Traceback (most recent call last)")
        outcomes["silent"] = self._output().count("wrong value")
        outcomes["peak_bytes"] = self._peak_bytes - self._initial_bytes
        return outcomes

    def close(self) -> None:
        for member in self._members:
            member.kill()
            member.wait()
        for sock in self._half_open:
            sock.close()
        self._proxy.close()

    # -- attacks

    def _open_connection(self) -> bool:
        """Connect, send nothing or a part of an opening, and keep the connection open."""
        with contextlib.suppress(OSError):
            self._half_open.append(self._connected())
            self._half_open[-1].sendall(
                self._opening()[: self._generator.choice((0, 1, 20, _PLAIN_BYTES, 60))]
            )
        if len(self._half_open) > _HALF_OPEN:
            self._half_open.pop(0).close()
        return False

    def _damage_traffic(self) -> bool:
        self._proxy.damage(self._generator.choice(("flip", "cut", "repeat", "leave out", "hold")))
        return False

    def _damage_the_store(self) -> bool:
        from murmurate.fabric.network.endpoint import digest

        store = dist.FileStore(str(self._folder / "store"), 3)  # type: ignore[attr-defined]
        key = f"murmurate/{digest(_RUN, size_bytes=16).hex()}/0/{self._generator.randrange(2)}"
        changed: Any = self._generator.choice((bytes(500), store.get(key)[:-1] + b"x"))
        store.set(key, changed)
        return False

    def _send_stream(self) -> bool:
        """Send a stream; returns whether the answer is longer than what an unauthenticated peer gets."""
        unsent, received_bytes = self._stream(), 0
        with contextlib.suppress(OSError), self._connected() as sock:
            while unsent:
                size = len(unsent) if len(unsent) > 4096 else self._generator.randint(1, len(unsent))
                sock.sendall(unsent[:size])
                unsent = unsent[size:]
            sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(1 << 16):
                received_bytes += len(chunk)
        return received_bytes > _ANSWER_BYTES

    def _stream(self) -> bytes:
        """The bytes sent to a member: noise, an opening (forged, cut, changed or repeated), or the recorded
        beginning of a session."""
        draw, opening = self._generator, bytearray(self._opening())
        kind = draw.choice(("noise", "flood", "cut", "flip", "field", "replay", "session", "handshake"))
        if kind == "noise":
            return draw.randbytes(draw.randrange(1, 2000))
        if kind == "flood":
            return bytes(opening[:_PLAIN_BYTES]) + draw.randbytes(
                draw.choice((_OPENING_BYTES - _PLAIN_BYTES + 1, 4096, 1 << 20))
            )
        if kind == "cut":
            return bytes(opening[: draw.randrange(len(opening))])
        if kind == "flip":
            opening[draw.randrange(len(opening))] ^= 1 << draw.randrange(8)
        elif kind == "field":  # cipher, run, epoch, rank or incarnation
            start, stop = draw.choice(((4, 5), (5, 21), (21, 29), (29, 33), (33, _PLAIN_BYTES)))
            opening[start:stop] = draw.choice((b"\xff", b"\0")) * (stop - start)
        elif kind == "session":
            return self._proxy.recorded
        elif kind == "handshake":  # random bytes
            opening[_PLAIN_BYTES:] = draw.randbytes(len(opening) - _PLAIN_BYTES)
        return bytes(opening)

    def _opening(self) -> bytes:
        """The recorded opening of rank 1, whose hello names its run, epoch, rank and incarnation."""
        return self._proxy.recorded[:_OPENING_BYTES]

    def _connected(self) -> socket.socket:
        port = self._generator.choice(self._ports)
        return socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS)

    # -- observing the members

    def _progress(self) -> list[int]:
        """The number of exchanges of each member so far."""
        files = [self._folder / f"{rank}.progress" for rank in range(2)]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def _resident_bytes(self) -> int:
        with contextlib.suppress(psutil.Error):
            return sum(psutil.Process(member.pid).memory_info().rss for member in self._members)
        return 0

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._resident_bytes())

    def _output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self._folder.glob("*.log"))


class _Proxy:
    """A TCP proxy between rank 1 and rank 0, which records the beginning of rank 1's last session, and
    damages traffic on request. port_file: where rank 1 writes rank 0's port once it knows it."""

    def __init__(self, generator: random.Random, port_file: Path) -> None:
        self._generator, self._port_file = generator, port_file
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.recorded = b""
        self._next_damage = ""
        threading.Thread(target=self._accept, daemon=True).start()

    def damage(self, kind: str) -> None:
        """Damage the next piece of traffic."""
        self._next_damage = kind

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        sent = b""
        # ValueError: rank 1 may be rewriting the file of the port, which is then empty
        with contextlib.suppress(OSError, ValueError), near:
            with socket.create_connection(("127.0.0.1", int(self._port_file.read_text()))) as far:
                other = {near: far, far: near}
                while True:
                    for source in select.select([near, far], [], [])[0]:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        if source is near and len(sent) < _RECORDED_BYTES:
                            sent += data
                            if len(sent) >= _OPENING_BYTES:
                                self.recorded = sent
                        for piece in self._damaged(data):
                            other[source].sendall(piece)

    def _damaged(self, data: bytes) -> list[bytes]:
        kind, self._next_damage = self._next_damage, ""
        place = self._generator.randrange(len(data))
        if kind == "flip":
            return [data[:place], bytes([data[place] ^ 1 << self._generator.randrange(8)]), data[place + 1 :]]
        if kind == "repeat":
            return [data, data]
        if kind == "leave out":
            return [data[:place]]
        if kind == "cut":
            raise OSError("cut")
        if kind == "hold":
            time.sleep(0.1)
        return [data]


# -- the members, each in a process of its own ------------------------------------------------------------


class _StoreWithProxy(Store):
    """The store as rank 1 sees it: in place of rank 0's port it has the proxy's."""

    def __init__(self, store: Any, port: int, port_file: Path) -> None:
        super().__init__()
        self._store, self._port, self._port_file = store, port, port_file

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def get(self, key: str) -> bytes:
        from murmurate.fabric.network.authenticated_store import AuthenticatedStore
        from murmurate.fabric.network.crypto import PeerRecord

        value: bytes = self._store.get(key)
        prefix, _, rank = key.rpartition("/")
        if rank != "0":
            return value
        record = PeerRecord.read(AuthenticatedStore(self._store, prefix, _SECRET).authenticated(rank, value))
        self._port_file.write_text(str(record.port))
        scratch = dist.HashStore()  # type: ignore[attr-defined]
        AuthenticatedStore(scratch, prefix, _SECRET).set(
            rank, dataclasses.replace(record, port=self._port).pack()
        )
        return bytes(scratch.get(key))


def member(rank: int, folder: Path, proxy_port: int) -> None:
    """Exchange means, published values and messages with the other member until stdin ends; print every wrong
    value."""
    from murmurate.fabric.network.fabric import NetworkFabric

    store: Any = dist.FileStore(str(folder / "store"), 3)  # type: ignore[attr-defined]
    if rank == 1:
        store = _StoreWithProxy(store, proxy_port, folder / "proxied-port")
    fabric = NetworkFabric(
        rank, 2, store, run_id=_RUN, secret=_SECRET, silence_seconds=2.0, shared_memory=False
    )
    (folder / f"{rank}.port").write_text(str(fabric.endpoint.port))
    ended = threading.Event()
    threading.Thread(target=_end_with_stdin, args=(ended,), daemon=True).start()
    channel = fabric.channel("fuzz", torch.zeros(_VECTOR_NUMBERS))
    with (folder / f"{rank}.progress").open("wb", buffering=0) as progress:
        for number in itertools.count(1):
            # the mean's last number tells both that one wants to end, so that both end after the same mean
            x = torch.full((_VECTOR_NUMBERS,), float(number * (rank + 1)))
            x[-1] = float(ended.is_set())
            _expect("members", channel.mean_(x), 2)
            _expect_all("mean", x[:-1], number * 1.5)
            channel.publish(torch.full((_VECTOR_NUMBERS,), float(number)))
            channel.send(1 - rank, "mail", torch.full((_VECTOR_NUMBERS,), float(number)), note=number)
            message = channel.wait("mail", _PROGRESS_SECONDS)
            _expect("note", None if message is None else message.note, number)
            if message is not None:
                _expect_all("message", message.x, number)
            if channel.version(1 - rank):
                published, version = channel.peek(1 - rank)
                _expect_all("published", published, version)
            progress.write(b".")
            if x[-1]:
                break
    (folder / f"{rank}.refused").write_text(json.dumps(fabric.refused))
    fabric.close(5.0)


def _end_with_stdin(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _expect(what: str, value: object, expected: object) -> None:
    """Print a value that differs from what was sent."""
    if value != expected:
        print(f"wrong value of {what}: {value} instead of {expected}", flush=True)


def _expect_all(what: str, x: torch.Tensor, expected: float) -> None:
    if not bool((x == expected).all()):
        _expect(what, f"{float(x.min())} to {float(x.max())}", expected)
