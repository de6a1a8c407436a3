"""Env steps per CPU second on CartPole, everything counted, beside Stable-Baselines3's A2C."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from murmurate.bench import _commands
from murmurate.bench._racer import Racer, Window, stopped_at_the_end, windows_in_turn
from murmurate.bench._result import Log, median, spread

NAME = "cartpole-throughput"
SUMMARY = "env steps per CPU second on CartPole against Stable-Baselines3's A2C"

_SIMULATORS = (8, 16)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Interleaved rounds of one window for each racer."""

    rounds: int = 5
    window_cpu_seconds: float = 5.0


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """``cartpole-a2c`` as it is (16 simulators) and with 8, and the peer with as many."""
    plan = plan or (Plan(rounds=10, window_cpu_seconds=8.0) if full else Plan())
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder, racers(Path(folder)) as field:
        windows = windows_in_turn(field, plan.rounds, plan.window_cpu_seconds, log)
    return figures(windows) | {"plan": dataclasses.asdict(plan)}


def racers(where: Path) -> contextlib.AbstractContextManager[dict[str, Racer]]:
    field = {}
    for size in _SIMULATORS:
        label = f"ours-{size}"
        field[label] = _commands.ours(label, "cartpole-a2c", where, "--simulators", str(size))
        if _commands.missing("stable-baselines3") is None:
            field[f"sb3-{size}"] = _commands.sb3(f"sb3-{size}", "cartpole", size, where)
    return stopped_at_the_end(field)


def figures(windows: dict[str, list[Window]]) -> dict[str, Any]:
    """Headline figures are those of 16 simulators, the recipe's number."""
    rates = {label: [w.per_cpu_second for w in done] for label, done in windows.items()}
    absent = _commands.missing("stable-baselines3")
    by_size = {}
    for size in _SIMULATORS:
        row: dict[str, Any] = {"env_steps_per_cpu_second": spread(rates[f"ours-{size}"])}
        if absent is None:
            pairs = zip(rates[f"ours-{size}"], rates[f"sb3-{size}"], strict=True)
            row["sb3_env_steps_per_cpu_second"] = spread(rates[f"sb3-{size}"])
            row["ratio_sb3_a2c"] = spread([a / b for a, b in pairs])
        by_size[f"{size}_simulators"] = row
    headline = by_size["16_simulators"]
    return {
        "world": "cartpole, an MLP of 64 and 64 for policy and for value, one torch thread a process",
        "env_steps_per_cpu_second": median(rates["ours-16"]),
        "ratio_sb3_a2c": headline["ratio_sb3_a2c"]["median"] if absent is None else None,
        "by_simulators": by_size,
        "peers": [absent or {"peer": "stable-baselines3", "status": "ran"}],
    }
