"""How long a vector takes from one process to another, by every way there is, beside what limits it.

Shared memory beside a copy in memory; links of the network fabric beside gloo's send and receive, and
encrypted ones beside their cipher; means of the network fabric beside gloo's all-reduce. A link over loopback
("loopback") leaves vectors in memory that both ends map; "tcp" sends them, as it does between hosts. All take
turns in the same two processes, and ratios are of neighbours in time.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from murmurate.bench import _roles
from murmurate.bench._commands import missing
from murmurate.bench._result import Log, median, spread
from murmurate.errors import MissingExtra
from murmurate.fabric.interface import Channel, Fabric
from murmurate.fabric.network.fabric import NetworkFabric

NAME = "transport"
SUMMARY = "time and bandwidth of register, mail and means, in shared memory and over TCP, at 1, 10 and 100 MB"

_LINKS: dict[str, dict[str, Any]] = {
    "loopback_plain": {"encrypt": False},
    "loopback_aes_256_gcm": {"cipher": "aes-256-gcm"},
    "tcp_plain": {"encrypt": False, "shared_memory": False},
    "tcp_aes_256_gcm": {"cipher": "aes-256-gcm", "shared_memory": False},
    "tcp_chacha20_poly1305": {"cipher": "chacha20-poly1305", "shared_memory": False},
}
_IN_MEMORY = ("shared_memory", "loopback_plain", "loopback_aes_256_gcm")
_MEANS = ("tcp_plain", "tcp_aes_256_gcm")
_CIPHERS = ("aes_256_gcm", "chacha20_poly1305")
_PATIENCE_SECONDS = 60.0
_STREAM_MEGABYTES = 200  # sent in a row, for the bandwidth


@dataclasses.dataclass(frozen=True)
class Plan:
    """sizes: in MB (10**6 bytes), with as many turns each, and as many streams."""

    sizes: tuple[tuple[int, int, int], ...] = ((1, 60, 7), (10, 30, 7), (100, 9, 5))


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """Seconds from before ``publish`` or ``send`` to after the reader has the vector, of a mean from rank 0's
    call to rank 1's result, and the bandwidth of many messages in a row; medians and ratios of rates."""
    if missing("cryptography", "network"):
        raise MissingExtra("cryptography", "network", "The bench 'transport'")
    plan = plan or (Plan(((1, 300, 25), (10, 150, 25), (100, 41, 15))) if full else Plan())
    result: dict[str, Any] = {}
    for megabytes, turns, streams in plan.sizes:
        log(f"{megabytes} MB, {turns} turns, {streams} streams")
        with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
            sent, read = _roles.together(2, work, folder, secrets.token_bytes(32), megabytes, turns, streams)
        result[f"{megabytes}_MB"] = figures(sent, read, megabytes * 10**6)
    return {"sizes": result, "worst": worst(result), "plan": dataclasses.asdict(plan)}


