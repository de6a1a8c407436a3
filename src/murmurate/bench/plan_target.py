"""Seconds to a target return: of the configuration that ``murmurate plan --objective time`` chooses, of the
recipe as it is, and of the best of a random search."""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cached_value
from murmurate.bench._result import Log, ratios, spread
from murmurate.errors import Refusal
from murmurate.mapping import learning
from murmurate.mapping import measure as costs
from murmurate.mapping.profile import DeviceProfile
from murmurate.mapping.search import UNCHANGED, Candidate, runs_with_exchange, search
from murmurate.ranges import AnyFloat, PositiveInt
from murmurate.recipes import recipe
from murmurate.training.run import Run

NAME = "plan-target"
SUMMARY = (
    "seconds to a return: the recipe's over a plan's choice's, and the choice's over a random search's best; "
    "--full: 40 trials"
)


@dataclasses.dataclass(frozen=True)
class PlanTargetPlan:
    """recipes: recipes that are planned. targets: for each, the mean return of the last 100 training episodes
    that ends a run. trials: number of configurations that the random search tries, with one seed each.
    finalists: number of its fastest ones that run with all seeds.

    where: the folder that keeps the rows; a recipe that is measured with the same settings is not run again.
    seeds: number of seeds of the recipe, the plan's choice and each finalist.
    """

    recipes: tuple[str, ...] = ("cartpole-a2c",)
    targets: tuple[AnyFloat, ...] = (300.0,)
    trials: PositiveInt = 6
    finalists: PositiveInt = 2
    seeds: PositiveInt = 2
    where: str = "runs/plan-target"


QUICK = PlanTargetPlan()
FULL = PlanTargetPlan(
    ("cartpole-a2c", "cartpole-dqn", "cartpole-ppo", "pong-a2c"), (300.0, 300.0, 300.0, -15.0), 40, 4, 5
)


def measure(plan: PlanTargetPlan, log: Log) -> dict[str, Any]:
    """A row for each recipe: seconds to the target, without the start of processes. A run that misses the
    target counts with the seconds to its end (``missed``: how many did).

    ``default_over_choice``: the recipe's seconds over those of the plan's choice, the median over pairs with
    the same seed; ``choice_over_best``: the choice's over those of the search's best configuration. The worst
    of each over the recipes is also given.
    """
    if len(plan.recipes) != len(plan.targets):
        raise Refusal(
            f"there are {len(plan.recipes)} recipes and {len(plan.targets)} targets. Give each recipe one."
        )
    profile = DeviceProfile.here(costs.cores(), "cpu")
    rows = []
    for name, target in zip(plan.recipes, plan.targets, strict=True):
        settings = [name, target, plan.trials, plan.finalists, plan.seeds]
        measure_row = functools.partial(_row, name, target, profile, plan, log)
        rows.append(cached_value(Path(plan.where), name, settings, measure_row))
    return {
        "least_default_over_choice": min(row["default_over_choice"] for row in rows),
        "greatest_choice_over_best": max(row["choice_over_best"] for row in rows),
        "rows": rows,
        "cores": profile.cores,
    }


def _row(name: str, target: float, profile: DeviceProfile, plan: PlanTargetPlan, log: Log) -> dict[str, Any]:
    run = recipe(name)
    candidates = _planned(run, target, profile, log)
    choice = candidates[0]
    draws = random.Random(0)
    trials = []
    for number, tried in enumerate(draws.sample(candidates, min(plan.trials, len(candidates)))):
        # with seeds that the comparison below does not use
        taken = learning.to_target(tried.run, target, seed=plan.seeds + number).seconds
        trials.append((taken, number, tried))
        log(f"{name} trial {number + 1}, {tried.name}: {taken:.1f} s")
    finalists = [tried for _, _, tried in sorted(trials, key=lambda trial: trial[:2])[: plan.finalists]]
    configurations = {UNCHANGED: run} | {each.name: each.run for each in [choice, *finalists]}
    seconds: dict[str, list[float]] = {named: [] for named in configurations}
    missed = dict.fromkeys(configurations, 0)
    for seed in range(plan.seeds):  # all configurations in turn, on a machine that may change meanwhile
        for named, configuration in configurations.items():
            _, needed_seconds, reached = learning.to_target(configuration, target, seed)
            seconds[named].append(needed_seconds)
            missed[named] += not reached
            log(f"{name} seed {seed}, {named}: {needed_seconds:.1f} s{'' if reached else ', target missed'}")
    best = min((each.name for each in finalists), key=lambda named: statistics.median(seconds[named]))
    return {
        "recipe": name,
        "target": target,
        "configurations": len(candidates),
        "choice": choice.name,
        "best": best,
        "predicted_seconds": choice.predicted,
        "choice_seconds": spread(seconds[choice.name]),
        "default_seconds": spread(seconds[UNCHANGED]),
        "best_seconds": spread(seconds[best]),
        "missed": missed,
        "default_over_choice": statistics.median(ratios(seconds[UNCHANGED], seconds[choice.name])),
        "choice_over_best": statistics.median(ratios(seconds[choice.name], seconds[best])),
    }


def _planned(run: Run, target: float, profile: DeviceProfile, log: Log) -> list[Candidate]:
    """The candidates of ``murmurate plan``, the best predicted first; the one without changes is called
    ``UNCHANGED``."""
    measured = costs.add_recipe(profile, run, log)
    for exchanging_run in runs_with_exchange(run, profile.cores):
        costs.add_exchange(profile, exchanging_run, log)
    measured.learning = learning.measure(run, target, log)
    return search(run, profile, "time")
