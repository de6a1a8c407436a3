"""``<world>-sac``: maximum entropy policy, twin critics; several replicas average their gradients."""

from __future__ import annotations

from murmurate.agents.sac import SAC
from murmurate.recipes.td3 import settings
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run

ALGORITHM = "sac"
ACTIONS = "vector"
_RANDOM_ENV_STEPS = 10_000


def recipe(name: str) -> Run:
    """One learner that acts and learns in turn; ``--replicas N`` adds learners that all-reduce."""
    fields = settings(name, random_env_steps=_RANDOM_ENV_STEPS)
    return Run(recipe=f"{name}-{ALGORITHM}", learner=SAC(), strategy=AllReduce(), **fields)