def work(
    fabric: Fabric, folder: str, secret: bytes, megabytes: int, turns: int, streams: int
) -> dict[str, list[float]]:
    """One member: when each vector left (rank 0) or was read (rank 1), by way; and what limits them."""
    store = os.path.join(folder, "gloo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=fabric.rank, world_size=2)
    x = torch.randn(megabytes * 250_000, generator=torch.Generator().manual_seed(0))
    links = {name: _link(fabric.rank, name, folder, secret) for name in _LINKS}
    ways: dict[str, Way] = {"gloo": Gloo(x)}
    for name, door in [("shared_memory", fabric), *links.items()]:
        for end in _ends(name):
            spins = name in _IN_MEMORY and end == ""
            ways[f"{name}_register{end}"] = Register(door.channel(f"r{end}", x), x, spins)
            ways[f"{name}_mail{end}"] = Mail(door.channel(f"m{end}", x), x, spins)
    ways["gloo_mean"] = AllReduce(x)
    for name in _MEANS:
        ways[f"{name}_mean"] = Mean(links[name].channel("mean", x), x)
    limits = _limits(x)
    ready = fabric.channel("ready", torch.zeros(1))
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(-3, turns):
        for name in ways if turn % 2 else reversed(ways):
            together(ready)
            moment = ways[name].send() if fabric.rank == 0 else ways[name].read()
            if turn >= 0:
                times[name].append(moment)
        for name, limit in limits.items():
            dist.barrier()
            if fabric.rank == 0 and turn >= 0:
                times[name].append(limit())
    row = {name: way for name, way in ways.items() if isinstance(way, Gloo | Mail)}
    for turn in range(-1, streams):
        for name in row if turn % 2 else reversed(row):
            together(ready)
            each = [
                row[name].send() if fabric.rank == 0 else row[name].read() for _ in range(_row(megabytes))
            ]
            if turn >= 0:  # from the first one's start to the last one's end
                times[f"{name}_stream"].append(each[0] if fabric.rank == 0 else each[-1])
    dist.barrier()
    for door in links.values():
        door.close()
    return dict(times)


def together(ready: Channel) -> None:
    """Rank 1 is about to read when rank 0 begins: how late it comes out of a barrier is not measured."""
    turn = ready.publish(torch.zeros(1))
    if ready.rank == 0:  # without a spin, as what was sent before may still be on its way in another thread
        ready.wait_newer([1], [turn - 1], _PATIENCE_SECONDS)


def _ends(way: str) -> tuple[str, ...]:
    """Of names: in memory a reader may ask without a pause, or wait, which is measured beside it."""
    return ("", "_waiting") if way in _IN_MEMORY else ("",)


def _row(megabytes: int) -> int:
    return max(_STREAM_MEGABYTES // megabytes, 2)


def _link(rank: int, name: str, folder: str, secret: bytes) -> NetworkFabric:
    store = dist.FileStore(os.path.join(folder, name), 2)  # type: ignore[attr-defined]
    return NetworkFabric(rank, 2, store, run_id=name, secret=secret, **_LINKS[name])


class Way(Protocol):
    """One way from rank 0 to rank 1. ``send`` returns when it began, ``read`` when it had the vector."""

    def send(self) -> float: ...
    def read(self) -> float: ...


class Gloo:
    """torch.distributed's blocking send and receive."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._room = x, torch.zeros_like(x)

    def send(self) -> float:
        start = time.monotonic()
        dist.send(self._x, 1)
        return start

    def read(self) -> float:
        dist.recv(self._room, 0)
        return time.monotonic()


class AllReduce:
    """torch.distributed's sum over both, in place; it begins when rank 0 comes."""

    def __init__(self, x: Tensor) -> None:
        self._x = torch.zeros_like(x)

    def send(self) -> float:
        start = time.monotonic()
        dist.all_reduce(self._x)
        return start

    def read(self) -> float:
        dist.all_reduce(self._x)
        return time.monotonic()


class Mean:
    """A channel's mean of both."""

    def __init__(self, fabric: Channel, x: Tensor) -> None:
        self._fabric, self._x = fabric, x.clone()

    def send(self) -> float:
        start = time.monotonic()
        self._fabric.mean_(self._x)
        return start

    def read(self) -> float:
        self._fabric.mean_(self._x)
        return time.monotonic()


class Register:
    """spins: ask without a pause, where a waiting reader would sleep for longer than the copy takes."""

    def __init__(self, fabric: Channel, x: Tensor, spins: bool) -> None:
        self._fabric, self._x, self._spins = fabric, x, spins
        self._seen = 0

    def send(self) -> float:
        start = time.monotonic()
        self._fabric.publish(self._x)
        return start

    def read(self) -> float:
        if self._spins:
            while self._fabric.version(0) <= self._seen:
                pass
        elif not self._fabric.wait_newer([0], [self._seen], _PATIENCE_SECONDS):
            raise RuntimeError("a published vector did not come")
        self._seen = self._fabric.peek(0)[1]
        return time.monotonic()


class Mail:
    """A message that is thrown away once it has been read."""

    def __init__(self, fabric: Channel, x: Tensor, spins: bool) -> None:
        self._fabric, self._x, self._spins = fabric, x, spins

    def send(self) -> float:
        start = time.monotonic()
        self._fabric.send(1, "x", self._x)
        return start

    def read(self) -> float:
        message = None
        while message is None:
            message = self._fabric.receive("x") if self._spins else self._fabric.wait("x", _PATIENCE_SECONDS)
        return time.monotonic()


def _limits(x: Tensor) -> dict[str, Callable[[], float]]:
    """Seconds of a copy in memory, and of sealing (one thread, pieces as on a link)."""
    from murmurate.fabric.network.crypto import TAG_BYTES, AeadStream
    from murmurate.fabric.network.frames import PIECE_BYTES

    there = torch.zeros_like(x)
    whole = memoryview(bytearray(x.numpy().tobytes()))
    out = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))

    def copy() -> float:
        start = time.monotonic()
        there.copy_(x)
        return time.monotonic() - start

    def sealing(cipher: str) -> Callable[[], float]:
        seal = AeadStream(secrets.token_bytes(32), cipher=cipher)

        def run() -> float:
            start = time.monotonic()
            for place in range(0, len(whole), PIECE_BYTES):
                piece = whole[place : place + PIECE_BYTES]
                seal.seal_into(piece, out[: len(piece) + TAG_BYTES])
            return time.monotonic() - start

        return run

    return {"memcpy": copy} | {f"cipher_{name}": sealing(name.replace("_", "-")) for name in _CIPHERS}


