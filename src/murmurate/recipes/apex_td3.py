"""``<world>-apex-td3``: a TD3 learner with prioritized replay, and its actors (Horgan et al. 2018)."""

from __future__ import annotations

import dataclasses

from murmurate.agents.td3 import TD3
from murmurate.recipes.td3 import settings
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run

ALGORITHM = "apex-td3"
ACTIONS = "vector"
_ACTORS = 2


def recipe(name: str) -> Run:
    """Two actors that share four simulators; ``--replicas N`` adds learners that all-reduce, each with its
    own actors and replay (Differs: Zhang's learners of the data-parallel Ape-X share one replay)."""
    fields = settings(name)
    source = fields.pop("source")
    replay = dataclasses.replace(source.replay, alpha=0.6)
    source = dataclasses.replace(source, simulators=2 * _ACTORS, actors=_ACTORS, replay=replay)
    return Run(recipe=f"{name}-{ALGORITHM}", learner=TD3(), strategy=AllReduce(), source=source, **fields)
