"""Residual nets that classify images (He et al. 2016), by SGD with Nesterov momentum (Goyal et al. 2017)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from murmurate.datasets.image_set import ImageBatch
from murmurate.datasets.interface import ExampleSet
from murmurate.errors import Refusal
from murmurate.losses.classification import balanced_weights, classification_loss, hits
from murmurate.nets.batch_norm import BatchNorm
from murmurate.nets.precision import resolve_precision
from murmurate.nets.resnet import ResNet
from murmurate.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, UnitInterval
from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Examples, Outcome, derive_generator, derive_seed
from murmurate.workloads.validation_times import ValidationTimes

Net = Literal["resnet18", "resnet20", "resnet32", "resnet34", "resnet50", "resnet56"]

EVALUATION_BATCH = 250  # images that are evaluated at a time; with 224 pixels a pass takes some gigabytes
_VALIDATION_METRICS = {"accuracy": "accuracy", "validation_loss": "loss"}  # metric -> key of ``figures``


@dataclass(frozen=True)
class ImageClassifier(LearnerConfig):
    """Hyper-parameters; the defaults are those of ResNets on CIFAR-10 (He et al. 2016, section 4.2), with
    Nesterov momentum.

    net: ResNet-18, 34 or 50; or ResNet-20, 32 or 56, for small images. width: number of channels of the first
        stage; 0: as in the papers.
    batch: number of images in an update of one replica.
    learning_rate: learning rate where an update has ``rate_batch`` images; for another number of images it is
        scaled in proportion (Goyal et al., section 2.1), counting the images of all replicas whose gradients
        are averaged.
    rate_batch: number of images in an update for which learning_rate is meant; 0: no scaling.
    momentum: Nesterov momentum. weight_decay: weight decay of filters and of the last layer's weights; biases
        and normalisations have none.
    schedule: ``cosine``: the learning rate falls to 0 along a cosine; ``step``: it is multiplied by
        step_factor at each milestone; ``constant``. In runs that only a time limit ends it is constant.
    milestones: for ``step``, shares of the run after which the learning rate falls.
    step_factor: for ``step``, factor by which the learning rate is then multiplied.
    warmup: share of the run over which the rate rises linearly from 0 (in Goyal et al., section 2.2, from the
        rate before scaling).
    label_smoothing: share of each label that is spread over all classes. mixup: alpha of the Beta
        distribution of the shares with which pairs of images are mixed; 0: no mixing.
    class_weights: ``balanced``: the loss of an image is divided by the number of training images of its
        class, relative to the mean over the classes that have any, for classes of unequal size; or ``none``.
    batch_norm: statistics are of the replica's own batch (local), of all replicas' batches (replicas), or of
        ``ghost`` images of the own batch at a time (ghost). ghost: number of images for batch_norm ghost.
    pixel_mean, pixel_std: mean and standard deviation by which pixels, scaled to 0 to 1, are normalised; one
        number for each channel, or one for all.
    precision: ``bfloat16`` computes convolutions in bfloat16, from a copy of the float32 parameters; ``auto``
        is bfloat16 where the device is faster in it, else float32.
    validate_every: updates of a replica between measurements of the validation accuracy; in a run of fewer
        than 20 times as many, a twentieth of its updates. 0: never.
    """

    name: ClassVar[str] = "image-classifier"
    summary: ClassVar[str] = "a residual net that classifies images"

    net: Net = "resnet20"
    width: NonNegativeInt = 0
    batch: PositiveInt = 128
    learning_rate: NonNegativeFloat = 0.1
    rate_batch: NonNegativeInt = 128
    momentum: Annotated[float, Range(0, 1, exclude_most=True)] = 0.9
    weight_decay: NonNegativeFloat = 1e-4
    schedule: Literal["cosine", "step", "constant"] = "step"
    milestones: tuple[UnitInterval, ...] = (0.5, 0.75)
    step_factor: UnitInterval = 0.1
    warmup: UnitInterval = 0.0
    label_smoothing: UnitInterval = 0.0
    mixup: NonNegativeFloat = 0.0
    batch_norm: Literal["local", "replicas", "ghost"] = "local"
    ghost: PositiveInt = 32
    pixel_mean: tuple[UnitInterval, ...] = (0.5,)
    pixel_std: tuple[PositiveFloat, ...] = (0.25,)
    precision: Literal["float32", "bfloat16", "auto"] = "auto"
    validate_every: NonNegativeInt = 500
    class_weights: Literal["none", "balanced"] = field(default="none", metadata={"since": 10})

    @property
    def requires(self) -> Examples:
        return Examples(self.batch, "images")

    @property
    def collectives_in_backward(self) -> bool:
        return self.batch_norm == "replicas"

    def resolved(self, spec: EnvSpec, device: torch.device) -> ImageClassifier:
        """This config with ``auto`` replaced by the precision that it means on the device."""
        return resolve_precision(self, device)

    def build(self, context: Context) -> ClassifierLearner:
        return ClassifierLearner(self, context)

    def rate(self, averaged: int) -> float:
        """The learning rate where the gradients of ``averaged`` replicas are averaged."""
        if not self.rate_batch:
            return self.learning_rate
        return self.learning_rate * self.batch * averaged / self.rate_batch

    def rate_factor(self, updates: int | None) -> Callable[[int], float]:
        """The factor of the learning rate as a function of the number of updates made so far.

        updates: number of updates of the whole run; None if only a time limit ends it.
        """

        def factor(done: int) -> float:
            if updates is None:
                return 1.0
            share = min(done / updates, 1.0)
            warmup_factor = min(1.0, (done + 1) / (self.warmup * updates)) if self.warmup else 1.0
            if self.schedule == "cosine":
                return warmup_factor * (1 + math.cos(math.pi * share)) / 2
            if self.schedule == "step":
                return warmup_factor * float(self.step_factor ** sum(share >= m for m in self.milestones))
            return warmup_factor

        return factor


class ClassifierLearner:
    """One replica of a classifier (see ``Learner``)."""

    def __init__(self, config: ImageClassifier, context: Context) -> None:
        spec = context.spec
        self.config = config = config.resolved(spec, context.device)
        self.device, self.seed, self.rank = context.device, context.seed, context.rank
        self.classes = spec.actions
        counts = spec.class_counts if config.class_weights == "balanced" else None
        if counts == ():
            raise Refusal(
                "this data set does not say how many images each class has (EnvSpec.class_counts), by which "
                "--agent.class-weights balanced weights them. Leave it out."
            )
        self._class_weights = None if counts is None else balanced_weights(counts).to(context.device)
        self.net = ResNet(
            config.net,
            _image_shape(spec),
            spec.actions,
            width=config.width,
            norm=self._norm(context),
            generator=derive_generator(context.seed, "network"),
        ).to(context.device)
        self._scale, self._shift = _normalisation(config, spec.observation_shape[0], context.device)
        self.replica: Replica = context.replicate(
            "classifier",
            self.net,
            self._optimizer(config.rate(context.averaged)),
            groups=_decay_groups(config.weight_decay),
            schedule=config.rate_factor(context.updates),
            compute_dtype=torch.bfloat16 if config.precision == "bfloat16" else None,
            in_compute=_filters(self.net).__contains__,
        )
        validation: ExampleSet[ImageBatch] | None = context.validation
        self._validated_after = ValidationTimes.of(context, config.validate_every, config.batch)
        self._validation = None if self._validated_after is None else validation
        self._validators = context.group() if self._validation and context.identical else None
        self._heartbeat = context.heartbeat
        self._validation_figures: dict[str, float] = {}  # the last ones; empty before the first

    def _norm(self, context: Context) -> Callable[[int], BatchNorm]:
        if self.config.batch_norm == "replicas":
            group = context.group()
            return lambda channels: BatchNorm(channels, sum_over=group.sum)
        ghost = self.config.ghost if self.config.batch_norm == "ghost" else 0
        return lambda channels: BatchNorm(channels, ghost=ghost)

    def _optimizer(self, rate: float) -> Callable[[list[Any]], torch.optim.Optimizer]:
        momentum = self.config.momentum
        fused = self.device.type in ("cpu", "cuda")  # faster: one pass over memory
        return lambda parameters: torch.optim.SGD(
            parameters, lr=rate, momentum=momentum, nesterov=momentum > 0, fused=fused
        )

    @property
    def clock(self) -> int:
        return self.replica.clock

    @property
    def replicas(self) -> dict[str, Replica]:
        return {self.replica.name: self.replica}

    def learn(self, batch: Batch) -> Outcome:
        data: ImageBatch = batch.data
        labels, clock = data.labels.to(self.device), self.clock
        images, other_labels, share = self._mixed(self._normalised(data.images), labels)
        logits = self.net(images)
        loss = classification_loss(
            logits,
            labels,
            other_labels,
            share=share,
            smoothing=self.config.label_smoothing,
            weight_k=self._class_weights,
        )
        self.replica.descend(loss)
        metrics: dict[str, Any] = {
            "loss": loss.detach(),
            "train_accuracy": lambda: float(hits(logits.detach(), labels, top=1).float().mean()),
            "learning_rate": self.replica.optimizer.param_groups[0]["lr"],
        }
        if self._validation is not None and self._validated_after is not None:
            if self._validated_after.passed(clock, self.clock):
                self._validation_figures = self.figures(self._validation, group=self._validators)
            if figures := self._validation_figures:
                metrics |= {name: figures[key] for name, key in _VALIDATION_METRICS.items()}
        return Outcome(metrics)

    def _normalised(self, images: Tensor) -> Tensor:
        """uint8 images [B, C, H, W], normalised, in the dtype of the net's normalisation constants."""
        x = images.to(self.device).to(self._scale.dtype, memory_format=torch.channels_last)
        return torch.addcmul(self._shift, x, self._scale)

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """(images, other labels, share) after mixup: each image is mixed with another one, which has the
        other label; share is the weight of the first. Without mixup other labels are None."""
        if not self.config.mixup:
            return images, None, 1.0
        random = np.random.default_rng(derive_seed(self.seed, f"mixup {self.rank}", self.clock))
        share = float(random.beta(self.config.mixup, self.config.mixup))
        order = torch.from_numpy(random.permutation(len(images))).to(self.device)
        return torch.lerp(images[order], images, share), labels[order], share

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """The logits [B, K] of uint8 images [B, C, H, W], with batch normalisation's running statistics."""
        self.net.eval()
        try:
            out: Tensor = self.net(self._normalised(images))
        finally:
            self.net.train()
        return out

    def figures(
        self,
        examples: ExampleSet[ImageBatch],
        count: int | None = None,
        seed: int = 0,
        group: Group | None = None,
        seen: Callable[[Tensor, Tensor], None] = lambda labels, logits: None,
    ) -> dict[str, float]:
        """accuracy and top5_accuracy (from 0 to 1) and loss (nats) on ``count`` examples, drawn at random by
        ``seed`` (None: on all), and ``images``, the number of these that could be read. group: replicas that
        share the work; each must call this. seen: is called with the labels [B] and logits [B, K] of each
        batch that this replica evaluates."""
        chosen = _drawn(len(examples), count, seed)
        starts = range(0, max(len(chosen), 1), EVALUATION_BATCH)

        def sums(start: int) -> Tensor:
            """Hits, hits of the top 5, summed loss and number of images of one batch."""
            self._heartbeat()
            batch = examples.select(chosen[start : start + EVALUATION_BATCH])
            if not len(batch.labels):  # all of them are broken, and left out
                return torch.zeros(4, dtype=torch.float64)
            logits, labels = self.logits(batch.images).float(), batch.labels.to(self.device)
            seen(labels, logits)
            loss = classification_loss(logits, labels) * len(labels)
            hit_counts = [hits(logits, labels, top=top).sum() for top in (1, 5)]
            return torch.stack([*hit_counts, loss, loss.new_tensor(len(labels))]).double().cpu()

        *found, readable = (group or Group.of_one()).map_reduce(sums, starts, "sum").tolist()
        accuracy, top5, loss = (value / max(readable, 1) for value in found)
        return {"accuracy": accuracy, "top5_accuracy": top5, "loss": loss, "images": int(readable)}

    def program(self) -> nn.Module:
        """A copy that maps uint8 images [B, C, H, W] to probabilities [B, K], in float32 on a CPU."""
        return _Probabilities(self.net, self._scale, self._shift).cpu().float().eval()

    def state(self) -> dict[str, Any]:
        """The last measurements on validation images."""
        return {"validated": dict(self._validation_figures)}

    def load(self, state: dict[str, Any]) -> None:
        self._validation_figures = dict(state["validated"])


