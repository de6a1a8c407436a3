"""``corpus-lda``: latent Dirichlet allocation by stochastic variational inference."""

from __future__ import annotations

import dataclasses

from murmurate.collect.documents import CorpusWorld
from murmurate.errors import unknown
from murmurate.run_spec import Run
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.hogwild import Hogwild
from murmurate.workloads.topic_model import TopicModel

ALGORITHM = "lda"
WORLDS = ("corpus",)


def lda(name: str) -> Run:
    """One replica; ``--replicas N`` adds others on one lambda. Which corpus is for the user to say."""
    if name not in WORLDS:
        raise unknown("world", name, WORLDS)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=CorpusWorld(),
        agent=TopicModel(),
        strategy=Hogwild(),
        simulators=1,
        env_steps=1_000_000,
        checkpoint_every_env_steps=1_000_000,
        record_every_seconds=0.2,  # small corpora are through in seconds
    )


def finished(run: Run) -> Run:
    """With the paper's steps under DPSGD also rho follows them: eta = rho = rate / (p B M) ** 0.25 (Mohamad
    et al., equation 13). A rho of the user's own stays as it is, and with it eta."""
    model, strategy = run.agent, run.strategy
    if not (isinstance(model, TopicModel) and isinstance(strategy, DPSGD) and model.step_rule == "paper"):
        return run
    if strategy.global_learning_rate is not None:
        return run
    both = dataclasses.replace(strategy, global_learning_rate=model.rate, scale_rates=True)
    return dataclasses.replace(run, strategy=both)


recipe = lda
