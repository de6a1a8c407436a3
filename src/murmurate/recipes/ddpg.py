"""``<world>-ddpg``: deterministic policy and one critic; several replicas average their gradients."""

from __future__ import annotations

from murmurate.agents.ddpg import DDPG
from murmurate.recipes.td3 import settings
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run

ALGORITHM = "ddpg"
ACTIONS = "vector"


def recipe(name: str) -> Run:
    """One learner that acts and learns in turn; ``--replicas N`` adds learners that all-reduce."""
    return Run(recipe=f"{name}-{ALGORITHM}", learner=DDPG(), strategy=AllReduce(), **settings(name))
