"""Prioritized replay against torchrl, cpprb, Tianshou and flashbax, on one core; and how exact ours is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from murmurate import native
from murmurate.bench import _replay_server
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.bench._server import Server, start_servers
from murmurate.errors import RunFailed
from murmurate.ranges import PositiveInt

NAME = "replay"
SUMMARY = "prioritized draws and updates against torchrl, cpprb, Tianshou and flashbax; and their exactness"

PEERS = ("torchrl", "cpprb", "tianshou", "flashbax")
_OURS = "murmurate"


@dataclasses.dataclass(frozen=True)
class ReplayCase:
    """One task of the protocol (see ``_peer_protocols/replay_windows.py``) at one size."""

    task: str
    capacity: int
    batch: int
    cold: bool = False

    @property
    def label(self) -> str:
        return f"{self.task} n=2^{self.capacity.bit_length() - 1} b={self.batch}{' cold' * self.cold}"


Times = dict[str, list[float]]  # library -> seconds of a call, by round

_FRAMES = 2**14  # transitions of images: the cost of a batch does not depend on it, and they fit into memory
_SHORT = (
    *(
        ReplayCase(task, 2**20, 256)
        for task in ("sample", "sample_reused", "update", "find", "rows", "rows_reused", "insert")
    ),
    ReplayCase("atari", _FRAMES, 256),
    ReplayCase("atari_reused", _FRAMES, 256),
    ReplayCase("atari", _FRAMES, 32),
    ReplayCase("find_reused", 2**20, 256),
    ReplayCase("find_reused", 2**23, 256),
    ReplayCase("bound", 2**20, 1),
    ReplayCase("bound", 2**23, 1),
)
_WIDE = tuple(
    ReplayCase(task, 2**bits, batch)
    for bits in (14, 17, 20, 23)
    for batch in (32, 256, 2048, 16_384)
    for task in ("sample", "sample_reused", "update")
    if (bits, batch) != (20, 256)
)
_COLD = tuple(ReplayCase(task, 2**20, 256, cold=True) for task in ("sample", "sample_reused", "update"))


@dataclasses.dataclass(frozen=True)
class ReplayPlan:
    """rounds: number of measurements of each case. chi_square: capacity and number of draws of each
    chi-square test of the draws. drift: capacity and number of updates after which probabilities are compared
    with exact ones.

    calls: number of calls that are timed in a measurement; fewer for batches of more than 256. cold_calls:
    number of calls that are timed with the tree outside the caches.
    """

    cases: tuple[ReplayCase, ...] = _SHORT
    rounds: PositiveInt = 5
    calls: PositiveInt = 1500
    cold_calls: PositiveInt = 30
    chi_square: tuple[tuple[PositiveInt, PositiveInt], ...] = ((2**20, 50_000_000),)
    drift: tuple[PositiveInt, PositiveInt] = (2**17, 2_000_000)


QUICK = ReplayPlan()
FULL = ReplayPlan(
    cases=(*_SHORT, *_WIDE, *_COLD),
    chi_square=((2**20, 50_000_000), (2**23, 200_000_000)),
    drift=(2**17, 100_000_000),
)


def measure(plan: ReplayPlan, log: Log) -> dict[str, Any]:
    """Microseconds of a call of each case by each library, and the ratios; see ``benchmarks/README.md``."""
    with contextlib.ExitStack() as stack:
        servers, peers = start_servers(stack, "murmurate.bench._replay_server", PEERS, log)
        times = {case: _race(servers, case, plan, log) for case in plan.cases}
    return {
        "simd": native.simd,
        **_headline(times),
        "cases": [_entry(case, by_library) for case, by_library in times.items()],
        "exactness": _exactness(plan, log),
        "peers": peers,
    }


def _race(servers: Mapping[str, Server], case: ReplayCase, plan: ReplayPlan, log: Log) -> Times:
    """The times of all libraries that have the task, without those of a peer that fails. Raises RunFailed if
    ours does."""
    times: Times = {}
    failures: dict[str, str] = {}
    calls = max(3, (plan.cold_calls if case.cold else plan.calls) * 256 // max(case.batch, 256))
    request = {**dataclasses.asdict(case), "calls": calls}
    for number in range(plan.rounds):
        # every second round backwards, so that a drift of the machine's speed favours none
        for name, server in list(servers.items())[:: -1 if number % 2 else 1]:
            answer = server.ask(request)
            if "seconds" in answer:
                times.setdefault(name, []).append(float(answer["seconds"]))
            elif "failed" in answer:
                failures[name] = answer["failed"]
    for server in servers.values():
        server.ask({"forget": True})  # frees the memory of this case
    for name, failure in failures.items():
        if name == _OURS:
            raise RunFailed(f"{case.label}: {failure}")
        log(f"{case.label}: left out: {failure}")
        times.pop(name, None)
    medians = ", ".join(f"{name} {1e6 * median(seconds):,.2f}" for name, seconds in times.items())
    log(f"{case.label}, microseconds: {medians}")
    return times


def _entry(case: ReplayCase, times: Times) -> dict[str, Any]:
    """Microseconds of each library, and how many times as long as ours the other libraries take."""
    row: dict[str, Any] = {**dataclasses.asdict(case), "label": case.label}
    row["microseconds"] = {name: spread([1e6 * s for s in seconds]) for name, seconds in times.items()}
    if _OURS in times:
        row["ratios"] = _peer_ratios(times, times[_OURS])
    return row


def _peer_ratios(times: Times, ours: list[float]) -> dict[str, float]:
    return {name: median(ratios(seconds, ours)) for name, seconds in times.items() if name != _OURS}


def _headline(times: dict[ReplayCase, Times]) -> dict[str, Any]:
    """The main figures: 2^20 items, batches of 256, hot."""

    def ours(task: str, bits: int = 20, batch: int = 256) -> list[float] | None:
        return times.get(ReplayCase(task, 2**bits, batch), {}).get(_OURS)

    def microseconds(task: str, bits: int = 20) -> float | None:
        seconds = ours(task, bits)
        return None if seconds is None else 1e6 * median(seconds)

    def peers_to(task: str, our_task: str, bits: int = 20) -> dict[str, float]:
        """Ratios of the peers' time for ``task`` to ours for ``our_task``."""
        our_times, all_times = ours(our_task, bits), times.get(ReplayCase(task, 2**bits, 256), {})
        return {} if our_times is None else _peer_ratios(all_times, our_times)

    figures: dict[str, Any] = {
        "sample_us_new": microseconds("sample"),
        "sample_us_reused": microseconds("sample_reused"),
        "update_us": microseconds("update"),
    }
    for name, task, our_task in (
        ("", "sample", "sample"),
        ("_reused", "sample", "sample_reused"),
        ("_update", "update", "update"),
        ("_rows", "rows", "rows"),
        ("_rows_reused", "rows", "rows_reused"),
    ):
        peers = peers_to(task, our_task)
        fastest = min(peers, key=lambda peer: peers[peer]) if peers else None
        figures[f"ratio{name}_torchrl"] = peers.get("torchrl")
        figures[f"ratio{name}_fastest_peer"] = None if fastest is None else peers[fastest]
        figures[f"fastest{name}_peer"] = fastest
    for suffix in ("", "_reused"):  # reused: our batches are written into the same memory again
        figures[f"ratios_rows{suffix}"] = peers_to("rows", f"rows{suffix}")
        figures[f"ratios_atari{suffix}"] = peers_to("atari", f"atari{suffix}", _FRAMES.bit_length() - 1)
    for bits in (20, 23):
        find, bound = microseconds("find_reused", bits), ours("bound", bits, 1)
        figures[f"lookup_ns_n{bits}"] = None if find is None else 1e3 * find / 256
        if bound is not None and find is not None:
            limit = 1e9 * median(bound) / _replay_server.BOUND_SEARCHES
            figures[f"bound_ns_n{bits}"] = limit
            figures[f"lookup_to_bound_n{bits}"] = 1e3 * find / 256 / limit
    return figures


def _exactness(plan: ReplayPlan, log: Log) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for capacity, draws in plan.chi_square:
        bits = capacity.bit_length() - 1
        log(f"chi-square of {draws:,} draws from 2^{bits}")
        figures[f"chi_square_n{bits}"] = _replay_server.exactness(capacity, draws)
    capacity, updates = plan.drift
    log(f"distance from the exact probabilities after {updates:,} updates")
    figures["total_variation_after_updates"] = _replay_server.drift(capacity, updates)
    return figures
