"""Do the agents that learn from a replay learn CartPole? And what does it cost to draw batches ahead?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from murmurate.bench._kept import kept_run
from murmurate.bench._result import Log, spread
from murmurate.record.runs import RecordedRun

NAME = "value-learning"
SUMMARY = "evaluation return of cartpole-dqn, -apex-dqn, -spo-dqn, -fqi, and of the relaxed loop"

_GOAL = 475.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """recipes: with how many seeds each. depths: D of the relaxed loop (0 is the first recipe's own).

    where: the folder that keeps the runs.
    """

    recipes: tuple[tuple[str, int], ...] = (("dqn", 1), ("apex-dqn", 1), ("spo-dqn", 1), ("fqi", 1))
    depths: tuple[int, ...] = (10,)
    depth_seeds: int = 1
    where: str = "runs/value-learning"


FULL = Plan((("dqn", 5), ("apex-dqn", 3), ("spo-dqn", 3), ("fqi", 3)), (0, 1, 10, 50, 200), 5)


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """Mean return of 10 evaluation games of each run's last parameters, and updates per second, over seeds.

    A run takes the recipe's env steps and is not stopped before. Runs are kept, so the bench goes on where it
    was cut off.
    """
    plan = plan or (FULL if full else Plan())
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
        "plan": dataclasses.asdict(plan),
    }


def _run(plan: Plan, name: str, seed: int, options: tuple[str, ...], log: Log) -> RecordedRun:
    words = [name, *(word.removeprefix("--replay.") for word in options), f"seed-{seed}"]
    folder = Path(plan.where) / "-".join(words)
    return kept_run(folder, f"cartpole-{name}", ("--seed", str(seed), *options), log)


def _figures(runs: list[RecordedRun]) -> dict[str, Any]:
    return {
        "eval_return_mean": spread([run.fact("eval_return_mean") for run in runs]),
        "env_steps": spread([run.fact("env_steps") for run in runs]),
        "updates_per_second": spread([run.fact("updates") / run.fact("wall_seconds") for run in runs]),
        "wall_seconds": spread([run.fact("wall_seconds") for run in runs]),
        "reached": _reached(runs),
        "seeds": len(runs),
    }


def _reached(runs: Iterable[RecordedRun]) -> int:
    return sum(run.fact("eval_return_mean") >= _GOAL for run in runs)
