"""Recipes of residual nets: what the data sets need, whatever the net."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from murmurate.datasets.image_augmentation import Augmentation
from murmurate.datasets.image_cifar10 import Cifar10World
from murmurate.datasets.image_fashion import FashionWorld
from murmurate.errors import unknown
from murmurate.evaluation.accuracy import Accuracy
from murmurate.sources.images import ImageSourceConfig
from murmurate.spec import World
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.workloads.image_classifier import ImageClassifier, Net

_FASHION_PASSES, _CIFAR10_PASSES = 40, 60
_SMALL = Augmentation(padding=4, flip=True)  # He et al. 2016, section 4.2

WORLDS: dict[str, Callable[[], World]] = {"fashion": FashionWorld, "cifar10": Cifar10World}


def classifier(name: str, net: Net) -> Run:
    """One replica under all-reduce; ``--replicas N`` adds replicas, and ``--world.path`` names the files."""
    if name not in WORLDS:
        raise unknown("world", name, tuple(WORLDS))
    learner = dataclasses.replace(
        ImageClassifier(), net=net, schedule="cosine", warmup=0.05, weight_decay=5e-4
    )
    if name == "fashion":
        images = _FASHION_PASSES * 60_000
        learner = dataclasses.replace(learner, pixel_mean=(0.2860,), pixel_std=(0.3530,))
    else:
        images = _CIFAR10_PASSES * 50_000
        learner = dataclasses.replace(
            learner, pixel_mean=(0.4914, 0.4822, 0.4465), pixel_std=(0.2470, 0.2435, 0.2616)
        )
    return Run(
        recipe=f"{name}-{net}",
        world=WORLDS[name](),
        learner=learner,
        strategy=AllReduce(),
        source=ImageSourceConfig(_SMALL),
        evaluation=Accuracy(),
        env_steps=images,
        checkpoint_every_env_steps=images // 20,
    )
