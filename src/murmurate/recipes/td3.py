"""``<world>-td3``: deterministic policy, twin critics; several replicas average their gradients."""

from __future__ import annotations

from typing import Any

from murmurate.agents.td3 import TD3
from murmurate.evaluation.games import Games
from murmurate.replay.config import ReplayConfig
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "td3"
ACTIONS = "vector"
_RANDOM_ENV_STEPS = 25_000
_SHORT_RUNS = ("pendulum", "inverted-pendulum", "inverted-double-pendulum", "mountain-car-continuous")


def recipe(name: str) -> Run:
    """One learner that acts and learns in turn; ``--replicas N`` adds learners that all-reduce."""
    return Run(recipe=f"{name}-{ALGORITHM}", learner=TD3(), strategy=AllReduce(), **settings(name))


def settings(name: str, random_env_steps: int = _RANDOM_ENV_STEPS) -> dict[str, Any]:
    """The fields of the Run that depend on the world, for learners that make one update on 256 transitions
    per env step, as the authors' code does. random_env_steps: env steps with random actions, before the first
    update."""
    env_steps, environment = 1_000_000, world(name)
    if environment.name in _SHORT_RUNS:  # however it is spelled: gym:Pendulum-v1 is pendulum
        env_steps, random_env_steps = 50_000, 1_000
    replay = ReplayConfig(
        capacity=min(env_steps, 1_000_000),
        alpha=0.0,
        learning_starts=random_env_steps,
        samples_per_insert=256.0,
    )
    return {
        "world": environment,
        "source": ReplaySourceConfig(simulators=1, replay=replay, random_env_steps=random_env_steps),
        "evaluation": Games(),
        "env_steps": env_steps,
    }
