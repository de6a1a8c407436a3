"""Return that each strategy reaches on CartPole: real runs on real processes, evaluated on unseen seeds."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cached_run
from murmurate.bench._result import Log, spread
from murmurate.ranges import PositiveInt
from murmurate.record.runs import RecordedRun
from murmurate.strategies import strategies

NAME = "cartpole-learning"
SUMMARY = "evaluation return of cartpole-gala under every strategy; --full: on 3 seeds each"
_GOAL = 475.0


@dataclasses.dataclass(frozen=True)
class CartPoleLearningPlan:
    """Every strategy is trained once for each seed.

    seeds: number of seeds (0, 1, ...). env_steps: number of env steps of each run.
    """

    seeds: PositiveInt = 1
    env_steps: PositiveInt = 500_000


QUICK, FULL = CartPoleLearningPlan(), CartPoleLearningPlan(seeds=3)


def measure(plan: CartPoleLearningPlan, log: Log) -> dict[str, Any]:
    """Mean evaluation return (10 whole games) of each run, and the env steps it took.

    A run ends after the plan's env steps over all replicas. Two sets of parameters are evaluated: the last,
    and the best, which is the checkpoint with the highest mean over the last 100 training episodes. A run has
    reached the goal if either set has; ``reached_by_last`` counts only the last.
    """
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
        runs = {
            name: [_run(plan, name, seed, Path(folder), log) for seed in range(plan.seeds)]
            for name in strategies()
        }

    def reaching(fact: str) -> dict[str, int]:
        """By strategy, the number of runs whose ``fact`` reaches the goal."""
        return {name: sum(run.fact(fact) >= _GOAL for run in its_runs) for name, its_runs in runs.items()}

    reached = reaching("best_eval_return_mean")
    facts = ("eval_return_mean", "best_eval_return_mean", "env_steps", "wall_seconds")
    return {
        "goal": _GOAL,
        "env_steps_at_most": plan.env_steps,
        "seeds": plan.seeds,
        "reached": reached,
        "reached_by_last": reaching("eval_return_mean"),
        "all_reached": all(count == plan.seeds for count in reached.values()),
        **{
            fact: {name: spread([run.fact(fact) for run in its_runs]) for name, its_runs in runs.items()}
            for fact in facts
        },
        "replicas": {name: its_runs[0].replicas for name, its_runs in runs.items()},
    }


def _run(plan: CartPoleLearningPlan, strategy: str, seed: int, where: Path, log: Log) -> RecordedRun:
    replicas = 1 if strategy == "solo" else 4
    options = ("--strategy", strategy, "--replicas", str(replicas), "--seed", str(seed))
    return cached_run(
        where / f"{strategy}-{seed}", "cartpole-gala", (*options, "--env-steps", str(plan.env_steps)), log
    )
