"""An image data set, a classifier of it, and accuracy as its evaluation: noisy stripes in four directions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from murmurate.datasets.interface import Split, Subset
from murmurate.errors import Refusal, unknown
from murmurate.evaluation.interface import Curve, EvalContext, Evaluation
from murmurate.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Seed
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.sources.examples import ExampleSourceConfig
from murmurate.spec import Batch, EnvSpec, Examples, Outcome, World, derive_generator
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run

KINDS, SIZE = 4, 12


class Labelled(NamedTuple):
    images: Tensor  # [G, 1, 12, 12]
    labels: Tensor  # [G]

    def select(self, examples: Any) -> Labelled:
        which = torch.as_tensor(np.asarray(examples))
        return Labelled(self.images[which], self.labels[which])


@functools.cache
def generated(count: int, noise: float, seed: int) -> Labelled:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(KINDS, (count,), generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    phases = torch.stack([x, y, x + y, x - y])[labels] + torch.randint(6, (count, 1, 1), generator=generator)
    images = (phases % 6 < 3).float() + noise * torch.randn(count, SIZE, SIZE, generator=generator)
    return Labelled(images[:, None], labels)


class _Numbered:
    """``Labelled`` with a length in examples (that of a named tuple is in fields)."""

    def __init__(self, whole: Labelled) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole.labels)

    def select(self, examples: Any) -> Labelled:
        return self.whole.select(examples)


@dataclass(frozen=True)
class StripesWorld(World):
    """count: images. noise: standard deviation added to each pixel. data_seed: they are generated from it."""

    count: PositiveInt = 600
    noise: NonNegativeFloat = 0.5
    data_seed: Seed = 0

    name: ClassVar[str] = "stripes"
    unit: ClassVar[str] = "images"

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        count = self.count if fingerprint is None else int(fingerprint["count"])
        return EnvSpec("stripes", (1, SIZE, SIZE), torch.float32, KINDS, examples=count * 4 // 5)

    def fingerprint(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        if dict(fingerprint) != self.fingerprint():
            raise Refusal("these are other stripes than the run began with. Use the same options.")

    def divided(self) -> Split:
        whole = _Numbered(generated(self.count, self.noise, self.data_seed))
        order, cut = np.arange(self.count), self.count // 10
        parts = order[2 * cut :], order[:cut], order[cut : 2 * cut]
        return Split(*(Subset(whole, part) for part in parts))


@dataclass(frozen=True)
class StripesClassifier(LearnerConfig):
    """A convolution and a linear layer. batch: images of an update. learning_rate: SGD's.
    validate_every: updates between two looks at the held-out images."""

    name: ClassVar[str] = "cnn"
    summary: ClassVar[str] = "a small convolutional classifier"

    batch: PositiveInt = 20
    learning_rate: PositiveFloat = 0.1
    validate_every: PositiveInt = 10

    @property
    def requires(self) -> Examples:
        return Examples(self.batch, "images")

    def build(self, context: Context) -> ClassifierLearner:
        return ClassifierLearner(self, context)


class ClassifierLearner:
    def __init__(self, config: StripesClassifier, context: Context) -> None:
        self.config, self.device = config, context.device
        conv, head = nn.Conv2d(1, 8, 5), nn.Linear(8 * 8 * 8, KINDS)
        self.net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), head).to(context.device)
        generator = derive_generator(context.seed, "net")
        for x in self.net.parameters():
            nn.init.uniform_(x, -0.1, 0.1, generator=generator)
        rate = config.learning_rate
        self.replica = context.replicate(
            "classifier", self.net, lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9)
        )
        self._validation = context.validation
        self._accuracy = float("nan")

    @property
    def replicas(self) -> dict[str, Any]:
        return {"classifier": self.replica}

    def accuracy(self, data: Labelled) -> float:
        with torch.no_grad():
            guess = self.net(data.images.to(self.device)).argmax(-1)
        return float((guess == data.labels.to(self.device)).float().mean())

    def learn(self, batch: Batch) -> Outcome:
        data: Labelled = batch.data
        scores = self.net(data.images.to(self.device))
        loss = nn.functional.cross_entropy(scores, data.labels.to(self.device))
        self.replica.descend(loss)
        metrics: dict[str, Any] = {"loss": loss.detach()}
        if self._validation is not None and self.replica.clock % self.config.validate_every == 0:
            self._accuracy = self.accuracy(self._validation.select(range(len(self._validation))))
        if self._validation is not None:
            metrics["accuracy"] = self._accuracy
        return Outcome(metrics)

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Accuracy(Evaluation):
    """The share of the test images that are classified correctly."""

    curves: ClassVar[tuple[Curve, ...]] = (
        Curve("accuracy", "Accuracy", "accuracy on validation images", digits=3),
    )

    def evaluate(self, learner: ClassifierLearner, context: EvalContext) -> dict[str, Any]:
        test = context.world.divided().test
        return {"accuracy": learner.accuracy(test.select(range(len(test)))), "test_images": len(test)}

    def sentence(self, figures: Mapping[str, Any]) -> str:
        if figures.get("accuracy") is None:
            return ""
        return f"Accuracy on {figures['test_images']} test images: {figures['accuracy']:.1%}"


ALGORITHM = "cnn"
WORLDS = ("stripes",)


def recipe(name: str) -> Run:
    if name not in WORLDS:
        raise unknown("world", name, WORLDS)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=StripesWorld(),
        learner=StripesClassifier(),
        strategy=AllReduce(),
        source=ExampleSourceConfig(),
        evaluation=Accuracy(),
        env_steps=5_000,
        checkpoint_every_env_steps=2_000,
    )
