"""``<images>-sn-gan``: class-conditional image generation by SN-GAN."""

from __future__ import annotations

from murmurate.datasets.image_arrays import ArraysWorld
from murmurate.datasets.image_cifar10 import Cifar10World
from murmurate.datasets.image_cifar100 import Cifar100World
from murmurate.datasets.image_fashion import FashionWorld
from murmurate.errors import no_recipe
from murmurate.evaluation.sample_quality import SampleQuality
from murmurate.sources.images import ImageSourceConfig
from murmurate.spec import World
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.workloads.sn_gan import SNGAN

ALGORITHM = "sn-gan"
_WORLDS: dict[str, type[World]] = {
    "fashion": FashionWorld,
    "arrays": ArraysWorld,
    "cifar10": Cifar10World,
    "cifar100": Cifar100World,
}
WORLDS = tuple(_WORLDS)
_FEATURE_EPOCHS = {"fashion": 2, "arrays": 5, "cifar10": 5, "cifar100": 5}


def recipe(name: str) -> Run:
    """A quarter of the papers' channels, for CPUs (``--agent.channels 256`` gives the papers' number). Every
    replica has a batch of its own, so ``--replicas N`` makes the total batch N times larger."""
    if name not in _WORLDS:
        raise no_recipe(ALGORITHM, name, _WORLDS)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=_WORLDS[name](),
        learner=SNGAN(channels=64),
        strategy=AllReduce(),
        source=ImageSourceConfig(),
        evaluation=SampleQuality(feature_epochs=_FEATURE_EPOCHS[name]),
        env_steps=1_280_000,
        checkpoint_every_env_steps=100_000,
    )
