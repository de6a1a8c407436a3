"""Env steps per CPU second on CartPole, everything counted, against Stable-Baselines3's A2C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from murmurate.bench import _commands
from murmurate.bench._racer import Racer, ThroughputPlan, Windows, race, rates_by_cpu
from murmurate.bench._result import Log, median, ratios, spread

NAME = "cartpole-throughput"
SUMMARY = "env steps per CPU second on CartPole against Stable-Baselines3's A2C"
QUICK, FULL = ThroughputPlan(), ThroughputPlan(rounds=10, window_cpu_seconds=8.0)

_SIMULATORS = (8, 16)


def measure(plan: ThroughputPlan, log: Log) -> dict[str, Any]:
    """``cartpole-a2c`` with its 8 simulators and with 16, and the peer with as many, in rollouts of as many
    steps."""
    return figures(race(_racers, plan, log))


def _racers(where: Path) -> dict[str, Racer]:
    racers = {}
    for size in _SIMULATORS:
        label = f"ours-{size}"
        racers[label] = _commands.murmurate_train(label, "cartpole-a2c", where, "--simulators", str(size))
        if _commands.missing("stable-baselines3") is None:
            racers[f"sb3-{size}"] = _commands.sb3(f"sb3-{size}", "cartpole", size, where)
    return racers


def figures(windows: Windows) -> dict[str, Any]:
    """Headline figures are those of 16 simulators."""
    rates = rates_by_cpu(windows)
    absent = _commands.missing("stable-baselines3")
    by_size = {}
    for size in _SIMULATORS:
        row: dict[str, Any] = {"env_steps_per_cpu_second": spread(rates[f"ours-{size}"])}
        if absent is None:
            row["sb3_env_steps_per_cpu_second"] = spread(rates[f"sb3-{size}"])
            row["ratio_sb3_a2c"] = spread(ratios(rates[f"ours-{size}"], rates[f"sb3-{size}"]))
        by_size[f"{size}_simulators"] = row
    headline = by_size["16_simulators"]
    return {
        "world": "cartpole, an MLP of 64 and 64 for policy and for value, one torch thread a process",
        "env_steps_per_cpu_second": median(rates["ours-16"]),
        "ratio_sb3_a2c": headline["ratio_sb3_a2c"]["median"] if absent is None else None,
        "by_simulators": by_size,
        "peers": [absent or {"peer": "stable-baselines3", "status": "ran"}],
    }
