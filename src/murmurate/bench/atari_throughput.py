"""Env steps per CPU second on Pong, everything counted, beside Stable-Baselines3 and the physical limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from murmurate.agents.a2c import A2C
from murmurate.bench import _commands, _gpu, _limit, _peers
from murmurate.bench._racer import Racer, Window, stopped_at_the_end
from murmurate.bench._result import Log, median, spread
from murmurate.errors import MissingExtra
from murmurate.recipes import recipe
from murmurate.training.session import resolved

NAME = "atari-throughput"
SUMMARY = "env steps per CPU second on Pong against Stable-Baselines3's A2C and the physical limit"

_PRECISIONS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long and how often: interleaved rounds of one window for each racer."""

    rounds: int = 5
    window_cpu_seconds: float = 5.0
    side_rounds: int = 3  # for what is not paired: gossiping learners, double buffering
    limit_windows_a_round: int = 3


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """See ``benchmarks/README.md`` for what is counted. Takes about 4 minutes of two cores."""
    plan = plan or (Plan(rounds=10, window_cpu_seconds=8.0, side_rounds=6) if full else Plan())
    precision = _own_precision()
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder, racers(Path(folder)) as field:
        for racer in field.values():
            log(f"starting {racer.label}")
            racer.start()
        windows, limits = race(field, plan, log)
    result = {
        "world": "pong, 16 simulators a learner, Nature-2013 net, one torch thread a process",
        "precision": precision,
        **_main_figures(windows, limits, precision),
        **_side_figures(windows, precision),
        "peers": _peers.entries(full, log) + _sb3_entry(windows),
        "windows": {label: [dataclasses.asdict(w) for w in done] for label, done in windows.items()},
        "plan": dataclasses.asdict(plan),
    }
    if torch.cuda.is_available():
        result["gpu"] = _gpu.measure(log)
    return result


def _own_precision() -> str:
    """What the recipe computes in on this machine."""
    return cast(A2C, resolved(recipe("pong-a2c")).learner).precision


def racers(where: Path) -> contextlib.AbstractContextManager[dict[str, Racer]]:
    """All racers of this bench, not yet started; whatever happens, none outlives the context."""
    own = _own_precision()
    field = {
        precision: _commands.ours(precision, "pong-a2c", where, "--agent.precision", precision)
        for precision in _PRECISIONS
    }
    field["gossip"] = _commands.ours(
        "gossip", "pong-gala", where, "--replicas", "2", "--agent.precision", own
    )
    field["buffered"] = _commands.ours(
        "buffered", "pong-a2c", where, "--double-buffer", "True", "--agent.precision", own
    )
    if _commands.missing("stable-baselines3") is None:
        field["sb3"] = _commands.sb3("sb3", "pong", _limit.SIMULATORS, where)
    return stopped_at_the_end(field)


def race(
    field: dict[str, Racer], plan: Plan, log: Log
) -> tuple[dict[str, list[Window]], dict[str, dict[str, list[float]]]]:
    """Windows by racer, and seconds a call by network and part, taken in turn round after round."""
    windows: dict[str, list[Window]] = defaultdict(list)
    limits: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with limit_process() as ask:
        for number in range(plan.rounds):
            for label in ("float32", "sb3", "bfloat16", "gossip", "buffered"):
                if label not in field or (label in ("gossip", "buffered") and number >= plan.side_rounds):
                    continue
                cores = 2 if label == "gossip" else 1
                done = field[label].window(plan.window_cpu_seconds * cores)
                windows[label].append(done)
                log(f"round {number + 1}: {label} {done.per_cpu_second:,.0f} env steps per CPU second")
            for _ in range(plan.limit_windows_a_round):
                for net, of in ask().items():
                    for part, seconds in of.items():
                        limits[net][part].append(seconds)
    return windows, limits


