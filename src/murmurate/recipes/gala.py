"""``<world>-gala``: actor-learners that gossip on a directed ring (Assran et al. 2019, Algorithm 1)."""

from __future__ import annotations

from murmurate.recipes.a2c import settings
from murmurate.strategies.gala import GALA
from murmurate.training.run import Run

ALGORITHM = "gala"


def recipe(name: str) -> Run:
    """Four A2C learners; each averages with its predecessor in the ring, without waiting."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=GALA(), replicas=4, **settings(name))
