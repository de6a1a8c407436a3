"""``<world>-mbpo``: soft actor-critic on short rollouts of a learned model; replicas average gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from murmurate.agents._model_based import PolicySettings
from murmurate.agents.mbpo import MBPO
from murmurate.evaluation.games import Games
from murmurate.sources.imagined import ImaginedSourceConfig, ModelRollouts
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import vector_worlds, world
from murmurate.worlds.terminations import terminations

ALGORITHM = "mbpo"
WORLDS = tuple(name for name in vector_worlds() if name in terminations())


@dataclass(frozen=True)
class Task:
    """The settings of Janner et al. for a task, from their appendix C and their code.

    target_entropy: None stands for -D. updates: updates per env step. starts, length_end: see
    ``ModelRollouts``. grows: ``grows_after`` and ``grows_until`` of ``ModelRollouts``.
    """

    env_steps: int
    target_entropy: float | None = None
    updates: float = 20.0
    starts: int = 100_000
    length_end: int = 1
    grows: tuple[int, int] = (20_000, 150_000)
    learning_starts: int = 5_000


TASKS = {
    # a fifth of the paper's rollouts: an observation has 105 numbers, so all rollouts would need 9.5 GB
    "ant": Task(300_000, -4.0, starts=20_000, length_end=25, grows=(20_000, 100_000)),
    "halfcheetah": Task(400_000, -3.0, updates=40.0),
    "hopper": Task(125_000, -1.0, length_end=15),
    "inverted-pendulum": Task(20_000, -0.05, updates=10.0, learning_starts=500),
    "walker2d": Task(300_000, -3.0),
}
# settings of the other tasks
_OTHER, _OTHER_SHORT = Task(300_000), Task(20_000, updates=10.0, learning_starts=500)
_SHORT_TASKS = ("pendulum", "inverted-double-pendulum")


def recipe(name: str) -> Run:
    """One learner, which acts, fits its model and learns in turn; ``--replicas N`` adds learners that
    all-reduce, each with its own env steps and rollouts of the common model."""
    task = task_of(name)
    rollouts = ModelRollouts(
        starts=task.starts,
        length_end=task.length_end,
        grows_after=task.grows[0],
        grows_until=task.grows[1],
    )
    source = ImaginedSourceConfig(
        learning_starts=task.learning_starts, updates_per_step=task.updates, rollouts=rollouts
    )
    policy = PolicySettings(target_entropy=task.target_entropy)
    return Run(
        recipe=f"{name}-{ALGORITHM}", learner=MBPO(policy=policy), source=source, **settings(name, task)
    )


def task_of(name: str) -> Task:
    name = world(name).name  # however it is spelled: gym:Hopper-v5 is hopper
    return TASKS.get(name, _OTHER_SHORT if name in _SHORT_TASKS else _OTHER)


def settings(name: str, task: Task) -> dict[str, Any]:
    """The fields of the Run that MBPO and MEMR share."""
    return {
        "world": world(name),
        "strategy": AllReduce(),
        "evaluation": Games(),
        "env_steps": task.env_steps,
    }
