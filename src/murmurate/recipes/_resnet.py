"""Common to the recipes of residual nets: the settings that depend on the data set, not on the net."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from murmurate.datasets.image_arrays import ArraysWorld
from murmurate.datasets.image_augmentation import Augmentation
from murmurate.datasets.image_cifar10 import Cifar10World
from murmurate.datasets.image_cifar100 import Cifar100World
from murmurate.datasets.image_fashion import FashionWorld
from murmurate.datasets.image_folder import FolderWorld
from murmurate.datasets.image_shards import ShardsWorld
from murmurate.errors import no_recipe
from murmurate.evaluation.accuracy import Accuracy
from murmurate.sources.images import ImageSourceConfig
from murmurate.spec import World
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.workloads.image_classifier import ImageClassifier, Net

_SMALL_AUGMENTATION = Augmentation(padding=4, flip=True)  # He et al. 2016, section 4.2
_PHOTOGRAPH_AUGMENTATION = Augmentation(crop="multi-scale", flip=True, lighting=0.1)  # Jin 2018, section 3.4
_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# by world: its config, the number of images to train on, and the mean and deviation of its pixels
_SMALL_SETS: dict[str, tuple[Callable[[], World], int, tuple[float, ...], tuple[float, ...]]] = {
    "fashion": (FashionWorld, 40 * 60_000, (0.2860,), (0.3530,)),
    "arrays": (ArraysWorld, 2_000_000, (0.5,), (0.25,)),
    "cifar10": (Cifar10World, 60 * 50_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (Cifar100World, 60 * 50_000, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_LARGE_SETS: dict[str, Callable[[], World]] = {"folder": FolderWorld, "shards": ShardsWorld}

SMALL_WORLDS = tuple(_SMALL_SETS)
ALL_WORLDS = (*SMALL_WORLDS, *_LARGE_SETS)


def classifier(name: str, net: Net) -> Run:
    """One replica under all-reduce; ``--replicas N`` adds replicas, and ``--world.path`` names the files."""
    learner = dataclasses.replace(ImageClassifier(), net=net, schedule="cosine", warmup=0.05)
    if name in _SMALL_SETS:
        world, images, mean, deviation = _SMALL_SETS[name]
        learner = dataclasses.replace(learner, weight_decay=5e-4)
        source = ImageSourceConfig(_SMALL_AUGMENTATION)
    elif name in _LARGE_SETS:  # 90 passes through as many images as ImageNet has; Goyal et al. 2017
        world, images = _LARGE_SETS[name], 90 * 1_281_167
        mean, deviation = _IMAGENET_MEAN, _IMAGENET_DEVIATION
        learner = dataclasses.replace(learner, batch=32, rate_batch=256)
        source = ImageSourceConfig(_PHOTOGRAPH_AUGMENTATION)
    else:
        raise no_recipe(net, name, ALL_WORLDS)
    return Run(
        recipe=f"{name}-{net}",
        world=world(),
        learner=dataclasses.replace(learner, pixel_mean=mean, pixel_std=deviation),
        strategy=AllReduce(),
        source=source,
        evaluation=Accuracy(),
        env_steps=images,
        checkpoint_every_env_steps=images // 20,
    )
