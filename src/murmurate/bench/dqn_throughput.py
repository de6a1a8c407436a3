"""Env steps per CPU second of Q-learning on Pong, everything counted, beside Stable-Baselines3's DQN."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from murmurate.bench import _commands
from murmurate.bench._racer import Racer, Window, stopped_at_the_end, windows_in_turn
from murmurate.bench._result import Log, median, spread

NAME = "dqn-throughput"
SUMMARY = "env steps per CPU second of DQN on Pong against Stable-Baselines3's"

SIMULATORS = 8
# a smaller store and a shorter beginning than the recipe's, so that all are learning when the windows begin
_EQUAL = ("--simulators", str(SIMULATORS), "--replay.capacity", "20000", "--replay.learning-starts", "1000")
_PLAIN = ("--replay.alpha", "0", "--agent.selector", "target")  # uniform replay, Q-learning, as the peer's
_OURS = {
    "float32": ("--agent.precision", "float32"),
    "bfloat16": ("--agent.precision", "bfloat16"),
    "float32 ahead": ("--agent.precision", "float32", "--replay.ahead", "2"),
    "uniform float32": ("--agent.precision", "float32", *_PLAIN),
    "uniform bfloat16": ("--agent.precision", "bfloat16", *_PLAIN),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Interleaved rounds of one window for each racer."""

    rounds: int = 5
    window_cpu_seconds: float = 5.0


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """``pong-dqn`` (prioritized, double), and as plain as the peer's, each in both precisions; the same net,
    batches of 32, each transition drawn 8 times, 8 simulators; and the peer with one, as usual."""
    plan = plan or (Plan(rounds=10, window_cpu_seconds=8.0) if full else Plan())
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder, racers(Path(folder)) as field:
        windows = windows_in_turn(field, plan.rounds, plan.window_cpu_seconds, log, warm_up_cpu_seconds=10.0)
    return figures(windows) | {"plan": dataclasses.asdict(plan)}


def racers(where: Path) -> contextlib.AbstractContextManager[dict[str, Racer]]:
    field = {
        label: _commands.ours(label.replace(" ", "-"), "pong-dqn", where, *_EQUAL, *options)
        for label, options in _OURS.items()
    }
    if _commands.missing("stable-baselines3") is None:
        field["sb3"] = _commands.sb3("sb3", "pong-dqn", SIMULATORS, where)
        field["sb3 alone"] = _commands.sb3("sb3-alone", "pong-dqn", 1, where)
    return stopped_at_the_end(field)


def figures(windows: dict[str, list[Window]]) -> dict[str, Any]:
    """The headline is float32, as the peer computes in."""
    rates = {label: [w.per_cpu_second for w in done] for label, done in windows.items()}
    absent = _commands.missing("stable-baselines3")
    by_kind: dict[str, Any] = {}
    for label in _OURS:
        by_kind[label] = {"env_steps_per_cpu_second": spread(rates[label])}
        if "sb3" in rates:
            ratios = [a / b for a, b in zip(rates[label], rates["sb3"], strict=True)]
            by_kind[label]["ratio_sb3_dqn"] = spread(ratios)
            alone = [a / b for a, b in zip(rates[label], rates["sb3 alone"], strict=True)]
            by_kind[label]["ratio_sb3_dqn_1_simulator"] = spread(alone)
    return {
        "world": f"pong, {SIMULATORS} simulators, Nature-2013 net, batches of 32, 8 samples per insert",
        "env_steps_per_cpu_second": median(rates["float32"]),
        "ratio_sb3_dqn": by_kind["float32"]["ratio_sb3_dqn"]["median"] if "sb3" in rates else None,
        "sb3_env_steps_per_cpu_second": median(rates["sb3"]) if "sb3" in rates else None,
        "sb3_1_simulator_env_steps_per_cpu_second": median(rates["sb3 alone"]) if "sb3" in rates else None,
        "by_kind": by_kind,
        "peers": [absent or {"peer": "stable-baselines3", "status": "ran"}],
    }
