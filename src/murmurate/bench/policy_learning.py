"""Mean returns that ARM, IMPALA, PPO and TRPO reach on CartPole, and PPO on HalfCheetah beside CleanRL."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cached_run
from murmurate.bench._result import Log, spread
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.record.runs import RecordedRun

NAME = "policy-learning"
SUMMARY = "evaluation return of cartpole-arm, -impala, -ppo and -trpo; --full: 5 seeds, and halfcheetah-ppo"

_AGENTS = ("arm", "impala", "ppo", "trpo")
_GOAL = 475.0  # mean return of an evaluation on CartPole
# CleanRL's ppo_continuous_action on HalfCheetah-v4 after 1 M steps: mean return of training episodes, and its
# deviation over seeds
_PUBLISHED = {"halfcheetah-ppo": (1443.0, 46.0)}


@dataclasses.dataclass(frozen=True)
class PolicyLearningPlan:
    """Each run takes all of its recipe's env steps.

    cartpole_seeds: number of seeds (0, 1, ...) of each agent on CartPole. halfcheetah_seeds: number of seeds
    of halfcheetah-ppo. where: the folder that keeps the runs; a finished run is not run again on the same
    processor with the same versions.
    """

    cartpole_seeds: PositiveInt = 1
    halfcheetah_seeds: NonNegativeInt = 0
    where: str = "runs/policy-learning"

    @property
    def recipes(self) -> dict[str, int]:
        """The number of seeds of each recipe."""
        seeds = {f"cartpole-{name}": self.cartpole_seeds for name in _AGENTS}
        return seeds | {"halfcheetah-ppo": self.halfcheetah_seeds} if self.halfcheetah_seeds else seeds


QUICK = PolicyLearningPlan()
FULL = PolicyLearningPlan(cartpole_seeds=5, halfcheetah_seeds=3)


def measure(plan: PolicyLearningPlan, log: Log) -> dict[str, Any]:
    """Episode returns, over seeds: the mean of 10 greedy evaluation games with the last parameters, and the
    mean of the last 100 training episodes, which is what CleanRL publishes. A seed has reached the goal if
    the evaluation on CartPole is at least 475, or the training return elsewhere at least the published
    mean."""
    runs_by_recipe = {
        name: [_run(plan, name, seed, log) for seed in range(seeds)] for name, seeds in plan.recipes.items()
    }
    return {
        "goal": _GOAL,
        "published": {name: {"mean": mean, "deviation": d} for name, (mean, d) in _PUBLISHED.items()},
        "recipes": {name: _figures(name, runs) for name, runs in runs_by_recipe.items()},
        "all_reached": all(_reached(name, runs) == len(runs) for name, runs in runs_by_recipe.items()),
    }


def _run(plan: PolicyLearningPlan, name: str, seed: int, log: Log) -> RecordedRun:
    return cached_run(Path(plan.where) / f"{name}-seed-{seed}", name, ("--seed", str(seed)), log)


def _figures(name: str, runs: list[RecordedRun]) -> dict[str, Any]:
    facts = ("eval_return_mean", "train_return_mean", "env_steps", "updates", "wall_seconds")
    return {
        **{fact: spread([run.fact(fact) for run in runs]) for fact in facts},
        "reached": _reached(name, runs),
        "seeds": len(runs),
    }


def _reached(name: str, runs: list[RecordedRun]) -> int:
    if name in _PUBLISHED:
        mean, _ = _PUBLISHED[name]
        return sum(run.fact("train_return_mean") >= mean for run in runs)
    return sum(run.fact("eval_return_mean") >= _GOAL for run in runs)
