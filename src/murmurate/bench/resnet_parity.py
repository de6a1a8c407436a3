"""The image classifier beside a plain loop of torch's own layers and optimizer in one process: the losses of
the first steps, and the accuracy at the end.

A difference in the last bit grows by several orders of magnitude in ten such steps, most of all where the
input of a rectifier changes its sign. This is so between two plain loops, too, so the differences are given
beside those between two plain loops with initial weights that differ in the last bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from murmurate.bench._cache import cached_value
from murmurate.bench._plain_images import PlainNorm, sgd
from murmurate.bench._result import Log
from murmurate.datasets.image_set import ImageBatch
from murmurate.datasets.interface import DataSet
from murmurate.nets.resnet import ResNet
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.spec import derive_generator
from murmurate.training.members import build_learner, open_only_source
from murmurate.training.run import Run
from murmurate.workloads.image_classifier import ClassifierLearner, ImageClassifier, Net

_EQUAL = 1e-4  # losses that differ by at most this count as equal

NAME = "resnet-parity"
SUMMARY = (
    "losses and accuracy of the image classifier against a plain loop, same net and images; --full: 3 seeds"
)


@dataclasses.dataclass(frozen=True)
class ParityPlan:
    """world: fashion or cifar10. path: path of the world's files. steps: number of steps whose losses are
    compared. images: number of images of the training after which accuracies are compared, in bfloat16 where
    the processor has it; 0: no such training. seeds: number of seeds (0, 1, ...). where: the folder that
    keeps results.

    net: the net that learns. loss_batch: number of images in a step whose loss is compared (a CPU is slow in
    float64). batch: number of images in a step of the training.
    """

    world: str = "fashion"
    path: str = ""
    net: Net = "resnet20"
    loss_batch: PositiveInt = 16
    batch: PositiveInt = 128
    steps: PositiveInt = 200
    images: NonNegativeInt = 0
    seeds: PositiveInt = 1
    where: str = "runs/resnet-parity"


QUICK, FULL = ParityPlan(), ParityPlan(images=600_000, seeds=3)


def measure(plan: ParityPlan, log: Log) -> dict[str, Any]:
    """Differences of the losses of the first steps, in float64 and in float32, between ours and the plain
    loop, and between a perturbed plain loop and the plain loop; and ``accuracy_difference`` of the means over
    seeds."""
    where = Path(plan.where)
    where.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    run = planned(plan, plan.loss_batch, 0, plan.steps * plan.loss_batch, "float32")
    with float64():
        exact = losses_compared(run, plan.steps)
    single = losses_compared(run, plan.steps)
    for name, differences in (("float64", exact), ("float32", single)):
        log(f"{name}: {equal_steps(differences['ours'])} steps equal to {_EQUAL:g}, of the perturbed loop "
            f"{equal_steps(differences['perturbed_plain'])}")  # fmt: skip
    figures: dict[str, Any] = {
        "equal_steps": equal_steps(exact["ours"]),
        "equal_steps_perturbed_plain": equal_steps(exact["perturbed_plain"]),
        "largest_loss_difference": max(exact["ours"]),
        "float64": {name: largest_differences(by_step) for name, by_step in exact.items()},
        "float32": {name: largest_differences(by_step) for name, by_step in single.items()},
    }
    return figures | (accuracies(plan, where, log) if plan.images else {})


def losses_compared(run: Run, steps: int) -> dict[str, list[float]]:
    """Differences to the plain loop's losses, by step."""
    plain = PlainLoop(run).first_losses(run, steps)
    perturbed = PlainLoop(run, perturbed=True).first_losses(run, steps)
    return {
        "ours": difference(first_losses(run, steps), plain),
        "perturbed_plain": difference(perturbed, plain),
    }


def equal_steps(differences: list[float]) -> int:
    """How many of the first steps differ by at most 1e-4."""
    return next((k for k, each in enumerate(differences) if each > _EQUAL), len(differences))


