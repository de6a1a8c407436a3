"""Updates per CPU second of TD3 and SAC on HalfCheetah, in whole training runs: ours, those of peers, and
an update's matrix products alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from murmurate.bench import _commands, _peers
from murmurate.bench._racer import Racer, ThroughputPlan, Windows, race, rates_by_cpu
from murmurate.bench._result import Log, median, ratios, spread

NAME = "control-throughput"
SUMMARY = "updates per CPU second of TD3 and SAC on HalfCheetah, against SB3, other peers and matrix products"

ALGORITHMS = ("td3", "sac")
PEERS = ("cleanrl", "tianshou", "sbx")
_SCRIPT = "control.py"
# a smaller replay and an earlier start than the recipes', so that all are learning when the windows begin
_EARLY = ("--replay.capacity", "200000", "--replay.learning-starts", "1000", "--random-env-steps", "1000")

QUICK = ThroughputPlan(window_cpu_seconds=6.0, warm_up_cpu_seconds=20.0)
FULL = ThroughputPlan(rounds=11, window_cpu_seconds=20.0, warm_up_cpu_seconds=20.0)


def measure(plan: ThroughputPlan, log: Log) -> dict[str, Any]:
    """All racers have two layers of 256 units, batches of 256, one simulator, one update for each env step,
    and one torch thread. ``limit`` makes only the matrix products of an update (``_control_limit``)."""
    return figures(race(_racers, plan, log))


def _racers(where: Path) -> dict[str, Racer]:
    racers = {}
    for algorithm in ALGORITHMS:
        for precision in ("float32", "bfloat16"):
            label = f"{algorithm} {precision}"
            racers[f"ours {label}"] = _commands.murmurate_train(
                label.replace(" ", "-"), f"halfcheetah-{algorithm}", where,
                *_EARLY, "--agent.precision", precision,
            )  # fmt: skip
            limit = [sys.executable, "-m", "murmurate.bench._control_limit", algorithm, precision]
            racers[f"limit {label}"] = _commands.appending(f"limit-{algorithm}-{precision}", limit, where)
        if _commands.missing("stable-baselines3") is None:
            racers[f"sb3 {algorithm}"] = _commands.sb3(
                f"sb3-{algorithm}", f"halfcheetah-{algorithm}", 1, where
            )
        for peer in (peer for peer in PEERS if _absent(peer) is None):
            command = [*_peers.command(peer, _SCRIPT), algorithm]
            racers[f"{peer} {algorithm}"] = _commands.appending(f"{peer}-{algorithm}", command, where)
    return racers


def _absent(peer: str) -> str | None:
    """Why a peer cannot be run, None if it can."""
    _, script = _peers.command(peer, _SCRIPT)
    return _peers.absent(peer) or (None if Path(script).exists() else f"not run: there is no {script}")


def figures(windows: Windows) -> dict[str, Any]:
    """``td3_ratio_sb3`` and the like: our rate over the other's, the median over rounds, in float32;
    ``td3_bfloat16_ratio_sb3``: ours in bfloat16. ``fastest_peer`` and ``ratio_fastest_peer``: the peer and
    algorithm with the lowest ratio, and that ratio."""
    rates = rates_by_cpu(windows)
    result: dict[str, Any] = {
        "world": "HalfCheetah-v5, 1 simulator, 2 layers of 256 units, batches of 256, an update an env step",
        "updates_per_cpu_second": {label: spread(values) for label, values in rates.items()},
    }
    worst: tuple[float, str] | None = None
    for algorithm in ALGORITHMS:
        ours = rates[f"ours {algorithm} float32"]
        result[f"{algorithm}_updates_per_cpu_second"] = median(ours)
        result[f"{algorithm}_ratio_limit"] = median(ratios(ours, rates[f"limit {algorithm} float32"]))
        peers = {
            peer: median(ratios(ours, rates[f"{peer} {algorithm}"]))
            for peer in ("sb3", *PEERS)
            if f"{peer} {algorithm}" in rates
        }
        result |= {f"{algorithm}_ratio_{peer}": ratio for peer, ratio in peers.items()}
        if "sb3" in peers:
            bfloat16_ratios = ratios(rates[f"ours {algorithm} bfloat16"], rates[f"sb3 {algorithm}"])
            result[f"{algorithm}_bfloat16_ratio_sb3"] = median(bfloat16_ratios)
        for peer, ratio in peers.items():
            if worst is None or ratio < worst[0]:
                worst = ratio, f"{peer} {algorithm}"
    if worst is not None:
        result["ratio_fastest_peer"], result["fastest_peer"] = worst
    absent = {peer: _absent(peer) for peer in PEERS}
    sb3 = "stable-baselines3"
    result["peers"] = [
        _commands.missing(sb3) or {"peer": sb3, "status": "ran"},
        *({"peer": peer, "status": reason or "ran"} for peer, reason in absent.items()),
    ]
    return result
