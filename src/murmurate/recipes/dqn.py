"""``<world>-dqn``: Q-learning from a prioritized replay, with double Q and n-step returns."""

from __future__ import annotations

from typing import Any

from murmurate.agents.dqn import DQN
from murmurate.evaluation.games import Games
from murmurate.replay.config import ReplayConfig
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "dqn"
ACTIONS = "discrete"


def recipe(name: str) -> Run:
    """One learner that acts and learns in turn; ``--replicas N`` adds learners that all-reduce."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=AllReduce(), **settings(name))


def settings(name: str) -> dict[str, Any]:
    """The fields of the Run that depend on the world, and not on the strategy."""
    environment = world(name)
    common = {"world": environment, "evaluation": Games()}
    if environment.images:
        return common | {
            "learner": DQN(n_step=3, precision="auto"),
            "source": ReplaySourceConfig(simulators=8),
            "env_steps": 10_000_000,
        }
    return common | {
        "learner": DQN(
            batch=64,
            n_step=10,
            learning_rate=1e-3,
            learning_rate_end=0.3,
            adam_epsilon=1.5e-4,
            target_every=200,
            epsilon=0.04,
            explore_updates=2_000,
        ),
        "source": ReplaySourceConfig(
            simulators=8, replay=ReplayConfig(capacity=50_000, learning_starts=1_000, samples_per_insert=8.0)
        ),
        "env_steps": 100_000,
        "checkpoint_every_env_steps": 10_000,
    }
