"""Return that agents with a replay reach on CartPole; for DQN, also with batches drawn ahead (relaxed
loop)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cached_run
from murmurate.bench._result import Log, spread
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.record.runs import RecordedRun

NAME = "value-learning"
SUMMARY = "evaluation return of cartpole-dqn, -apex-dqn, -spo-dqn, -fqi, and of the relaxed loop"

_GOAL = 475.0


@dataclasses.dataclass(frozen=True)
class ValueLearningPlan:
    """recipes: algorithms with their numbers of seeds. depths: values of D of the relaxed loop (0: as in the
    recipe).

    where: the folder that keeps the runs; a finished run is not run again on the same
    processor with the same versions.

    depth_seeds: number of seeds of each depth.
    """

    recipes: tuple[tuple[str, PositiveInt], ...] = (("dqn", 1), ("apex-dqn", 1), ("spo-dqn", 1), ("fqi", 1))
    depths: tuple[NonNegativeInt, ...] = (10,)
    depth_seeds: PositiveInt = 1
    where: str = "runs/value-learning"


QUICK = ValueLearningPlan()
FULL = ValueLearningPlan(
    (("dqn", 5), ("apex-dqn", 3), ("spo-dqn", 3), ("fqi", 3)), (0, 1, 10, 50, 200), depth_seeds=5
)


def measure(plan: ValueLearningPlan, log: Log) -> dict[str, Any]:
    """Mean return of 10 evaluation games of each run's last parameters, and updates per second, over seeds.

    A run takes all of the recipe's env steps.
    """
    by_recipe = {
        name: [_run(plan, name, seed, (), log) for seed in range(seeds)] for name, seeds in plan.recipes
    }
    by_depth = {
        depth: [
            _run(plan, "dqn", seed, ("--replay.ahead", str(depth)) if depth else (), log)
            for seed in range(plan.depth_seeds)
        ]
        for depth in plan.depths
    }
    return {
        "goal": _GOAL,
        "recipes": {f"cartpole-{name}": _figures(runs) for name, runs in by_recipe.items()},
        "all_reached": all(_reached(runs) == len(runs) for runs in by_recipe.values()),
        "relaxed_loop": {f"D={depth}": _figures(runs) for depth, runs in by_depth.items()},
    }


def _run(plan: ValueLearningPlan, name: str, seed: int, options: tuple[str, ...], log: Log) -> RecordedRun:
    words = [name, *(word.removeprefix("--replay.") for word in options), f"seed-{seed}"]
    folder = Path(plan.where) / "-".join(words)
    return cached_run(folder, f"cartpole-{name}", ("--seed", str(seed), *options), log)


def _figures(runs: list[RecordedRun]) -> dict[str, Any]:
    return {
        **{fact: spread([run.fact(fact) for run in runs]) for fact in ("eval_return_mean", "env_steps")},
        "updates_per_second": spread([run.fact("updates") / run.fact("wall_seconds") for run in runs]),
        "wall_seconds": spread([run.fact("wall_seconds") for run in runs]),
        "reached": _reached(runs),
        "seeds": len(runs),
    }


def _reached(runs: Iterable[RecordedRun]) -> int:
    return sum(run.fact("eval_return_mean") >= _GOAL for run in runs)
