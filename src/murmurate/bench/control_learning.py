"""Returns of TD3 and SAC on MuJoCo beside the authors' own curves and Stable-Baselines3 with equal settings.

After an interruption, the same command continues (see ``_resumable``).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench import _commands, _resumable
from murmurate.bench._result import Log
from murmurate.bench._resumable import ResumableRun, Summary, diverged
from murmurate.errors import MissingExtra, RunFailed
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.recipes import recipe
from murmurate.record.report import report

NAME = "control-learning"
SUMMARY = "returns of TD3 and SAC on MuJoCo beside the authors' curves and SB3, resumable; --full: 4 seeds"

# Mean and deviation over 10 seeds of the evaluations in sfujim/TD3, learning_curves: of the paper's settings
# (rates 1e-3, batches of 100) and version 1 of the tasks; ours are of their later code's, and version 5
PUBLISHED: dict[tuple[str, str, int], tuple[float, float]] = {
    ("halfcheetah", "td3", 100_000): (5514.0, 554.0),
    ("halfcheetah", "td3", 300_000): (7697.0, 727.0),
    ("halfcheetah", "td3", 1_000_000): (9567.0, 833.0),
    ("hopper", "td3", 100_000): (659.0, 752.0),
    ("hopper", "td3", 300_000): (2410.0, 900.0),
    ("hopper", "td3", 1_000_000): (3391.0, 378.0),
    ("walker2d", "td3", 100_000): (770.0, 586.0),
    ("walker2d", "td3", 300_000): (3335.0, 957.0),
    ("walker2d", "td3", 1_000_000): (4413.0, 1030.0),
    # CleanRL's figures (version 4 of the task)
    ("halfcheetah", "sac", 1_000_000): (9635.0, 1424.0),
}


@dataclass(frozen=True)
class ControlLearningPlan:
    """Every agent is trained once for each world and seed.

    seeds: number of seeds (0, 1, ...). sb3_seeds: number of seeds of Stable-Baselines3; 0: none. env_steps:
    number of env steps of each run. where: the folder that keeps the runs. precision: precision of our
    products between hidden layers.

    worlds: the worlds in which every agent is trained. agents: the agents that are trained. eval_episodes:
    number of games of each final policy.
    """

    worlds: tuple[str, ...] = ("halfcheetah", "hopper", "walker2d")
    agents: tuple[str, ...] = ("td3",)
    env_steps: PositiveInt = 300_000
    seeds: PositiveInt = 4
    sb3_seeds: NonNegativeInt = 4
    eval_episodes: PositiveInt = 10
    precision: str = "float32"
    where: str = "runs/control"


QUICK = ControlLearningPlan(
    worlds=("inverted-pendulum",), env_steps=10_000, seeds=1, sb3_seeds=0, where="runs/control-quick"
)
FULL = ControlLearningPlan()


def measure(plan: ControlLearningPlan, log: Log) -> dict[str, Any]:
    """Mean and deviation over seeds of the evaluation return of the last parameters.

    ``reached``: whether no seed diverged and the mean is at least the published mean minus one deviation.
    ``welch_p``: p-value of Welch's two-sided test that our returns and Stable-Baselines3's have the same
    mean; None if a seed diverged, or all returns of a side are equal. ``diverged``: number of seeds that did;
    the other figures are of the rest.
    """
    if plan.sb3_seeds and _commands.missing("stable-baselines3"):
        raise MissingExtra("stable-baselines3", "bench", "a comparison with Stable-Baselines3")
    if min(plan.seeds, plan.sb3_seeds) > 1 and _commands.missing("scipy"):
        raise MissingExtra("scipy", "topics", "Welch's test")
    cases = list(itertools.product(plan.worlds, plan.agents))
    runs = {(*case, seed): _planned(plan, *case, seed) for case in cases for seed in range(plan.seeds)}
    cost = _resumable.expected(list(runs.values()), log)
    summaries = {key: _resumable.train(run, log)[plan.env_steps] for key, run in runs.items()}
    rows = []
    for world, agent in cases:
        ours = [summaries[world, agent, seed] for seed in range(plan.seeds)]
        theirs = [_sb3(plan, world, agent, seed, log) for seed in range(plan.sb3_seeds)]
        rows.append(_row(plan, world, agent, ours, theirs))
    pages = []
    for world in plan.worlds:
        page = Path(plan.where) / f"{world}-to-{plan.env_steps}.html"
        report([run.folder for key, run in runs.items() if key[0] == world], page)
        pages.append(str(page))
    return {"expected": cost, "rows": rows, "reports": pages}


def _planned(plan: ControlLearningPlan, world: str, agent: str, seed: int) -> ResumableRun:
    settings = (
        "--seed", str(seed),
        "--stop-at-return", "none",
        "--eval-episodes", str(plan.eval_episodes),
        "--agent.precision", plan.precision,
    )  # fmt: skip
    name = f"{world}-{agent}-{plan.precision}-to-{plan.env_steps}-seed-{seed}"
    return ResumableRun(
        f"{world}-{agent}",
        settings,
        seed,
        (plan.env_steps,),
        Path(plan.where) / name,
        label=f"{world}, {agent}",
        speed_like=f"{world} {agent}",
        speed_settings=("--replay.learning-starts", "500", "--random-env-steps", "500"),
    )


def _sb3(plan: ControlLearningPlan, world: str, agent: str, seed: int, log: Log) -> float:
    """The evaluation return of a run, which is kept in a file."""
    run: Any = recipe(f"{world}-{agent}")
    random_env_steps, games = run.source.random_env_steps, plan.eval_episodes
    name = f"sb3-{world}-{agent}-to-{plan.env_steps}-games-{games}-seed-{seed}.json"
    file = Path(plan.where) / name
    if not file.exists():
        words = [agent, run.world.id, *map(str, (plan.env_steps, random_env_steps, games, seed, file))]
        command = [sys.executable, "-m", "murmurate.bench._sb3_learning", *words]
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode:
            raise RunFailed(f"Stable-Baselines3 failed: {completed.stderr.strip()[-400:]}")
    eval_return = float(json.loads(file.read_text())["eval_return_mean"])
    log(f"Stable-Baselines3, {world}, {agent}, seed {seed}: evaluation {eval_return:.1f}")
    return eval_return


def _row(
    plan: ControlLearningPlan, world: str, agent: str, ours: Sequence[Summary], theirs: Sequence[float]
) -> dict[str, Any]:
    finite = [float(run["eval_return_mean"]) for run in ours if not diverged(run)]
    published = PUBLISHED.get((world, agent, plan.env_steps))
    mean = statistics.fmean(finite) if finite else None
    diverged_seeds = len(ours) - len(finite)
    return {
        "world": world,
        "agent": agent,
        "env_steps": plan.env_steps,
        "mean": mean,
        "deviation": statistics.stdev(finite) if len(finite) > 1 else None,
        "returns": finite,
        "diverged": diverged_seeds,
        "published": published and {"mean": published[0], "deviation": published[1]},
        "reached": published
        and not diverged_seeds
        and mean is not None
        and mean >= published[0] - published[1],
        "sb3_mean": statistics.fmean(theirs) if theirs else None,
        "sb3_returns": list(theirs),
        "welch_p": None if diverged_seeds else _welch(finite, theirs),
        "hours": sum(run["wall_seconds"] for run in ours) / 3600,
    }


def _welch(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The p-value; None with fewer than two values on a side, and where it is not defined."""
    if min(len(one), len(other)) < 2 or len({*one}) == len({*other}) == 1:
        return None
    from scipy import stats

    p = float(stats.ttest_ind(one, other, equal_var=False).pvalue)
    return p if math.isfinite(p) else None
