"""Env steps per CPU second on Pong, everything counted, against Stable-Baselines3 and the physical limit."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from murmurate.agents.a2c import A2C
from murmurate.bench import _commands, _gpu, _limit, _peers
from murmurate.bench._racer import Racer, RaceWindow, ThroughputPlan, plain_windows, rates_by_cpu, started
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.bench._server import Server
from murmurate.errors import MissingExtra
from murmurate.ranges import PositiveInt
from murmurate.recipes import recipe
from murmurate.training.preflight import resolved

NAME = "atari-throughput"
SUMMARY = "env steps per CPU second on Pong against Stable-Baselines3's A2C and the physical limit"

_PRECISIONS = ("float32", "bfloat16")
Windows = dict[str, list[RaceWindow]]
Limits = dict[str, dict[str, list[float]]]  # network -> part -> seconds of a call, by window


@dataclasses.dataclass(frozen=True)
class AtariThroughputPlan(ThroughputPlan):
    """A window of GALA's two learners has twice as many CPU seconds.

    side_rounds: number of rounds that include the racers that are not compared with the peer (GALA learners,
    double buffering). limit_windows_a_round: number of windows in a round in which the physical limit is
    measured. full: whether the peers with virtual environments of their own run.
    """

    side_rounds: PositiveInt = 3
    limit_windows_a_round: PositiveInt = 3
    full: bool = False


QUICK = AtariThroughputPlan()
FULL = AtariThroughputPlan(rounds=10, window_cpu_seconds=8.0, side_rounds=6, full=True)


def measure(plan: AtariThroughputPlan, log: Log) -> dict[str, Any]:
    """``benchmarks/README.md`` says what is counted. Takes about 4 minutes on two cores. Raises MissingExtra
    without ale-py."""
    if _commands.missing("ale-py", "atari"):
        raise MissingExtra("ale-py", "atari", NAME)
    precision = cast(A2C, resolved(recipe("pong-a2c")).learner).precision
    with started(functools.partial(_racers, precision), plan, log) as racers:
        windows, limits = _race(racers, plan, log)
    result = {
        "world": "pong, 16 simulators a learner, Nature-2013 net, one torch thread a process",
        "precision": precision,
        **main_figures(windows, limits, precision),
        **side_figures(windows, precision),
        "peers": [*_peers.entries(plan.full, log), sb3_entry(windows)],
        "windows": plain_windows(windows),
    }
    if torch.cuda.is_available():
        result["gpu"] = _gpu.measure(log)
    return result


def _racers(precision: str, where: Path) -> dict[str, Racer]:
    """precision: the precision that the recipe has on this machine."""
    options: dict[str, tuple[str, ...]] = {
        **{p: ("pong-a2c", "--agent.precision", p) for p in _PRECISIONS},
        "gossip": ("pong-gala", "--replicas", "2", "--agent.precision", precision),
        "buffered": ("pong-a2c", "--double-buffer", "True", "--agent.precision", precision),
    }
    racers = {
        label: _commands.murmurate_train(label, words[0], where, *words[1:])
        for label, words in options.items()
    }
    if _commands.missing("stable-baselines3") is None:
        racers["sb3"] = _commands.sb3("sb3", "pong", _limit.SIMULATORS, where)
    return racers


def _race(racers: Mapping[str, Racer], plan: AtariThroughputPlan, log: Log) -> tuple[Windows, Limits]:
    windows: Windows = defaultdict(list)
    limits: Limits = defaultdict(lambda: defaultdict(list))
    with Server.run([sys.executable, "-m", "murmurate.bench._limit"], pinned=False) as limit_server:
        for number in range(plan.rounds):
            for label in ("float32", "sb3", "bfloat16", "gossip", "buffered"):
                if label not in racers or (label in ("gossip", "buffered") and number >= plan.side_rounds):
                    continue
                cores = 2 if label == "gossip" else 1
                window = racers[label].window(plan.window_cpu_seconds * cores)
                windows[label].append(window)
                log(f"round {number + 1}: {label} {window.per_cpu_second:,.0f} env steps per CPU second")
            for _ in range(plan.limit_windows_a_round):
                for net, parts in limit_server.ask({}).items():
                    for part, seconds in parts.items():
                        limits[net][part].append(seconds)
    return windows, limits


def main_figures(windows: Windows, limits: Limits, precision: str) -> dict[str, Any]:
    """Our rates in both precisions, the limits, and the ratios."""
    rates = rates_by_cpu(windows)
    fastest = {net: {part: min(s) for part, s in parts.items()} for net, parts in limits.items()}
    simulator_seconds = fastest["games"]["simulator"]
    bounds = {net: _limit.limit(parts, simulator_seconds) for net, parts in fastest.items() if net != "games"}
    ours = median(rates[precision])
    figures: dict[str, Any] = {
        "env_steps_per_cpu_second": ours,
        "ratio_sb3_a2c": None,
        "ratio_limit_float32": ours / bounds["float32"][0],
        "ratio_limit_bfloat16": ours / bounds["bfloat16"][0],
        "sb3_env_steps_per_cpu_second": None,
        "limit_float32": bounds["float32"][0],
        "limit_bfloat16": bounds["bfloat16"][0],
        "limit_own_net": {p: bounds[f"own {p}"][0] for p in _PRECISIONS},
        "limit_frames_widened": {p: bounds[f"widened {p}"][0] for p in _PRECISIONS},
        "limit_parts_seconds": {net: parts for net, (_, parts) in bounds.items()},
        "limit_windows": {
            net: {part: spread(s) for part, s in parts.items()} for net, parts in limits.items()
        },
        "by_precision": {
            p: {
                "env_steps_per_cpu_second": spread(rates[p]),
                "ratio_limit": median(rates[p]) / bounds[p][0],
                "ratio_limit_float32": median(rates[p]) / bounds["float32"][0],
            }
            for p in _PRECISIONS
        },
    }
    if "sb3" in rates:
        figures["sb3_env_steps_per_cpu_second"] = median(rates["sb3"])
        figures["ratio_sb3_a2c"] = median(ratios(rates[precision], rates["sb3"]))
        figures["spread_sb3"] = spread(rates["sb3"])
        for p in _PRECISIONS:
            figures["by_precision"][p]["ratio_sb3_a2c"] = spread(ratios(rates[p], rates["sb3"]))
    return figures


def side_figures(windows: Windows, precision: str) -> dict[str, Any]:
    """Two GALA learners against one, and double buffering on against off, in the same rounds."""
    gossip, buffered = windows["gossip"], windows["buffered"]
    alone = windows[precision][: len(gossip)]
    shares = ratios([w.per_cpu_second for w in gossip], [w.per_cpu_second for w in alone])
    return {
        "per_learner_share_with_2_gossiping": median(shares),
        "gossiping": {
            "share": spread(shares),
            "env_steps_per_cpu_second_per_learner": spread([g.per_cpu_second for g in gossip]),
            "env_steps_per_second_of_both": spread([g.per_second for g in gossip]),
        },
        "double_buffer": {
            "env_steps_per_second_on": spread([w.per_second for w in buffered]),
            "env_steps_per_second_off": spread([w.per_second for w in alone]),
            "env_steps_per_cpu_second_on": spread([w.per_cpu_second for w in buffered]),
        },
    }


def sb3_entry(windows: Windows) -> dict[str, Any]:
    absent = _commands.missing("stable-baselines3")
    if absent is not None:
        return absent
    rates = [w.per_cpu_second for w in windows["sb3"]]
    return {"peer": "stable-baselines3", "status": "ran", "env_steps_per_cpu_second": spread(rates)}
