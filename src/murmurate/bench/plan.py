"""What ``murmurate plan`` predicts against what is measured, for configurations drawn at random."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from typing import Any

from murmurate.bench._result import Log
from murmurate.mapping import measure as costs
from murmurate.mapping.check import measured
from murmurate.mapping.profile import DeviceProfile
from murmurate.mapping.search import Candidate, runs_with_exchange, search
from murmurate.ranges import PositiveInt, PositiveSeconds, Seed
from murmurate.recipes import recipe

NAME = "plan"
SUMMARY = "throughput that a plan predicts from measured costs, over what the same run reaches"


@dataclasses.dataclass(frozen=True)
class PlanPlan:
    """recipes: recipes that are profiled, then run in their plan's first choice and in ``placements``
    configurations drawn at random. exhaustive: recipes of which all configurations are run. seconds: duration
    of a run that is measured. seed: seed of the draws.

    placements: number of configurations drawn for each recipe.
    """

    recipes: tuple[str, ...] = ("cartpole-a2c", "cartpole-dqn", "cartpole-impala")
    placements: PositiveInt = 2
    exhaustive: tuple[str, ...] = ()
    seconds: PositiveSeconds = 6.0
    seed: Seed = 0


QUICK = PlanPlan()
FULL = PlanPlan(
    (
        *("cartpole-a2c", "cartpole-dqn", "cartpole-gala", "cartpole-ppo", "cartpole-impala"),
        *("cartpole-apex-dqn", "cartpole-spo-dqn", "pong-a2c", "pong-dqn", "pong-ppo"),
        *("hopper-td3", "hopper-sac"),
    ),
    placements=4,
    exhaustive=("cartpole-a2c", "cartpole-gala", "cartpole-ppo"),
    seconds=10.0,
)


def measure(plan: PlanPlan, log: Log) -> dict[str, Any]:
    """``median_error``, ``worst_error``: relative errors of the predictions for the drawn configurations.
    ``choice_over_best``: how much faster the fastest measured configuration of a recipe is than its plan's
    first choice, the greatest over the recipes; ``choice_over_best_of_all``: the same over the exhaustive
    recipes alone."""
    draws = random.Random(plan.seed)
    profile = DeviceProfile.here(costs.cores(), "cpu")
    cases: list[dict[str, Any]] = []
    choice_shortfall: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name in plan.recipes:
        began = time.monotonic()
        run = recipe(name)
        costs.add_recipe(profile, run, log)
        for exchanging_run in runs_with_exchange(run, profile.cores):
            costs.add_exchange(profile, exchanging_run, log)
        seconds[name] = time.monotonic() - began
        candidates = search(run, profile)
        choice = candidates[0]
        compared = (
            candidates[1:]
            if name in plan.exhaustive
            else draws.sample(candidates[1:], min(plan.placements, len(candidates) - 1))
        )
        rates = {}
        for candidate in [choice, *compared]:
            rates[candidate.name] = measured(candidate.run, plan.seconds)
            case = _case(name, candidate, rates[candidate.name], candidate is choice)
            cases.append(case)
            log(f"{name} {case['configuration']}: predicted over measured {case['ratio']:.2f}")
        choice_shortfall[name] = max(rates.values()) / rates[choice.name] - 1
    drawn_errors = [case["error"] for case in cases if not case["choice"]]
    return {
        "median_error": statistics.median(drawn_errors),
        "worst_error": max(drawn_errors),
        "choice_over_best": max(choice_shortfall.values()),
        "choice_over_best_of_all": max((choice_shortfall[name] for name in plan.exhaustive), default=None),
        "profile_seconds": seconds,
        "cases": cases,
        "cores": profile.cores,
    }


def _case(name: str, candidate: Candidate, rate: float, is_choice: bool) -> dict[str, Any]:
    ratio = candidate.prediction.env_steps_per_second / rate
    return {
        "recipe": name,
        "configuration": candidate.name,
        "choice": is_choice,
        "predicted": candidate.prediction.env_steps_per_second,
        "measured": rate,
        "ratio": ratio,
        "error": abs(ratio - 1),
        "bottleneck": candidate.prediction.bottleneck,
    }
