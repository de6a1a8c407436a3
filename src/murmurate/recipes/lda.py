"""``corpus-lda``: latent Dirichlet allocation by stochastic variational inference."""

from __future__ import annotations

from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.errors import no_recipe
from murmurate.evaluation.held_out import HeldOutDocuments
from murmurate.sources.examples import ExampleSourceConfig
from murmurate.strategies.hogwild import Hogwild
from murmurate.training.run import Run
from murmurate.workloads.topic_model import TopicModel

ALGORITHM = "lda"
WORLDS = ("corpus",)


def recipe(name: str) -> Run:
    """One replica; ``--replicas N`` adds replicas that share lambda, the global variational parameters.
    ``--world.path`` names the corpus."""
    if name not in WORLDS:
        raise no_recipe(ALGORITHM, name, WORLDS)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=CorpusWorld(),
        learner=TopicModel(),
        strategy=Hogwild(),
        source=ExampleSourceConfig(),
        evaluation=HeldOutDocuments(),
        env_steps=1_000_000,
        checkpoint_every_env_steps=1_000_000,
        record_every_seconds=0.2,  # small corpora take seconds
    )
