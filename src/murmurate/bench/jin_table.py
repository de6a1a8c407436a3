"""Jin 2018, Figures 2.2 to 2.6: ARM beside dueling double DQN, A2C and TRPO, where observations hide
part of the state.

The budget is an option: ``murmurate bench jin-table --env-steps 1000000 --seeds 2 --tasks pong``.
After an interruption, the same command continues (see ``_resumable``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench import _resumable
from murmurate.bench._result import Log
from murmurate.bench._resumable import ResumableRun, Summary
from murmurate.errors import unknown
from murmurate.ranges import PositiveInt
from murmurate.record.score_statistics import interquartile_mean

NAME = "jin-table"
SUMMARY = "ARM, dueling double DQN, A2C and TRPO on hidden and plain worlds, resumable; --full: 5 seeds"

# task -> the world of its recipe, and options that make the task from it
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pong": ("pong", ()),
    "pong-one-frame": ("pong", ("--world.stack", "1")),
    "pong-occluded": ("pong-occluded", ()),
    "doom-my-way-home": ("doom-my-way-home", ()),
    "doom-corridor-plus": ("doom-corridor-plus", ()),
    "doom-corridor-plus-occluded": ("doom-corridor-plus-occluded", ()),
    "maze-curriculum": ("maze-curriculum", ()),
}
_DOOM = ("--agent.torso", "jin2018")
# agent -> options on all tasks, on Atari only, and on all other tasks (Tables 2.1 to 2.5)
AGENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "arm": (
        ("--agent.discount", "0.99"),  # as the others have it; the recipe of MyWayHome has another
        (),
        (*_DOOM, "--agent.n-step", "5", "--agent.learning-rate", "1e-5"),
    ),
    "dqn": (
        # the target net is copied every 30,000 simulator steps, of which an update has 4
        ("--agent.dueling", "true", "--replay.alpha", "0",
         "--replay.learning-starts", "50000", "--agent.target-every", "7500"),
        ("--agent.n-step", "1", "--agent.learning-rate", "6e-5"),
        (*_DOOM, "--agent.n-step", "5", "--agent.learning-rate", "1e-5", "--replay.capacity", "240000",
         "--agent.clip", "inf"),  # Table 2.4 clips gradients on Atari alone
    ),
    "a2c": (
        (),
        (),
        (*_DOOM, "--agent.steps", "40", "--agent.learning-rate", "1e-4", "--agent.optimizer", "adam"),
    ),
    "trpo": ((), ("--agent.steps", "6250"), _DOOM),
}  # fmt: skip
# on mazes, which stand for the thesis' Minecraft: where its columns differ from those of Doom
_MAZES = {
    "dqn": (
        "--replay.learning-starts",
        "12500",
        "--replay.capacity",
        "62500",
        "--agent.target-every",
        "3125",
    ),
    # the slow schedule of section 2.4, which TRPO needs to learn the levels
    "trpo": ("--agent.steps", "391", "--world.advance-every", "93750"),
}
# while the speed is measured: small batches in the same proportions
_SPEED = {
    "arm": ("--collect-env-steps", "256", "--minibatches", "61"),
    "dqn": ("--replay.learning-starts", "1000", "--replay.capacity", "20000"),
    "trpo": ("--agent.steps", "32", "--agent.value-minibatches", "4"),
}
# The thesis has figures only; this is what its text says of them (sections 2.4 and 2.7).
CLAIM = (
    "Jin 2018, section 2.4: ARM is not affected much by occlusion or by one frame of history on Pong, where "
    "deep Q-learning gets worse and slower; not measured here"
)


@dataclass(frozen=True)
class JinPlan:
    """Every agent is trained once for each task and seed.

    seeds: number of seeds (0, 1, ...). env_steps: number of env steps of each run. replicas: number of
    learners of a run. eval_episodes: number of games of each final policy. tasks: names in ``TASKS``. agents:
    names in ``AGENTS``. where: the folder that keeps the runs.
    """

    env_steps: PositiveInt = 4_000_000
    seeds: PositiveInt = 5
    replicas: PositiveInt = 1
    eval_episodes: PositiveInt = 30
    tasks: tuple[str, ...] = tuple(TASKS)
    agents: tuple[str, ...] = tuple(AGENTS)
    where: str = "runs/jin"


QUICK = JinPlan(
    env_steps=26_000, seeds=1, eval_episodes=1, tasks=("pong",), agents=("arm", "a2c"), where="runs/jin-quick"
)
FULL = JinPlan()
_SCALED_DOWN = "fewer env steps than the thesis' runs: not comparable with its figures"


def measure(plan: JinPlan, log: Log) -> dict[str, Any]:
    """Evaluation returns of every agent and task; the hours that the runs will take are logged first.

    ``returns`` are means over the evaluation games of the final policies, one for each seed; ``iqm`` is their
    interquartile mean, ``interval`` its 95% bootstrap interval over seeds; None for fewer than
    five. ARM's games are played by drawing from its policy, the others' by the best action. ``lost`` compares
    a task that hides part of the state with the plain one. Learning curves are in the reports, a page for
    each task.
    """
    runs = {
        (task, agent, seed): planned(plan, task, agent, seed)
        for seed, task, agent in itertools.product(range(plan.seeds), plan.tasks, plan.agents)
    }
    cost = _resumable.expected(list(runs.values()), log)
    summaries = {key: _resumable.train(run, log)[plan.env_steps] for key, run in runs.items()}
    table = rows(plan, summaries)
    return {
        **({"scaled_down": _SCALED_DOWN} if plan.env_steps < FULL.env_steps else {}),
        "expected": cost,
        "paper": CLAIM,
        "rows": table,
        "lost": lost(table),
        "reports": _resumable.reports(runs, plan.where),
    }


def planned(plan: JinPlan, task: str, agent: str, seed: int) -> ResumableRun:
    """Raises Refusal for an unknown task or agent."""
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if agent not in AGENTS:
        raise unknown("agent of this table", agent, AGENTS)
    world, task_options = TASKS[task]
    everywhere, atari, elsewhere = AGENTS[agent]
    settings = (
        *task_options,
        *everywhere,
        *(atari if world.startswith("pong") else elsewhere),
        *(_MAZES.get(agent, ()) if world.startswith("maze") else ()),
        "--replicas", str(plan.replicas),
        "--seed", str(seed),
        "--stop-at-return", "none",
        "--eval-episodes", str(plan.eval_episodes),
    )  # fmt: skip
    folder = Path(plan.where) / f"{task}-{agent}-{plan.replicas}-to-{plan.env_steps}-seed-{seed}"
    return ResumableRun(
        f"{world}-{agent}",
        settings,
        seed,
        (plan.env_steps,),
        folder,
        label=f"{task}, {agent}",
        speed_like=f"{world.partition('-')[0]} {agent}",
        speed_settings=_SPEED.get(agent, ()),
    )


def rows(plan: JinPlan, summaries: Mapping[tuple[str, str, int], Summary]) -> list[dict[str, Any]]:
    """A row for each task and agent."""
    table = []
    for task, agent in itertools.product(plan.tasks, plan.agents):
        runs = [summaries[task, agent, seed] for seed in range(plan.seeds)]
        figures = _resumable.returns(runs)
        table.append(
            {
                "task": task,
                "agent": agent,
                "env_steps": plan.env_steps,
                **interquartile_mean(figures["returns"]),
                **figures,
                "train_returns": [run["train_return_mean"] for run in runs],
            }
        )
    return table


def lost(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each task that hides part of the state, and each agent: the interquartile means on the plain task
    and on this one, and their difference; not where seeds diverged, as the means are of the others."""
    means = {(row["task"], row["agent"]): None if row["diverged"] else row["iqm"] for row in table}
    comparisons = []
    for task, agent in means:
        plain = task.removesuffix("-occluded").removesuffix("-one-frame")
        before, after = means.get((plain, agent)), means[task, agent]
        if plain != task and before is not None and after is not None:
            comparisons.append(
                {"task": task, "agent": agent, "plain": before, "hidden": after, "lost": before - after}
            )
    return comparisons
