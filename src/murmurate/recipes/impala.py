"""``<world>-impala``: actors play with a policy that is a little old, and V-trace corrects for its age."""

from __future__ import annotations

from typing import Any

from murmurate.agents.impala import IMPALA
from murmurate.evaluation.games import Games
from murmurate.sources.trajectory_source import TrajectorySourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "impala"
_ACTORS = 2


def recipe(name: str) -> Run:
    """One learner and its two actors; ``--replicas N`` adds learners that all-reduce, each with its own
    actors. With ``--actors 0`` a learner acts itself."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=AllReduce(), **settings(name))


def settings(name: str) -> dict[str, Any]:
    """The fields of the Run that depend on the world, and not on the strategy."""
    environment = world(name)
    common = {"world": environment, "evaluation": Games()}
    if environment.images:
        # The paper's settings are for 50 million env steps. RMSprop's epsilon of 0.1, added to the root of
        # the mean squared gradient, exceeds that root: steps are a third as long. With it and batches of
        # 640 steps, the return on Pong had not risen after a million env steps. So: a smaller epsilon,
        # batches of half the size, and twice the learning rate.
        return common | {
            "learner": IMPALA(precision="auto", learning_rate=1.2e-3, optimizer_epsilon=0.01),
            "source": TrajectorySourceConfig(actors=_ACTORS, simulators=32, trajectories=1),
            "env_steps": 10_000_000,
        }
    # Batches are five to ten times smaller than the paper's, and so are gradients, as losses are sums over
    # the batch. For this reason epsilon and clip are smaller, too.
    agent = IMPALA(
        steps=8,
        trace_lambda=0.95,
        learning_rate=4e-3,
        optimizer_epsilon=0.06,
        clip=32.0,
        entropy_coefficient=0.0,
    )
    if environment.name == "cartpole":
        return common | {
            "learner": agent,
            "source": TrajectorySourceConfig(actors=_ACTORS, simulators=8),
            "env_steps": 500_000,
            "checkpoint_every_env_steps": 20_000,  # the best checkpoint is chosen from these
        }
    return common | {
        "learner": agent,
        "source": TrajectorySourceConfig(actors=_ACTORS, simulators=16),
        "env_steps": 1_000_000,
    }
