"""Prioritized replay beside torchrl, cpprb, Tianshou and flashbax, on one core; and how exact it is."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from murmurate import native
from murmurate.bench import _replay_own
from murmurate.bench._result import Log, median, spread
from murmurate.bench._server import Server, absent

NAME = "replay"
SUMMARY = "prioritized draws and updates beside torchrl, cpprb, Tianshou and flashbax; and how exact they are"

PEERS = ("torchrl", "cpprb", "tianshou", "flashbax")
_OURS = "murmurate"


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that all are asked for in turns."""

    task: str
    capacity: int
    batch: int
    cold: bool = False

    @property
    def label(self) -> str:
        return f"{self.task} n=2^{self.capacity.bit_length() - 1} b={self.batch}{' cold' * self.cold}"


_FRAMES = 2**14  # transitions of images: more would not change what a batch costs, but fill the memory
_SHORT = (
    *(
        Case(task, 2**20, 256)
        for task in ("sample", "sample_reused", "update", "find", "rows", "rows_reused")
    ),
    Case("insert", 2**20, 256),
    Case("atari", _FRAMES, 256),
    Case("atari_reused", _FRAMES, 256),
    Case("atari", _FRAMES, 32),
    Case("find_reused", 2**20, 256),
    Case("find_reused", 2**23, 256),
    Case("bound", 2**20, 1),
    Case("bound", 2**23, 1),
)
_WIDE = tuple(
    Case(task, 2**bits, batch)
    for bits in (14, 17, 20, 23)
    for batch in (32, 256, 2048, 16_384)
    for task in ("sample", "sample_reused", "update")
    if (bits, batch) != (20, 256)
)
_COLD = tuple(Case(task, 2**20, 256, cold=True) for task in ("sample", "sample_reused", "update"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """rounds: in each, everybody is asked once. draws, updates: of the checks of exactness."""

    cases: tuple[Case, ...] = _SHORT
    rounds: int = 5
    calls: int = 1500
    cold_calls: int = 30
    chi_square: tuple[tuple[int, int], ...] = ((2**20, 50_000_000),)
    drift: tuple[int, int] = (2**17, 2_000_000)


FULL = Plan(
    cases=(*_SHORT, *_WIDE, *_COLD),
    chi_square=((2**20, 50_000_000), (2**23, 200_000_000)),
    drift=(2**17, 100_000_000),
)


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """Seconds a call of each case by each library, and the ratios; see ``benchmarks/README.md``."""
    plan = plan or (FULL if full else Plan())
    with contextlib.ExitStack() as stack:
        field = {_OURS: stack.enter_context(Server.own("murmurate.bench._replay_own"))}
        peers = []
        for name in PEERS:
            if (missing := absent(name)) is not None:
                peers.append({"peer": name, "status": missing})
                continue
            log(f"starting {name}")
            field[name] = stack.enter_context(Server.peer(name))
            peers.append({"peer": name, "status": "ran", "version": field[name].version})
        seconds = {case: _race(field, case, plan, log) for case in plan.cases}
    return {
        "simd": native.simd,
        **_headline(seconds),
        "cases": [_entry(case, found) for case, found in seconds.items()],
        "exactness": _exactness(plan, log),
        "peers": peers,
        "plan": dataclasses.asdict(plan),
    }


def _race(field: dict[str, Server], case: Case, plan: Plan, log: Log) -> dict[str, list[float]]:
    """Seconds a call, by library, a round each."""
    found: dict[str, list[float]] = {}
    calls = plan.cold_calls if case.cold else plan.calls
    for _ in range(plan.rounds):
        for name, server in field.items():
            if (seconds := _ask(server, case, max(3, calls * 256 // max(case.batch, 256)))) is not None:
                found.setdefault(name, []).append(seconds)
    for server in field.values():
        server.say({"forget": True})  # it gives its memory back
    said = ", ".join(f"{name} {1e6 * median(values):,.2f}" for name, values in found.items())
    log(f"{case.label}, microseconds: {said}")
    return found


def _ask(server: Server, case: Case, calls: int) -> float | None:
    """Seconds a call; None if the library has no such thing."""
    request = {"task": case.task, "capacity": case.capacity, "batch": case.batch}
    answer = server.say({**request, "calls": calls, "cold": case.cold})
    return None if "missing" in answer else float(answer["seconds"])


def _entry(case: Case, found: dict[str, list[float]]) -> dict[str, Any]:
    """One row of the table: microseconds of each, and how many times ours the others take."""
    ours = found.get(_OURS)
    row: dict[str, Any] = {**dataclasses.asdict(case), "label": case.label}
    row["microseconds"] = {name: spread([1e6 * s for s in values]) for name, values in found.items()}
    if ours is not None:
        row["ratios"] = {name: _ratio(values, ours) for name, values in found.items() if name != _OURS}
    return row


def _ratio(theirs: list[float], ours: list[float]) -> float:
    """Round by round, so that what slows both of a pair cancels."""
    return median([a / b for a, b in zip(theirs, ours, strict=True)])


def _headline(seconds: dict[Case, dict[str, list[float]]]) -> dict[str, Any]:
    """The figures that the bars are about: 2^20 items, batches of 256, hot."""

    def ours(task: str, bits: int = 20, batch: int = 256) -> list[float] | None:
        return seconds.get(Case(task, 2**bits, batch), {}).get(_OURS)

    def microseconds(task: str, bits: int = 20) -> float | None:
        values = ours(task, bits)
        return None if values is None else 1e6 * median(values)

    def ratios(task: str, against: str, bits: int = 20, batch: int = 256) -> dict[str, float]:
        mine = ours(against, bits, batch)
        theirs = seconds.get(Case(task, 2**bits, batch), {})
        if mine is None:
            return {}
        return {name: _ratio(values, mine) for name, values in theirs.items() if name != _OURS}

    figures: dict[str, Any] = {
        "sample_us_new": microseconds("sample"),
        "sample_us_reused": microseconds("sample_reused"),
        "update_us": microseconds("update"),
    }
    for name, task, against in (
        ("", "sample", "sample"),
        ("_reused", "sample", "sample_reused"),
        ("_update", "update", "update"),
        ("_rows", "rows", "rows_reused"),
    ):
        found = ratios(task, against)
        nearest = min(found, key=lambda peer: found[peer]) if found else None
        figures[f"ratio{name}_torchrl"] = found.get("torchrl")
        figures[f"ratio{name}_fastest_peer"] = None if nearest is None else found[nearest]
        figures[f"fastest{name}_peer"] = nearest
    figures["ratios_rows"] = ratios("rows", "rows_reused")
    frames = _FRAMES.bit_length() - 1
    figures["ratios_atari"] = ratios("atari", "atari_reused", frames)
    for bits in (20, 23):
        found_us, bound = microseconds("find_reused", bits), ours("bound", bits, 1)
        figures[f"lookup_ns_n{bits}"] = None if found_us is None else 1e3 * found_us / 256
        if bound is not None and found_us is not None:
            limit = 1e9 * median(bound) / _replay_own.BOUND_LINES
            figures[f"bound_ns_n{bits}"] = limit
            figures[f"lookup_to_bound_n{bits}"] = 1e3 * found_us / 256 / limit
    return figures


def _exactness(plan: Plan, log: Log) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for capacity, draws in plan.chi_square:
        bits = capacity.bit_length() - 1
        log(f"chi-square of {draws:,} draws from 2^{bits}")
        found[f"chi_square_n{bits}"] = _replay_own.exactness(capacity, draws)
    capacity, updates = plan.drift
    log(f"distance from the exact chances after {updates:,} updates")
    found["total_variation_after_updates"] = _replay_own.drift(capacity, updates)
    return found