def figures(sent: dict[str, list[float]], read: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Milliseconds and GB/s of each way; ratios of rates (1 is as fast), turn by turn."""
    seconds = {
        name: [b - a for a, b in zip(sent[name], read[name], strict=True)] if name in read else sent[name]
        for name in sent
    }
    rates = {name: _bytes(name, size) / median(of) / 1e9 for name, of in seconds.items()}
    ways = {
        name: {"milliseconds": spread([1e3 * s for s in of]), "gigabytes_per_second": rates[name]}
        for name, of in seconds.items()
    }
    pairs = {f"shared_memory_{kind}_over_memcpy": (f"shared_memory_{kind}", "memcpy") for kind in _KINDS}
    for name, settings in _LINKS.items():
        for kind in [f"{kind}{end}" for end in _ends(name) for kind in _KINDS] + ["mail_stream"]:
            label = f"{name}_{kind.removeprefix('mail_') if kind.endswith('stream') else kind}"
            pairs[f"{label}_over_gloo"] = f"{name}_{kind}", "gloo_stream" if "stream" in kind else "gloo"
            if kind in _KINDS and "cipher" in settings:
                pairs[f"{label}_over_cipher"] = f"{name}_{kind}", f"cipher_{_cipher(name)}"
    pairs |= {f"{name}_mean_over_gloo": (f"{name}_mean", "gloo_mean") for name in _MEANS}
    ratios = {
        label: median([b / a for a, b in zip(seconds[one], seconds[other], strict=True)])
        for label, (one, other) in pairs.items()
    }
    for name, settings in _LINKS.items():
        if "cipher" in settings:
            cipher = rates[f"cipher_{_cipher(name)}"]
            ratios[f"{name}_stream_over_cipher"] = rates[f"{name}_mail_stream"] / cipher
    return {"ratios": ratios, "ways": ways}


def _cipher(link: str) -> str:
    return link.split("_", 1)[1]


def _bytes(way: str, size: int) -> int:
    return size * _row(size // 10**6) if way.endswith("_stream") else size


_KINDS = ("register", "mail")


def worst(sizes: dict[str, Any]) -> dict[str, float]:
    """Of each ratio, the least over the sizes."""
    labels = next(iter(sizes.values()))["ratios"]
    return {label: min(of["ratios"][label] for of in sizes.values()) for label in labels}
