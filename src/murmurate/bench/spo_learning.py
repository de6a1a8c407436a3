"""Zhang 2022, Figures 5.11 and 5.13: SPO-TD3 with 1, 2 and 4 learners, and with H of 5, 10 and 25.

All runs have the same number of env steps and of transitions in a batch of all learners together. After
an interruption, the same command continues (see ``_resumable``).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench import _commands, _resumable
from murmurate.bench._result import Log
from murmurate.bench._resumable import ResumableRun
from murmurate.errors import MissingExtra, Refusal
from murmurate.ranges import PositiveInt
from murmurate.record.score_statistics import interquartile_mean

NAME = "spo-learning"
SUMMARY = "returns of SPO-TD3 against the number of learners and H, resumable; --full: 3 seeds"

CLAIM = (
    "Zhang 2022, section 5.3.2.1: more learners change the learning efficiency of most tasks little "
    "(Hammer's falls), and a larger H typically lowers it; figures only, not measured here"
)


@dataclass(frozen=True)
class SPOLearningPlan:
    """learners: numbers of learners L, each run with H = ``period``. periods: values of H, each run with the
    most learners.

    batch: batch size of all learners together. env_steps: number of env steps of all learners together.
    random_env_steps: number of random env steps of all learners together before the first update. rounds:
    number of rounds of ``period`` updates from one update of the target nets to the next; other H keep this
    number of updates. seeds: number of seeds (0, 1, ...). where: the folder that keeps the runs.

    worlds: the worlds that are played. period: H, the number of updates between two means of the parameters.
    eval_episodes: number of games of each final policy.
    """

    worlds: tuple[str, ...] = ("hopper",)
    learners: tuple[PositiveInt, ...] = (1, 2, 4)
    periods: tuple[PositiveInt, ...] = (5, 10, 25)
    period: PositiveInt = 10
    rounds: PositiveInt = 20  # F
    batch: PositiveInt = 256
    env_steps: PositiveInt = 300_000
    random_env_steps: PositiveInt = 24_000
    seeds: PositiveInt = 3
    eval_episodes: PositiveInt = 10
    where: str = "runs/spo"


QUICK = SPOLearningPlan(
    worlds=("inverted-pendulum",),
    learners=(1, 2),
    periods=(10,),
    env_steps=6_000,
    random_env_steps=1_000,
    seeds=1,
    where="runs/spo-quick",
)
FULL = SPOLearningPlan()


def measure(plan: SPOLearningPlan, log: Log) -> dict[str, Any]:
    """Evaluation returns of the last averaged policies; the hours that the runs will take are logged
    first. Raises Refusal for numbers of learners that do not divide the batch, MissingExtra without SciPy."""
    cases = _cases(plan)
    if uneven := [learners for learners, _ in cases if plan.batch % learners]:
        common = math.lcm(*plan.learners)
        raise Refusal(
            f"{uneven[0]} learners cannot share a batch of {plan.batch} equally. Use --batch "
            f"{math.ceil(plan.batch / common) * common}, or other --learners."
        )
    if _commands.missing("scipy"):
        raise MissingExtra("scipy", "topics", "the interquartile mean")
    runs = {
        (world, *case, seed): _planned(plan, world, *case, seed)
        for seed, world, case in itertools.product(range(plan.seeds), plan.worlds, cases)
    }
    cost = _resumable.expected(list(runs.values()), log)
    summaries = {key: _resumable.train(run, log)[plan.env_steps] for key, run in runs.items()}
    rows = []
    for world, (learners, period) in itertools.product(plan.worlds, cases):
        ends = [summaries[world, learners, period, seed] for seed in range(plan.seeds)]
        figures = _resumable.returns(ends)
        rows.append(
            {
                "world": world,
                "learners": learners,
                "period": period,
                **interquartile_mean(figures["returns"]),
                **figures,
                "updates": [summary["updates"] for summary in ends],
            }
        )
    pages = _resumable.reports(runs, plan.where)
    return {"expected": cost, "paper": CLAIM, "rows": rows, "reports": pages}


def _cases(plan: SPOLearningPlan) -> list[tuple[int, int]]:
    """(learners, H), each once."""
    by_learners = [(learners, plan.period) for learners in plan.learners]
    return list(dict.fromkeys([*by_learners, *((max(plan.learners), period) for period in plan.periods)]))


def _planned(plan: SPOLearningPlan, world: str, learners: int, period: int, seed: int) -> ResumableRun:
    settings = (
        "--replicas", str(learners),
        "--strategy.period", str(period),
        "--agent.batch", str(plan.batch // learners),
        "--agent.target-every", str(plan.rounds * plan.period),
        "--replay.samples-per-insert", str(plan.batch),
        "--replay.learning-starts", str(plan.random_env_steps // learners),
        "--random-env-steps", str(plan.random_env_steps // learners),
        "--seed", str(seed),
        "--stop-at-return", "none",
        "--eval-episodes", str(plan.eval_episodes),
    )  # fmt: skip
    name = f"{world}-L{learners}-H{period}-to-{plan.env_steps}-seed-{seed}"
    return ResumableRun(
        f"{world}-spo-td3",
        settings,
        seed,
        (plan.env_steps,),
        Path(plan.where) / name,
        label=f"{world}, {learners} learners, H = {period}",
        speed_like=f"{world} {learners}",
        speed_settings=("--replay.learning-starts", "500", "--random-env-steps", "500"),
    )
