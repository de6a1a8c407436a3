"""Env steps per CPU second of Q-learning on Pong, everything counted, against Stable-Baselines3's DQN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from murmurate.bench import _commands
from murmurate.bench._racer import Racer, ThroughputPlan, Windows, race, rates_by_cpu
from murmurate.bench._result import Log, median, ratios, spread

NAME = "dqn-throughput"
SUMMARY = "env steps per CPU second of DQN on Pong against Stable-Baselines3's"
QUICK = ThroughputPlan(warm_up_cpu_seconds=10.0)
FULL = ThroughputPlan(rounds=10, window_cpu_seconds=8.0, warm_up_cpu_seconds=10.0)

SIMULATORS = 8
# a smaller replay and an earlier start than the recipe's, so that all are learning when the windows begin
_COMMON = ("--simulators", str(SIMULATORS), "--replay.capacity", "20000", "--replay.learning-starts", "1000")
# uniform replay, Q-learning and returns of one step, as SB3 has
_PLAIN = ("--replay.alpha", "0", "--agent.selector", "target", "--agent.n-step", "1")
_OURS = {
    "float32": ("--agent.precision", "float32"),
    "bfloat16": ("--agent.precision", "bfloat16"),
    "float32 ahead": ("--agent.precision", "float32", "--replay.ahead", "2"),
    "uniform float32": ("--agent.precision", "float32", *_PLAIN),
    "uniform bfloat16": ("--agent.precision", "bfloat16", *_PLAIN),
}


def measure(plan: ThroughputPlan, log: Log) -> dict[str, Any]:
    """``pong-dqn`` (double DQN with prioritized replay) and a plain DQN like the peer's, each in both
    precisions.

    All racers have the same net, 8 simulators and batches of 32, and draw each transition 8 times; the peer
    also runs with one simulator, as is usual.
    """
    return figures(race(_racers, plan, log))


def _racers(where: Path) -> dict[str, Racer]:
    racers = {
        label: _commands.murmurate_train(label.replace(" ", "-"), "pong-dqn", where, *_COMMON, *options)
        for label, options in _OURS.items()
    }
    if _commands.missing("stable-baselines3") is None:
        racers["sb3"] = _commands.sb3("sb3", "pong-dqn", SIMULATORS, where)
        racers["sb3 alone"] = _commands.sb3("sb3-alone", "pong-dqn", 1, where)
    return racers


def figures(windows: Windows) -> dict[str, Any]:
    """Headline figures are those of float32, the peer's precision."""
    rates = rates_by_cpu(windows)
    absent = _commands.missing("stable-baselines3")
    by_kind: dict[str, Any] = {}
    for label in _OURS:
        by_kind[label] = {"env_steps_per_cpu_second": spread(rates[label])}
        if "sb3" in rates:
            by_kind[label]["ratio_sb3_dqn"] = spread(ratios(rates[label], rates["sb3"]))
            by_kind[label]["ratio_sb3_dqn_1_simulator"] = spread(ratios(rates[label], rates["sb3 alone"]))
    return {
        "world": f"pong, {SIMULATORS} simulators, Nature-2013 net, batches of 32, 8 samples per insert",
        "env_steps_per_cpu_second": median(rates["float32"]),
        "ratio_sb3_dqn": by_kind["float32"]["ratio_sb3_dqn"]["median"] if "sb3" in rates else None,
        "sb3_env_steps_per_cpu_second": median(rates["sb3"]) if "sb3" in rates else None,
        "sb3_1_simulator_env_steps_per_cpu_second": median(rates["sb3 alone"]) if "sb3" in rates else None,
        "by_kind": by_kind,
        "peers": [absent or {"peer": "stable-baselines3", "status": "ran"}],
    }
