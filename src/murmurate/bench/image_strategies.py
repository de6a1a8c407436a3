"""One image classifier under several strategies, at equal budgets: accuracy on the test images, with its
spread over seeds.

After an interruption, the same command continues (see ``_resumable``).
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench import _resumable
from murmurate.bench._result import Log, mean
from murmurate.bench._resumable import ResumableRun, Summary, diverged
from murmurate.errors import unknown
from murmurate.ranges import PositiveInt
from murmurate.strategies import strategies
from murmurate.workloads.image_classifier import Net

NAME = "image-strategies"
SUMMARY = "accuracy of an image classifier under several strategies, resumable; --full: 3 seeds"


@dataclass(frozen=True)
class ImageStrategiesPlan:
    """Each strategy trains ``replicas`` processes on ``batch`` images per step, for ``images`` in all.

    world: fashion or cifar10. path: path of the world's files. devices: as in ``--placement.devices``; empty:
    the CPU. seeds: number of seeds (0, 1, ...). where: the folder that keeps the runs.

    net: the net that learns. images: number of images of each training. replicas: number of processes. batch:
    number of images in a replica's update. strategies: the strategies that are run.
    """

    world: str = "fashion"
    path: str = ""
    devices: tuple[str, ...] = ()
    net: Net = "resnet20"
    images: PositiveInt = 480_000
    replicas: PositiveInt = 2
    batch: PositiveInt = 64
    strategies: tuple[str, ...] = ("all-reduce", "local-sgd", "pull-gossip", "gala", "elastic")
    seeds: PositiveInt = 3
    where: str = "runs/image-strategies"


QUICK = ImageStrategiesPlan(
    images=20_000, seeds=1, strategies=("all-reduce", "gala"), where="runs/image-strategies-quick"
)
FULL = ImageStrategiesPlan()


def measure(plan: ImageStrategiesPlan, log: Log) -> dict[str, Any]:
    """A row for each strategy; the hours that the runs will take are logged first."""
    runs = {
        (strategy, seed): planned(plan, strategy, seed)
        for seed, strategy in itertools.product(range(plan.seeds), plan.strategies)
    }
    cost = _resumable.expected(list(runs.values()), log)
    summaries = {key: _resumable.train(run, log)[plan.images] for key, run in runs.items()}
    return {
        "expected": cost,
        "rows": [
            row(strategy, [summaries[strategy, seed] for seed in range(plan.seeds)])
            for strategy in plan.strategies
        ],
    }


def planned(plan: ImageStrategiesPlan, strategy: str, seed: int) -> ResumableRun:
    """The training of a strategy with a seed. Raises Refusal for an unknown strategy."""
    if strategy not in strategies():
        raise unknown("strategy", strategy, strategies())
    settings = (
        *(("--world.path", plan.path) if plan.path else ()),
        *(("--placement.devices", *plan.devices) if plan.devices else ()),
        "--strategy", strategy,
        "--replicas", str(plan.replicas),
        "--agent.batch", str(plan.batch),
        "--seed", str(seed),
    )  # fmt: skip
    name = f"{plan.world}-{plan.net}-{strategy}-{plan.replicas}-of-{plan.batch}-to-{plan.images}-seed-{seed}"
    return ResumableRun(
        f"{plan.world}-{plan.net}",
        settings,
        seed,
        (plan.images,),
        Path(plan.where) / name,
        label=strategy,
        speed_like=strategy,
        unit="images",
    )


def row(strategy: str, runs: list[Summary]) -> dict[str, Any]:
    """Figures over the seeds, diverged runs left out except of ``wall_seconds``; the deviation is None for
    fewer than two runs."""
    finite = [run for run in runs if not diverged(run)]
    accuracies = [float(run["accuracy"]) for run in finite]
    return {
        "strategy": strategy,
        "accuracy": mean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "accuracies": accuracies,
        "test_losses": [run["test_loss"] for run in finite],
        "disagreements": [run["disagreement_final"] for run in finite],
        "staleness_max": [run["staleness_max"] for run in finite],
        "diverged": len(runs) - len(finite),
        "wall_seconds": [run["wall_seconds"] for run in runs],
    }
