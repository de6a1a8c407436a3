"""``<world>-apex-dqn``: a learner and its actors, each with its own exploration (Horgan et al. 2018)."""

from __future__ import annotations

import dataclasses

from murmurate.recipes.dqn import settings
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run

ALGORITHM = "apex-dqn"
ACTIONS = "discrete"


def recipe(name: str) -> Run:
    """Two actors that share the simulators; ``--replicas N`` adds learners that all-reduce, each with its own
    actors and replay (Differs: the paper has one learner). The exponent of the importance weights stays 0.4,
    as in the paper."""
    fields = settings(name)
    source, learner = fields.pop("source"), fields.pop("learner")
    replay = dataclasses.replace(source.replay, beta_end=source.replay.beta)
    learner = dataclasses.replace(learner, exploration="ladder", epsilon=0.4)
    if fields["world"].name == "cartpole":
        fields["env_steps"] *= 2  # half of the simulators explore throughout
        # room for all env steps (the paper's replay is twice DQN's): with room for a quarter of them, some
        # runs got worse again
        replay = dataclasses.replace(replay, capacity=fields["env_steps"])
    source = dataclasses.replace(source, replay=replay, actors=2)
    return Run(recipe=f"{name}-{ALGORITHM}", learner=learner, source=source, strategy=AllReduce(), **fields)
