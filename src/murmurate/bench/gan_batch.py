"""TF-Replicator, Figure 3: the samples of an SN-GAN after equally many generator updates, by its total batch.

Replicas keep their batch, so the total batch grows with their number (weak scaling). After an interruption,
the same command continues (see ``_resumable``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from murmurate.bench import _resumable
from murmurate.bench._result import Log, mean
from murmurate.bench._resumable import ResumableRun, Summary, diverged
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, PositiveInt
from murmurate.workloads.sn_gan import SNGAN

NAME = "gan-batch"
SUMMARY = (
    "SN-GAN with total batches 64 to 512 over 1 to 8 replicas at equal steps, resumable; --full: 3 seeds"
)

# the figure has no table; this is what its text says
CLAIM = (
    "Buchlovsky et al. 2019, section 4.2, on ImageNet at 128 x 128: without another change, a batch of 512 "
    "in place of 64 improves the Inception Score by half; batch normalisation over replicas gives a "
    "further 5 to 10%; not measured here"
)
_FIGURES = ("frechet_distance", "class_score", "class_agreement")
_SCALED_DOWN = "fewer updates than in the plan of --full"
_COLOURS = {"replicas": "C0", "local": "C1"}

Key = tuple[int, str, int]  # replicas, batch_norm, seed


@dataclass(frozen=True)
class GanBatchPlan:
    """Every number of replicas is trained once for each seed and kind of batch statistics.

    world: fashion or cifar10. path: path of the world's files. devices: as in ``--placement.devices``; empty:
    the CPU. batch: batch size of each replica. replicas: the numbers of replicas that are measured; the total
    batch is ``batch`` times the number. updates: number of updates of the generator in every run.
    generator_rate: learning rate of the generator, whatever the batch. discriminator_rate: learning rate of
    the discriminator, whatever the batch. channels: as in ``--agent.channels``. precision: as in
    ``--agent.precision``. batch_norm: kinds of batch statistics, as in ``--agent.batch-norm``; with one
    replica they are all the same. seeds: number of seeds (0, 1, ...). samples: number of generated images of
    an evaluation. where: the folder that keeps the runs.

    discriminator_steps: number of updates of the discriminator for each update of the generator.
    """

    world: str = "fashion"
    path: str = ""
    devices: tuple[str, ...] = ()
    batch: PositiveInt = 64
    replicas: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    updates: PositiveInt = 2_000
    discriminator_steps: PositiveInt = 1
    generator_rate: NonNegativeFloat = 4e-4
    discriminator_rate: NonNegativeFloat = 8e-4
    channels: PositiveInt = 32
    precision: str = "auto"
    batch_norm: tuple[str, ...] = ("replicas", "local")
    seeds: PositiveInt = 3
    samples: PositiveInt = 10_000
    where: str = "runs/gan-batch"


QUICK = GanBatchPlan(
    batch=16,
    replicas=(1, 2),
    updates=20,
    channels=16,
    batch_norm=("replicas",),
    seeds=1,
    samples=500,
    where="runs/gan-batch-quick",
)
FULL = GanBatchPlan()


def measure(plan: GanBatchPlan, log: Log) -> dict[str, Any]:
    """Frechet distances of every total batch; the hours that the runs will take are logged first.

    ``rows`` have a value for each seed. ``slopes``: for each seed, the slope of the distance against log2 of
    the total batch; where it is below 0, the distance falls. The distance is no FID: its features are of our
    own classifier, the same for all runs.
    """
    check(plan)
    runs = {key: planned(plan, *key) for key in keys(plan)}
    cost = _resumable.expected(list(runs.values()), log)
    summaries = {key: _resumable.train(run, log)[run.ends[-1]] for key, run in runs.items()}
    table = rows(plan, summaries)
    figure = Path(plan.where) / "gan-batch.png"
    draw(table, figure)
    slopes_by_kind = {
        kind: slopes([row for row in table if kind in row["batch_norm"]]) for kind in plan.batch_norm
    }
    return {
        **({"scaled_down": _SCALED_DOWN} if plan.updates < FULL.updates else {}),
        "expected": cost,
        "paper": CLAIM,
        "rows": table,
        "slopes": slopes_by_kind,
        "verdict": {kind: verdict(seed_slopes) for kind, seed_slopes in slopes_by_kind.items()},
        "figure": str(figure),
    }


def check(plan: GanBatchPlan) -> None:
    """Raises Refusal for a kind of batch statistics other than ``replicas`` and ``local``, for no kind, and
    for fewer than two different numbers of replicas."""
    for kind in plan.batch_norm:
        if kind not in ("replicas", "local"):
            raise Refusal(f"there is no batch normalisation '{kind}'. Use --batch-norm replicas,local.")
    if len(set(plan.replicas)) < 2 or not plan.batch_norm:
        raise Refusal("a comparison needs two numbers of replicas. Use --replicas 1,2.")


def keys(plan: GanBatchPlan) -> list[Key]:
    """The keys of all runs; with one replica, the first kind of statistics stands for all."""
    return [
        (replicas, kind, seed)
        for seed in range(plan.seeds)
        for replicas in dict.fromkeys(plan.replicas)
        for kind in (plan.batch_norm if replicas > 1 else plan.batch_norm[:1])
    ]


def planned(plan: GanBatchPlan, replicas: int, kind: str, seed: int) -> ResumableRun:
    total = plan.batch * replicas
    images = total * plan.updates * plan.discriminator_steps
    where = Path(plan.where)
    settings = (
        *(("--world.path", plan.path) if plan.path else ()),
        *(("--placement.devices", *plan.devices) if plan.devices else ()),
        "--replicas", str(replicas),
        "--seed", str(seed),
        "--agent.batch", str(plan.batch),
        "--agent.discriminator-steps", str(plan.discriminator_steps),
        "--agent.generator-rate", str(plan.generator_rate),
        "--agent.discriminator-rate", str(plan.discriminator_rate),
        "--agent.channels", str(plan.channels),
        "--agent.precision", plan.precision,
        "--agent.batch-norm", kind,
        "--samples", str(plan.samples),
        "--feature-net", str(where / f"feature-net-{plan.world}.safetensors"),
        "--checkpoint-every-env-steps", str(max(images // 20, 1)),
    )  # fmt: skip
    net = f"{plan.world}-{plan.channels}-channels-{plan.discriminator_steps}-to-1"
    rates = f"{plan.generator_rate:g}-{plan.discriminator_rate:g}"
    name = f"{net}-{rates}-{replicas}-x-{plan.batch}-{kind}-to-{plan.updates}-seed-{seed}"
    label = f"total batch {total}" + (f", {kind}" if replicas > 1 else "")
    return ResumableRun(
        f"{plan.world}-{SNGAN.name}", settings, seed, (images,), where / name, label, label, unit="images"
    )


def rows(plan: GanBatchPlan, summaries: Mapping[Key, Summary]) -> list[dict[str, Any]]:
    """A row for each total batch and kind of statistics; runs that diverged are only counted."""
    table = []
    for replicas, kind in dict.fromkeys(key[:2] for key in summaries):
        runs = [summaries[replicas, kind, seed] for seed in range(plan.seeds)]
        finite = {s: run for s, run in enumerate(runs) if not diverged(run)}
        row: dict[str, Any] = {
            "total_batch": plan.batch * replicas,
            "replicas": replicas,
            "batch_norm": [kind] if replicas > 1 else list(plan.batch_norm),
            "seeds": list(finite),
        }
        for name in _FIGURES:
            values = [float(run[name]) for run in finite.values()]
            row[name] = {"mean": mean(values), "of_seeds": values}
        table.append(
            {
                **row,
                "frechet_distance_test": next((r["frechet_distance_test"] for r in finite.values()), None),
                "diverged": len(runs) - len(finite),
                "hours": sum(run["wall_seconds"] for run in runs) / 3600,
            }
        )
    return table


def slopes(table: Sequence[Mapping[str, Any]]) -> list[float]:
    """For each seed, the least-squares slope of the distance against log2 of the total batch; seeds of which
    fewer than two runs stayed finite are left out."""
    seed_slopes = []
    for seed in sorted({seed for row in table for seed in row["seeds"]}):
        points = [
            (math.log2(row["total_batch"]), row["frechet_distance"]["of_seeds"][row["seeds"].index(seed)])
            for row in table
            if seed in row["seeds"]
        ]
        if len(points) > 1:
            seed_slopes.append(statistics.linear_regression(*zip(*points, strict=True)).slope)
    return seed_slopes


def verdict(seed_slopes: Sequence[float]) -> str:
    """Whether the distance falls with the batch: it must do so with every seed, and with at least two."""
    falling = sum(slope < 0 for slope in seed_slopes)
    counted = f"it falls with {falling} of {len(seed_slopes)} seeds"
    if len(seed_slopes) < 2:
        return f"undecided: {counted}, and fewer than two say nothing"
    if falling == len(seed_slopes):
        return f"the distance falls with the batch: {counted}"
    return f"the distance does not fall with the batch: {counted}"


def draw(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw distance and class score against the total batch: a point per run, a line through the means."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    titles = {"frechet_distance": "Fréchet distance", "class_score": "class score"}
    for ax, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for kind, colour in _COLOURS.items():
            chosen = [row for row in table if kind in row["batch_norm"] and row[name]["of_seeds"]]
            points = [(row["total_batch"], value) for row in chosen for value in row[name]["of_seeds"]]
            if points:
                ax.scatter(*zip(*points, strict=True), s=12, color=colour, alpha=0.6)
                means = [(row["total_batch"], row[name]["mean"]) for row in chosen]
                ax.plot(*zip(*means, strict=True), color=colour, label=f"batch norm: {kind}")
        ax.set_xscale("log", base=2)
        ax.set_xlabel("total batch (images)")
        ax.set_title(f"{title}, own classifier's features", fontsize="medium")
    figure.axes[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