@contextlib.contextmanager
def limit_process() -> Iterator[Any]:
    """A process that measures one window of each part of the limit whenever it is asked."""
    try:
        import ale_py  # noqa: F401
    except ImportError as problem:
        raise MissingExtra("ale-py", "atari", "atari-throughput") from problem
    process = subprocess.Popen(
        [sys.executable, "-m", "murmurate.bench._limit"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("pipes were asked for")
    into, out = process.stdin, process.stdout
    while out.readline().strip() not in ("ready", ""):
        pass

    def ask() -> Any:
        into.write("\n")
        into.flush()
        return json.loads(out.readline())

    try:
        yield ask
    finally:
        process.kill()
        process.wait()


def _main_figures(
    windows: dict[str, list[Window]], limits: dict[str, dict[str, list[float]]], precision: str
) -> dict[str, Any]:
    """Ours in both precisions, the limits, and the ratios the bars are about."""
    rates = {label: [w.per_cpu_second for w in done] for label, done in windows.items()}
    fastest = {net: {part: min(s) for part, s in of.items()} for net, of in limits.items()}
    games = fastest["games"]["simulator"]
    bound = {net: _limit.limit(of, games) for net, of in fastest.items() if net != "games"}
    ours = median(rates[precision])
    figures: dict[str, Any] = {
        "env_steps_per_cpu_second": ours,
        "ratio_sb3_a2c": None,
        "ratio_limit_float32": ours / bound["float32"][0],
        "ratio_limit_bfloat16": ours / bound["bfloat16"][0],
        "sb3_env_steps_per_cpu_second": None,
        "limit_float32": bound["float32"][0],
        "limit_bfloat16": bound["bfloat16"][0],
        "limit_own_net": {p: bound[f"own {p}"][0] for p in _PRECISIONS},
        "limit_frames_widened": {p: bound[f"widened {p}"][0] for p in _PRECISIONS},
        "limit_parts_seconds": {net: parts for net, (_, parts) in bound.items()},
        "limit_windows": {net: {part: spread(s) for part, s in of.items()} for net, of in limits.items()},
        "by_precision": {
            p: {
                "env_steps_per_cpu_second": spread(rates[p]),
                "ratio_limit": median(rates[p]) / bound[p][0],
                "ratio_limit_float32": median(rates[p]) / bound["float32"][0],
            }
            for p in _PRECISIONS
        },
    }
    if "sb3" in rates:
        figures["sb3_env_steps_per_cpu_second"] = median(rates["sb3"])
        figures["ratio_sb3_a2c"] = median(_ratios(rates[precision], rates["sb3"]))
        figures["spread_sb3"] = spread(rates["sb3"])
        for p in _PRECISIONS:
            figures["by_precision"][p]["ratio_sb3_a2c"] = spread(_ratios(rates[p], rates["sb3"]))
    return figures


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Round by round, so that what slows both of a pair cancels."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _side_figures(windows: dict[str, list[Window]], precision: str) -> dict[str, Any]:
    """Two gossiping learners against one, and double buffering on against off, round by round."""
    alone, gossip, buffered = windows[precision], windows["gossip"], windows["buffered"]
    share = [g.per_cpu_second / a.per_cpu_second for g, a in zip(gossip, alone, strict=False)]
    return {
        "per_learner_share_with_2_gossiping": median(share),
        "gossiping": {
            "share": spread(share),
            "env_steps_per_cpu_second_per_learner": spread([g.per_cpu_second for g in gossip]),
            "env_steps_per_second_of_both": spread([g.per_second for g in gossip]),
        },
        "double_buffer": {
            "env_steps_per_second_on": spread([w.per_second for w in buffered]),
            "env_steps_per_second_off": spread([w.per_second for w in alone]),
            "env_steps_per_cpu_second_on": spread([w.per_cpu_second for w in buffered]),
        },
    }


def _sb3_entry(windows: dict[str, list[Window]]) -> list[dict[str, Any]]:
    absent = _commands.missing("stable-baselines3")
    if absent is not None:
        return [absent]
    rates = [w.per_cpu_second for w in windows["sb3"]]
    return [{"peer": "stable-baselines3", "status": "ran", "env_steps_per_cpu_second": spread(rates)}]
