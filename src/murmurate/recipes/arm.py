"""``<world>-arm``: advantage-based regret minimization, for partial observability (Jin 2018, chapter 2)."""

from __future__ import annotations

import dataclasses
from typing import Any

from murmurate.agents.arm import ARM
from murmurate.evaluation.games import Games
from murmurate.sources.sequences import SequenceSourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "arm"
ACTIONS = "discrete"


def recipe(name: str) -> Run:
    """One learner that collects and fits in turn; ``--replicas N`` adds learners that all-reduce."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=AllReduce(), **settings(name))


def settings(name: str) -> dict[str, Any]:
    """The fields of the Run that depend on the world, and not on the strategy."""
    environment = world(name)
    common = {"world": environment, "evaluation": Games()}
    if environment.images:  # Jin 2018, Tables 2.1 and 2.2, and section 2.5
        agent = ARM(precision="auto")
        if environment.first_person:
            agent = dataclasses.replace(agent, n_step=5, learning_rate=1e-5, torso="jin2018")
        if environment.name == "doom-my-way-home":
            # the thesis's rate is for ten times as many env steps as this one needs
            agent = dataclasses.replace(agent, learning_rate=1e-4, discount=0.995)
        return common | {
            "learner": agent,
            "source": SequenceSourceConfig(),
            "env_steps": 10_000_000,
        }
    return common | {
        "learner": ARM(n_step=5, learning_rate=1e-3),
        "source": SequenceSourceConfig(simulators=8, collect_env_steps=1_000, minibatches=250),
        "env_steps": 500_000,
        "checkpoint_every_env_steps": 20_000,
    }
