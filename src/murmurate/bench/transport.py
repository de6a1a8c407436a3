"""How long each kind of transfer of a vector between two processes takes, compared with reference operations.

"register" publishes the latest value, "mail" is a point-to-point message, and "mean" an all-reduce mean.
Transfers in shared memory are compared with a copy in memory; transfers of the network fabric with gloo's
send and receive, encrypted ones also with the cipher alone, and means with gloo's all-reduce. Connections
called "loopback" pass vectors through shared memory of one host, unencrypted whatever their settings; those
called "tcp" send them, as between hosts. A reader in shared memory has a view of it, and copies nothing.
All transfers take turns in the same two processes, and each ratio compares measurements of the same turn,
except those of streams over ciphers, which compare medians.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from murmurate.bench import _roles
from murmurate.bench._commands import missing
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.errors import MissingExtra
from murmurate.fabric.interface import Channel, Fabric
from murmurate.fabric.network.fabric import NetworkFabric
from murmurate.ranges import PositiveInt

NAME = "transport"
SUMMARY = "time and bandwidth of register, mail and means, in shared memory and over TCP, at 1, 10 and 100 MB"

_CONNECTIONS: dict[str, dict[str, Any]] = {
    "loopback_plain": {"encrypt": False},
    "loopback_aes_256_gcm": {"cipher": "aes-256-gcm"},
    "tcp_plain": {"encrypt": False, "shared_memory": False},
    "tcp_aes_256_gcm": {"cipher": "aes-256-gcm", "shared_memory": False},
    "tcp_chacha20_poly1305": {"cipher": "chacha20-poly1305", "shared_memory": False},
}
_IN_MEMORY = ("shared_memory", "loopback_plain", "loopback_aes_256_gcm")
_WITH_MEAN = ("tcp_plain", "tcp_aes_256_gcm")
_ENCRYPTED = ("tcp_aes_256_gcm", "tcp_chacha20_poly1305")
_CIPHERS = ("aes_256_gcm", "chacha20_poly1305")
_KINDS = ("register", "mail")
_DEADLINE_SECONDS = 60.0
_STREAM_MEGABYTES = 200  # megabytes that are sent in a row to measure the bandwidth
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class TransportPlan:
    """sizes: (megabytes, repetitions, repetitions of the bandwidth test)."""

    sizes: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...] = ((1, 60, 7), (10, 30, 7), (100, 9, 5))


QUICK, FULL = TransportPlan(), TransportPlan(((1, 300, 25), (10, 150, 25), (100, 41, 15)))


def measure(plan: TransportPlan, log: Log) -> dict[str, Any]:
    """Times of messages, means and streams (messages sent in a row); medians and ratios of rates.

    The time of a message is from before ``publish`` or ``send`` to after the reader has the vector; the time
    of a mean is from rank 0's call to rank 1's result.
    """
    if missing("cryptography", "network"):
        raise MissingExtra("cryptography", "network", "The bench 'transport'")
    result: dict[str, Any] = {}
    for megabytes, repetitions, streams in plan.sizes:
        log(f"{megabytes} MB, {repetitions} repetitions, {streams} streams")
        with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
            sent, read = _roles.run_together(
                2, work, folder, secrets.token_bytes(32), megabytes, repetitions, streams
            )
        result[f"{megabytes}_MB"] = figures(sent, read, megabytes * 10**6)
    return {"sizes": result, "worst": worst(result)}


def work(fabric: Fabric, folder: str, secret: bytes, megabytes: int, repetitions: int, streams: int) -> Times:
    """What one member measures: when each vector left (rank 0) or was read (rank 1); and the durations of the
    baselines."""
    _roles.join_gloo(fabric, os.path.join(folder, "gloo"), 2)
    x = torch.randn(megabytes * 250_000, generator=torch.Generator().manual_seed(0))
    networks = {name: _network(fabric.rank, name, folder, secret) for name in _CONNECTIONS}
    transfers = {"gloo": _gloo(x)}
    fabrics_by_name: dict[str, Fabric] = {"shared_memory": fabric, **networks}
    for name, member in fabrics_by_name.items():
        for suffix in _suffixes(name):
            spins = name in _IN_MEMORY and suffix == ""
            transfers[f"{name}_register{suffix}"] = _register(member.channel(f"r{suffix}", x), x, spins)
            transfers[f"{name}_mail{suffix}"] = _mail(member.channel(f"m{suffix}", x), x, spins)
    total = torch.zeros_like(x)
    transfers["gloo_mean"] = Transfer(lambda: dist.all_reduce(total), lambda: dist.all_reduce(total))
    for name in _WITH_MEAN:
        transfers[f"{name}_mean"] = _mean(networks[name].channel("mean", x), x)
    baselines = _baselines(x)
    ready = fabric.channel("ready", torch.zeros(1))
    times: Times = defaultdict(list)

    def transfer_time(name: str) -> float:
        """The time at which rank 0 began to send, or rank 1 had read."""
        if fabric.rank == 0:
            start = time.monotonic()
            transfers[name].send()
            return start
        transfers[name].read()
        return time.monotonic()

    for turn in range(-3, repetitions):  # negative turns warm up
        for name in transfers if turn % 2 else reversed(transfers):
            wait_for_reader(ready)
            measured = transfer_time(name)
            if turn >= 0:
                times[name].append(measured)
        for name, baseline in baselines.items():
            dist.barrier()
            if fabric.rank == 0 and turn >= 0:
                start = time.monotonic()
                baseline()
                times[name].append(time.monotonic() - start)
    streamed = [name for name in transfers if name == "gloo" or "_mail" in name]
    for turn in range(-1, streams):
        for name in streamed if turn % 2 else reversed(streamed):
            wait_for_reader(ready)
            stream_times = [transfer_time(name) for _ in range(_messages(megabytes))]
            if turn >= 0:  # from the start of the first message to the end of the last
                times[f"{name}_stream"].append(stream_times[0 if fabric.rank == 0 else -1])
    dist.barrier()
    for network in networks.values():
        network.close()
    return dict(times)


def wait_for_reader(ready: Channel) -> None:
    """Rank 0 returns once rank 1 is about to read, so that no late wake-up from a barrier is measured."""
    version = ready.publish(torch.zeros(1))
    if ready.rank == 0:  # sleeps rather than spins: another thread may still be sending the previous message
        ready.wait_newer([1], [version - 1], _DEADLINE_SECONDS)


def _suffixes(name: str) -> tuple[str, ...]:
    """In-memory transfers are measured twice: with a reader that polls without pause and, as ``_waiting``,
    with one that blocks."""
    return ("", "_waiting") if name in _IN_MEMORY else ("",)


def _messages(megabytes: int) -> int:
    """The number of messages of a stream."""
    return max(_STREAM_MEGABYTES // megabytes, 2)


def _network(rank: int, name: str, folder: str, secret: bytes) -> NetworkFabric:
    store = dist.FileStore(os.path.join(folder, name), 2)  # type: ignore[attr-defined]
    return NetworkFabric(rank, 2, store, run_id=name, secret=secret, **_CONNECTIONS[name])


class Transfer(NamedTuple):
    """What rank 0 does to send a vector, and rank 1 to read it."""

    send: Callable[[], Any]
    read: Callable[[], Any]


def _gloo(x: Tensor) -> Transfer:
    received = torch.zeros_like(x)
    return Transfer(lambda: dist.send(x, 1), lambda: dist.recv(received, 0))


def _mean(channel: Channel, x: Tensor) -> Transfer:
    vector = x.clone()
    return Transfer(lambda: channel.mean_(vector), lambda: channel.mean_(vector))


def _register(channel: Channel, x: Tensor, spins: bool) -> Transfer:
    """spins: poll without a pause, because a waiting reader sleeps for longer than the copy takes."""
    seen = 0

    def read() -> None:
        nonlocal seen
        if spins:
            while channel.version(0) <= seen:
                pass
        elif not channel.wait_newer([0], [seen], _DEADLINE_SECONDS):
            raise RuntimeError("a published vector did not arrive")
        seen = channel.peek(0)[1]

    return Transfer(lambda: channel.publish(x), read)


def _mail(channel: Channel, x: Tensor, spins: bool) -> Transfer:
    def read() -> None:
        while (channel.receive("x") if spins else channel.wait("x", _DEADLINE_SECONDS)) is None:
            pass

    return Transfer(lambda: channel.send(1, "x", x), read)


def _baselines(x: Tensor) -> dict[str, Callable[[], Any]]:
    """Reference operations: a copy in memory, and encryption by each cipher (one thread, in the pieces of a
    connection)."""
    from murmurate.fabric.network.crypto import TAG_BYTES, AeadStream
    from murmurate.fabric.network.frames import PIECE_BYTES

    target = torch.zeros_like(x)
    plaintext = memoryview(bytearray(x.numpy().tobytes()))
    out = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))

    def encryption(cipher: str) -> Callable[[], None]:
        stream = AeadStream(secrets.token_bytes(32), cipher=cipher)

        def run() -> None:
            for start in range(0, len(plaintext), PIECE_BYTES):
                piece = plaintext[start : start + PIECE_BYTES]
                stream.seal_into(piece, out[: len(piece) + TAG_BYTES])

        return run

    ciphers = {f"cipher_{name}": encryption(name.replace("_", "-")) for name in _CIPHERS}
    return {"memcpy": lambda: target.copy_(x), **ciphers}


def figures(sent: Times, read: Times, size: int) -> dict[str, Any]:
    """Milliseconds and GB/s of each transfer; ratios of rates (1 is as fast), see the module.

    sent: start times of transfers, and durations of baselines. read: end times of transfers.
    """
    seconds = {
        name: [end - start for start, end in zip(times, read[name], strict=True)] if name in read else times
        for name, times in sent.items()
    }
    rates = {name: _bytes(name, size) / median(durations) / 1e9 for name, durations in seconds.items()}
    statistics = {
        name: {"milliseconds": spread([1e3 * s for s in durations]), "gigabytes_per_second": rates[name]}
        for name, durations in seconds.items()
    }
    pairs = {f"shared_memory_{kind}_over_memcpy": (f"shared_memory_{kind}", "memcpy") for kind in _KINDS}
    for name in _CONNECTIONS:
        kinds = [f"{kind}{suffix}" for suffix in _suffixes(name) for kind in _KINDS]
        pairs |= {f"{name}_{kind}_over_gloo": (f"{name}_{kind}", "gloo") for kind in kinds}
        pairs[f"{name}_stream_over_gloo"] = f"{name}_mail_stream", "gloo_stream"
    for name in _ENCRYPTED:
        pairs |= {f"{name}_{kind}_over_cipher": (f"{name}_{kind}", _cipher(name)) for kind in _KINDS}
    pairs |= {f"{name}_mean_over_gloo": (f"{name}_mean", "gloo_mean") for name in _WITH_MEAN}
    compared = {
        label: median(ratios(seconds[denominator], seconds[numerator]))
        for label, (numerator, denominator) in pairs.items()
    }
    for name in _ENCRYPTED:
        compared[f"{name}_stream_over_cipher"] = rates[f"{name}_mail_stream"] / rates[_cipher(name)]
    return {"ratios": compared, "ways": statistics}


def _cipher(connection: str) -> str:
    return f"cipher_{connection.split('_', 1)[1]}"


def _bytes(transfer: str, size: int) -> int:
    return size * _messages(size // 10**6) if transfer.endswith("_stream") else size


def worst(sizes: dict[str, Any]) -> dict[str, float]:
    """The least of each ratio over the sizes."""
    labels = next(iter(sizes.values()))["ratios"]
    return {label: min(result["ratios"][label] for result in sizes.values()) for label in labels}