class _Probabilities(nn.Module):
    """Copies of normalisation and net, with a softmax, in one module."""

    scale: Tensor
    shift: Tensor

    def __init__(self, net: ResNet, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, images: Tensor) -> Tensor:
        return self.net(torch.addcmul(self.shift, images.float(), self.scale)).softmax(-1)  # type: ignore[no-any-return]


def _drawn(available: int, count: int | None, seed: int) -> range | NDArray[np.int64]:
    """``count`` of the numbers below ``available``, drawn without replacement and sorted, so that files are
    read in their order; all of them if ``count`` is None or not smaller."""
    if count is None or count >= available:
        return range(available)
    random = np.random.default_rng(derive_seed(seed, "evaluation images"))
    return np.sort(random.choice(available, count, replace=False, shuffle=False))


def _image_shape(spec: EnvSpec) -> tuple[int, int, int]:
    if len(spec.observation_shape) != 3:
        raise ValueError(f"images are [C, H, W], and examples of {spec.name} {list(spec.observation_shape)}")
    channels, height, width = spec.observation_shape
    return channels, height, width


def _normalisation(config: ImageClassifier, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(scale, shift), each [1, C, 1, 1]: scale x + shift normalises pixels from 0 to 255."""
    values = []
    for name in ("pixel_mean", "pixel_std"):
        numbers = getattr(config, name)
        if len(numbers) not in (1, channels):
            raise ValueError(f"{name} has {len(numbers)} numbers, and images have {channels} channel(s)")
        values.append(torch.tensor(numbers, device=device).expand(channels).reshape(1, -1, 1, 1))
    mean, deviation = values
    return 1 / (255 * deviation), -mean / deviation


def _decay_groups(weight_decay: float) -> Callable[[nn.Module], Sequence[dict[str, Any]]]:
    """A function that makes two groups of a module's parameters: filters and matrices with weight decay,
    vectors without."""

    def groups(module: nn.Module) -> Sequence[dict[str, Any]]:
        parameters = list(module.parameters())
        return [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]

    return groups


def _filters(net: nn.Module) -> frozenset[str]:
    """Names of the parameters that are filters of convolutions."""
    return frozenset(name for name, p in net.named_parameters() if p.dim() == 4)