def accuracies(plan: ParityPlan, where: Path, log: Log) -> dict[str, Any]:
    by_seed = []
    for seed in range(plan.seeds):
        key = [plan.world, plan.path, plan.net, plan.batch, plan.images, seed]
        ours = cached_value(where, "ours", key, functools.partial(accuracy, plan, seed, plain=False))
        plain = cached_value(where, "plain", key, functools.partial(accuracy, plan, seed, plain=True))
        log(f"seed {seed}: ours {ours:.4f}, plain {plain:.4f}")
        by_seed.append((ours, plain))
    means = [statistics.fmean(values) for values in zip(*by_seed, strict=True)]
    return {
        "accuracies": [ours for ours, _ in by_seed],
        "plain_accuracies": [plain for _, plain in by_seed],
        "accuracy_difference": means[0] - means[1],
    }


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Nets that are built inside are in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def difference(losses: list[float], others: list[float]) -> list[float]:
    """By step; infinite if a loss is NaN, because ``max`` passes over a NaN that is not the first."""
    differences = (abs(a - b) for a, b in zip(losses, others, strict=True))
    return [math.inf if math.isnan(each) else each for each in differences]


def largest_differences(differences: list[float]) -> dict[str, float]:
    """The largest difference over the first n steps, for several n."""
    return {str(n): max(differences[:n]) for n in (1, 5, 10, 20, 50, 100, 200) if n <= len(differences)}


def planned(plan: ParityPlan, batch: int, seed: int, images: int, precision: str) -> Run:
    base = recipe(f"{plan.world}-{plan.net}")
    learner = dataclasses.replace(
        cast(ImageClassifier, base.learner),
        batch=batch,
        precision=cast(Any, precision),
        validate_every=0,
    )
    world = dataclasses.replace(cast(Any, base.world), path=plan.path, validation=0)
    return dataclasses.replace(base, world=world, learner=learner, env_steps=images, seed=seed)


def first_losses(run: Run, steps: int) -> list[float]:
    learner: ClassifierLearner = build_learner(run, 0, Replica)
    batches = itertools.islice(open_only_source(run, learner), steps)
    return [float(learner.learn(batch).read_metrics()["loss"]) for batch in batches]


def accuracy(plan: ParityPlan, seed: int, *, plain: bool) -> float:
    """The accuracy on the test images after a training."""
    run = planned(plan, plan.batch, seed, plan.images, "auto")
    ours: ClassifierLearner = build_learner(run, 0, Replica)
    loop = PlainLoop(run) if plain else None
    batches = itertools.islice(open_only_source(run, ours), plan.images // plan.batch)
    for batch in batches:
        if loop is None:
            ours.learn(batch)
        else:
            loop.step(batch.data)
    test = cast(DataSet, run.world).divided().test
    return ours.figures(test)["accuracy"] if loop is None else loop.accuracy(test)


class PlainLoop:
    """The same net and schedule, with torch's batch normalisation and optimizer, and autocast."""

    def __init__(self, run: Run, perturbed: bool = False) -> None:
        config, spec = cast(ImageClassifier, run.learner), run.world.spec()
        norm, shape = cast(Any, PlainNorm), cast(Any, spec.observation_shape)
        generator = derive_generator(run.seed, "network")
        self.net = ResNet(config.net, shape, spec.actions, norm=norm, generator=generator)
        if perturbed:
            with torch.no_grad():
                self.net.conv.weight.nextafter_(self.net.conv.weight.new_tensor(1.0))
        self.mean = torch.tensor(config.pixel_mean).view(1, -1, 1, 1)
        self.deviation = torch.tensor(config.pixel_std).view(1, -1, 1, 1)
        self.bfloat16 = config.resolved(spec, torch.device("cpu")).precision == "bfloat16"
        rate, decay, momentum = config.rate(1), config.weight_decay, config.momentum
        self.optimizer = sgd(self.net, rate, decay, momentum, fused=False)  # torch's plain one
        updates = run.planned_updates()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, config.rate_factor(updates))

    def first_losses(self, run: Run, steps: int) -> list[float]:
        batches = itertools.islice(open_only_source(run, build_learner(run, 0, Replica)), steps)
        return [self.step(batch.data) for batch in batches]

    def logits(self, batch: ImageBatch) -> torch.Tensor:
        x = (batch.images.to(self.mean.dtype) / 255 - self.mean) / self.deviation
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            out: torch.Tensor = self.net(x.contiguous(memory_format=torch.channels_last))
        return out

    def step(self, batch: ImageBatch) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.logits(batch).to(self.mean.dtype), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())

    @torch.no_grad()
    def accuracy(self, test: Any) -> float:
        self.net.eval()
        right = 0
        for first in range(0, len(test), 250):
            batch = test.select(range(first, min(first + 250, len(test))))
            right += int((self.logits(batch).argmax(1) == batch.labels).sum())
        return right / len(test)
