"""``<world>-a2c``: advantage actor-critic; several replicas average their gradients."""

from __future__ import annotations

from typing import Any

from murmurate.agents.a2c import A2C
from murmurate.evaluation.games import Games
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "a2c"


def recipe(name: str) -> Run:
    """One learner with 16 simulators; ``--replicas N`` adds learners that all-reduce."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=AllReduce(), **settings(name))


def settings(name: str) -> dict[str, Any]:
    """The fields of the Run that depend on the world, and not on the strategy."""
    environment = world(name)
    common = {"world": environment, "evaluation": Games()}
    if environment.images:
        return common | {
            "learner": A2C(precision="auto"),
            "source": RolloutSourceConfig(),
            "env_steps": 10_000_000,
        }
    if environment.name == "cartpole":
        # A good critic leaves gradients near zero. With the usual epsilon of 1e-5, RMSprop scales these up to
        # full steps, and the first failure after such a phase causes a step of up to ten times that size,
        # which destroys the policy.
        agent = A2C(
            learning_rate=4e-3,
            learning_rate_end=0.0,
            rmsprop_epsilon=1e-3,
            steps=8,
            gae_lambda=0.95,
            entropy_coefficient=0.0,
        )
        return common | {
            "learner": agent,
            "source": RolloutSourceConfig(simulators=8),
            "env_steps": 500_000,
            "checkpoint_every_env_steps": 20_000,  # the best checkpoint is chosen from these
        }
    return common | {
        "learner": A2C(steps=8, gae_lambda=0.95, entropy_coefficient=0.0),
        "source": RolloutSourceConfig(),
        "env_steps": 1_000_000,
    }
