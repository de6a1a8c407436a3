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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from murmurate.bench import _commands, _resumable
from murmurate.bench._result import Log, mean
from murmurate.bench._resumable import ResumableRun, Summary, diverged
from murmurate.errors import MissingExtra, Refusal, RunFailed
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.recipes import recipe

NAME = "control-learning"
SUMMARY = "returns of TD3 and SAC on MuJoCo beside the authors' curves and SB3, resumable; --full: 4 seeds"

# Mean and deviation over 10 seeds of the evaluations in sfujim/TD3, learning_curves: of the paper's settings
# and version 1 of the tasks; ours are of version 5
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
    # CleanRL's figures (version 4 of the task), of training episodes
    ("halfcheetah", "sac", 1_000_000): (9635.0, 1424.0),
}
_OF_TRAINING = ("sac",)  # agents whose published figures are of training episodes, whose actions are sampled


@dataclass(frozen=True)
class Hyperparameters:
    """What ours and Stable-Baselines3 have in common.

    rate: Adam's learning rate, of all nets. hidden: width of the two layers of each net. random_env_steps:
    env steps with random actions, before the first update; an update per env step follows.
    """

    batch: int
    rate: float
    hidden: int
    random_env_steps: int

    def options(self) -> tuple[str, ...]:
        """Options of ``murmurate train``."""
        start, batch, rate = str(self.random_env_steps), str(self.batch), str(self.rate)
        return (
            "--random-env-steps", start, "--replay.learning-starts", start,
            "--agent.batch", batch, "--replay.samples-per-insert", batch,
            "--agent.policy-rate", rate, "--agent.critic-rate", rate,
            "--agent.hidden", str(self.hidden),
        )  # fmt: skip


@dataclass(frozen=True)
class ControlLearningPlan:
    """Every agent is trained once for each world and seed.

    settings: ``recipe``: those of the recipes, which are of the later code of TD3's authors. ``paper``: those
    of TD3's paper (Fujimoto et al. 2018, appendix C), of which its authors' curves are: rates 1e-3, batches
    of 100, random actions for the first 1,000 env steps (HalfCheetah and Ant: 10,000). The paper's layers
    have 400 and 300 units, and both of ours 400. Only for td3.

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
    settings: Literal["recipe", "paper"] = "recipe"
    precision: str = "float32"
    where: str = "runs/control"


QUICK = ControlLearningPlan(
    worlds=("inverted-pendulum",), env_steps=10_000, seeds=1, sb3_seeds=0, where="runs/control-quick"
)
FULL = ControlLearningPlan(settings="paper")


def measure(plan: ControlLearningPlan, log: Log) -> dict[str, Any]:
    """Mean and deviation over seeds of the evaluation return of the last parameters.

    ``reached``: whether no seed diverged and the mean is at least the published mean minus one deviation; of
    the last 100 training episodes (``train_returns``) where the published figures are of such.
    ``welch_p``: p-value of Welch's two-sided test that our returns and Stable-Baselines3's have the same
    mean; None if a seed diverged, or all returns of each side are equal. ``diverged``: number of seeds that
    did; the other figures are of the rest.
    """
    if plan.settings == "paper" and plan.agents != ("td3",):
        raise Refusal("The paper's settings are TD3's: add --agents td3, or leave out --settings paper.")
    if plan.sb3_seeds and not {*plan.agents} <= {"td3", "sac"}:
        raise Refusal("Only td3 and sac are compared with Stable-Baselines3: for others use --sb3-seeds 0.")
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
    pages = _resumable.reports(runs, plan.where)
    return {"expected": cost, "rows": rows, "reports": pages}


def _hyperparameters(plan: ControlLearningPlan, world: str, agent: str) -> Hyperparameters:
    if plan.settings == "paper":
        return Hyperparameters(100, 1e-3, 400, 10_000 if world in ("halfcheetah", "ant") else 1_000)
    run: Any = recipe(f"{world}-{agent}")
    return Hyperparameters(run.learner.batch, 3e-4, run.learner.hidden, run.source.random_env_steps)


def _planned(plan: ControlLearningPlan, world: str, agent: str, seed: int) -> ResumableRun:
    settings: tuple[str, ...] = (
        "--seed", str(seed),
        "--stop-at-return", "none",
        "--eval-episodes", str(plan.eval_episodes),
        "--agent.precision", plan.precision,
    )  # fmt: skip
    if plan.settings == "paper":
        settings += _hyperparameters(plan, world, agent).options()
    name = f"{_name(plan, world, agent)}-{plan.precision}-to-{plan.env_steps}-seed-{seed}"
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


def _name(plan: ControlLearningPlan, world: str, agent: str) -> str:
    return f"{world}-{agent}" if plan.settings == "recipe" else f"{world}-{agent}-{plan.settings}"


def _sb3(plan: ControlLearningPlan, world: str, agent: str, seed: int, log: Log) -> float:
    """The evaluation return of a run, which is kept in a file."""
    run: Any = recipe(f"{world}-{agent}")
    name = f"sb3-{_name(plan, world, agent)}-to-{plan.env_steps}-games-{plan.eval_episodes}-seed-{seed}.json"
    file = Path(plan.where) / name
    if not file.exists():
        run_settings = {
            "algorithm": agent,
            "env_id": run.world.id,
            "env_steps": plan.env_steps,
            "games": plan.eval_episodes,
            "seed": seed,
            **asdict(_hyperparameters(plan, world, agent)),
        }
        command = [sys.executable, "-m", "murmurate.bench._sb3_learning", json.dumps(run_settings), str(file)]
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode:
            raise RunFailed(f"Stable-Baselines3 failed: {completed.stderr.strip()[-400:]}")
    eval_return = float(json.loads(file.read_text())["eval_return_mean"])
    log(f"Stable-Baselines3, {world}, {agent}, seed {seed}: evaluation {eval_return:.1f}")
    return eval_return


def _row(
    plan: ControlLearningPlan, world: str, agent: str, ours: Sequence[Summary], theirs: Sequence[float]
) -> dict[str, Any]:
    figures = _resumable.returns(ours)
    published = PUBLISHED.get((world, agent, plan.env_steps))
    diverged_seeds = figures["diverged"]
    train_returns = [run["train_return_mean"] for run in ours if not diverged(run)]
    compared = train_returns if agent in _OF_TRAINING else figures["returns"]
    return {
        "world": world,
        "agent": agent,
        "env_steps": plan.env_steps,
        **figures,
        "train_returns": train_returns,
        "published": published and {"mean": published[0], "deviation": published[1]},
        "reached": published
        and not diverged_seeds
        and statistics.fmean(compared) >= published[0] - published[1],
        "sb3_mean": mean(theirs),
        "sb3_returns": list(theirs),
        "welch_p": None if diverged_seeds else _welch(figures["returns"], theirs),
    }


def _welch(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The p-value; None with fewer than two values on a side, and where it is not defined."""
    if min(len(one), len(other)) < 2 or len({*one}) == len({*other}) == 1:
        return None
    from scipy import stats

    p = float(stats.ttest_ind(one, other, equal_var=False).pvalue)
    return p if math.isfinite(p) else None
