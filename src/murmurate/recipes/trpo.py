"""``<world>-trpo``: trust-region policy optimisation; several replicas make one common step."""

from __future__ import annotations

from typing import Any

from murmurate.agents.trpo import TRPO
from murmurate.evaluation.games import Games
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "trpo"


def recipe(name: str) -> Run:
    """One learner; ``--replicas N`` adds learners whose rollouts enter the same steps."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=AllReduce(), **settings(name))


def settings(name: str) -> dict[str, Any]:
    """The fields of the Run that depend on the world."""
    environment = world(name)
    common = {"world": environment, "evaluation": Games()}
    if environment.images:  # the batch of Jin 2018, Table 2.5, for Doom: 12,500 steps, and full returns
        learner = TRPO(steps=782, gae_lambda=1.0, curvature_every=5, value_epochs=2, value_minibatches=100)
        return common | {
            "learner": learner,
            "source": RolloutSourceConfig(),
            "env_steps": 10_000_000,
        }
    if environment.spec().categorical:
        return common | {
            "learner": TRPO(steps=256),
            "source": RolloutSourceConfig(simulators=8),
            "env_steps": 500_000,
            "checkpoint_every_env_steps": 20_000,  # the best checkpoint is chosen from these
        }
    return common | {
        "learner": TRPO(
            steps=2048,
            gae_lambda=0.95,
            value_minibatches=32,
            normalize_observations=True,
            scale_rewards=True,
        ),
        "source": RolloutSourceConfig(simulators=1),
        "env_steps": 1_000_000,
    }
