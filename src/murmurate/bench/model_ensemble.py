"""Training steps per CPU second of MBPO's ensemble, against mbrl-lib, autograd and matrix products."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from murmurate.bench import _commands, _peers
from murmurate.bench._racer import Racer, ThroughputPlan, Windows, race, rates_by_cpu
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.nets.precision import faster_precision

NAME = "model-ensemble"
SUMMARY = "training steps per CPU second of 7 models of 4 layers of 200, against mbrl-lib and matrix products"

_PEER, _PRECISIONS = "mbrl", ("float32", "bfloat16")
_KINDS = [("autograd", "float32"), *((kind, p) for kind in ("ours", "limit") for p in _PRECISIONS)]
QUICK = ThroughputPlan(window_cpu_seconds=4.0, warm_up_cpu_seconds=10.0)
FULL = ThroughputPlan(rounds=15, window_cpu_seconds=10.0, warm_up_cpu_seconds=10.0)


def measure(plan: ThroughputPlan, log: Log) -> dict[str, Any]:
    """A step draws 256 examples for each of the 7 members and trains all members, in one torch thread."""
    return figures(race(_racers, plan, log))


def _racers(where: Path) -> dict[str, Racer]:
    racers = {}
    for kind, precision in _KINDS:
        command = [sys.executable, "-m", "murmurate.bench._ensemble_racer", kind, precision]
        racers[f"{kind} {precision}"] = _commands.appending(f"{kind}-{precision}", command, where)
    if _peers.absent(_PEER) is None:
        racers[_PEER] = _commands.appending(_PEER, _peers.command(_PEER, "model.py"), where)
    return racers


def figures(windows: Windows) -> dict[str, Any]:
    """Ratios of rates, the medians over rounds. ``ratio_mbrl`` is that of the precision that ``auto`` selects
    here; autograd is in float32."""
    rates = rates_by_cpu(windows)
    auto_precision = faster_precision(torch.device("cpu"))
    result: dict[str, Any] = {
        "ensemble": "7 nets of 4 layers of 200, 14 inputs, 12 outputs, 256 examples of each",
        "precision": auto_precision,
        "steps_per_cpu_second": {label: spread(values) for label, values in rates.items()},
    }
    for precision in _PRECISIONS:
        ours = rates[f"ours {precision}"]
        result[f"{precision}_ratio_autograd"] = median(ratios(ours, rates["autograd float32"]))
        result[f"{precision}_ratio_limit"] = median(ratios(ours, rates[f"limit {precision}"]))
        if _PEER in rates:
            result[f"{precision}_ratio_mbrl"] = median(ratios(ours, rates[_PEER]))
    if _PEER in rates:
        result["ratio_mbrl"] = result[f"{auto_precision}_ratio_mbrl"]
    result["peers"] = [{"peer": _PEER, "status": _peers.absent(_PEER) or "ran"}]
    return result
