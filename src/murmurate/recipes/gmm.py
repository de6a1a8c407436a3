"""``table-gmm``: a Bayesian Gaussian mixture by stochastic variational inference."""

from __future__ import annotations

from murmurate.datasets.table_world import TableWorld
from murmurate.errors import no_recipe
from murmurate.evaluation.held_out import HeldOutRows
from murmurate.sources.examples import ExampleSourceConfig
from murmurate.strategies.hogwild import Hogwild
from murmurate.training.run import Run
from murmurate.workloads.mixture_model import MixtureModel

ALGORITHM = "gmm"
WORLDS = ("table",)


def recipe(name: str) -> Run:
    """One replica; ``--replicas N`` adds replicas that share lambda, the global variational parameters.
    ``--world.path`` names the table."""
    if name not in WORLDS:
        raise no_recipe(ALGORITHM, name, WORLDS)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=TableWorld(),
        learner=MixtureModel(),
        strategy=Hogwild(),
        source=ExampleSourceConfig(),
        evaluation=HeldOutRows(),
        env_steps=1_000_000,
        checkpoint_every_env_steps=1_000_000,
    )
