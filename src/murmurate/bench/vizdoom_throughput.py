"""Env steps per CPU second on ViZDoom's MyWayHome, everything counted, against Sample Factory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from murmurate.bench import _commands, _peers
from murmurate.bench._racer import (
    Racer,
    ThroughputPlan,
    Windows,
    plain_windows,
    race,
    rates_by_cpu,
    rates_by_wall,
)
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.errors import MissingExtra

NAME = "vizdoom-throughput"
SUMMARY = "env steps per CPU second on ViZDoom's MyWayHome against Sample Factory"
QUICK = ThroughputPlan(window_cpu_seconds=8.0, warm_up_cpu_seconds=8.0)
FULL = ThroughputPlan(rounds=10, window_cpu_seconds=16.0, warm_up_cpu_seconds=8.0)

_SIMULATORS = "16"
_PEER = "sample-factory"
_MODES = ("async", "serial")
_OURS: dict[str, tuple[str, ...]] = {
    "a2c": ("doom-my-way-home-a2c",),
    "a2c float32": ("doom-my-way-home-a2c", "--agent.precision", "float32"),
    "impala": ("doom-my-way-home-impala",),
    "impala float32": ("doom-my-way-home-impala", "--agent.precision", "float32"),
}


def measure(plan: ThroughputPlan, log: Log) -> dict[str, Any]:
    """``benchmarks/README.md`` says what is counted. Takes about 7 minutes on two cores."""
    if _commands.missing("vizdoom", "doom"):
        raise MissingExtra("vizdoom", "doom", NAME)
    return figures(race(_racers, plan, log))


def _racers(where: Path) -> dict[str, Racer]:
    racers = {
        label: _commands.murmurate_train(
            label.replace(" ", "-"),
            words[0],
            where,
            *("--simulators", _SIMULATORS, "--agent.torso", "nature2013", *words[1:]),
        )
        for label, words in _OURS.items()
    }
    if _peers.absent(_PEER) is None:
        for mode in _MODES:
            command = [*_peers.command(_PEER, "doom.py"), mode, _SIMULATORS]
            racers[mode] = _commands.appending(f"sample-factory-{mode}", command, where)
    return racers


def figures(windows: Windows) -> dict[str, Any]:
    """The headline figures are those of A2C with its recipe's settings and of Sample Factory's faster
    mode."""
    by_cpu = rates_by_cpu(windows)
    by_wall = rates_by_wall(windows)
    modes = [mode for mode in _MODES if mode in windows]
    peer = max(modes, key=lambda mode: median(by_cpu[mode]), default=None)
    peer_by_wall = max(modes, key=lambda mode: median(by_wall[mode]), default=None)
    rows: dict[str, Any] = {}
    for label in _OURS:
        rows[label] = {
            "env_steps_per_cpu_second": spread(by_cpu[label]),
            "env_steps_per_second": spread(by_wall[label]),
        }
        if peer is not None and peer_by_wall is not None:
            rows[label]["ratio_sample_factory"] = spread(ratios(by_cpu[label], by_cpu[peer]))
            rows[label]["ratio_sample_factory_wall"] = spread(ratios(by_wall[label], by_wall[peer_by_wall]))
    entry: dict[str, Any] = {"peer": _PEER, "status": _peers.absent(_PEER) or "ran"}
    for mode in modes:
        entry[mode] = {
            "env_steps_per_cpu_second": spread(by_cpu[mode]),
            "env_steps_per_second": spread(by_wall[mode]),
        }
    return {
        "world": "doom-my-way-home: 84 x 84 RGB, 4 stacked, 8 actions; 16 simulators a learner, "
        "Nature-2013 net, one torch thread a process",
        "env_steps_per_cpu_second": median(by_cpu["a2c"]),
        "ratio_sample_factory": rows["a2c"]["ratio_sample_factory"]["median"] if peer else None,
        "sample_factory_mode": peer,
        "by_agent": rows,
        "peers": [entry],
        "windows": plain_windows(windows),
    }
