"""``<world>-ppo``: proximal policy optimisation; several replicas average their gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

from murmurate.agents.ppo import PPO
from murmurate.evaluation.games import Games
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "ppo"


def recipe(name: str) -> Run:
    """One learner; ``--replicas N`` adds learners that all-reduce every minibatch's gradient."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=AllReduce(), **settings(name))


def settings(name: str) -> dict[str, Any]:
    """The fields of the Run that depend on the world. Hyper-parameters are those of CleanRL's ``ppo_atari``,
    ``ppo_continuous_action`` and ``ppo``."""
    environment = world(name)
    common = {"world": environment, "evaluation": Games()}
    if environment.images:
        agent, simulators = PPO(precision="auto"), 8
        if environment.name == "doom-my-way-home":
            # Its one reward is rare and far away: the entropy bonus of Atari's settings outweighs it, and
            # entropy stays at its maximum. Without a memory the agent passes the same rooms again.
            agent = dataclasses.replace(agent, entropy_coefficient=0.002, discount=0.995, recurrent=256)
            simulators = 16
        return common | {
            "learner": agent,
            "source": RolloutSourceConfig(simulators=simulators),
            "env_steps": 10_000_000,
        }
    if environment.spec().categorical:
        return common | {
            "learner": PPO(ratio_clip=0.2, value_clip=0.2),
            "source": RolloutSourceConfig(simulators=4),
            "env_steps": 500_000,
            "checkpoint_every_env_steps": 20_000,  # the best checkpoint is chosen from these
        }
    return common | {
        "learner": PPO(
            steps=2048,
            epochs=10,
            minibatches=32,
            ratio_clip=0.2,
            value_clip=0.2,
            learning_rate=3e-4,
            entropy_coefficient=0.0,
            normalize_observations=True,
            scale_rewards=True,
        ),
        "source": RolloutSourceConfig(simulators=1),
        "env_steps": 1_000_000,
    }
