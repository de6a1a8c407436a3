"""Seconds to a target return: of the configuration that ``murmurate plan --objective time`` chooses, of the
recipe as it is, and of the best of a random search.

After an interruption, the same command continues: costs and finished trainings are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cache_file, cached_value
from murmurate.bench._result import Log, spread
from murmurate.errors import Refusal
from murmurate.mapping import learning
from murmurate.mapping import measure as costs
from murmurate.mapping import profile as profiles
from murmurate.mapping.candidates import Candidate, runs_with_exchange, strategies_of
from murmurate.mapping.choice import learn
from murmurate.mapping.profile import DeviceProfile
from murmurate.mapping.search import UNCHANGED, search
from murmurate.native.cores import usable_cores
from murmurate.ranges import AnyFloat, PositiveInt
from murmurate.recipes import recipe
from murmurate.training.run import Run
from murmurate.training.run_folder import plain

NAME = "plan-target"
# of counting runs that miss the target, of candidates and of seeds; rows of another rule are not reused
_RULE = 5
SUMMARY = (
    "seconds to a return: the recipe's over a plan's choice's, and the choice's over a random search's best; "
    "--full: 40 trials"
)


@dataclasses.dataclass(frozen=True)
class PlanTargetPlan:
    """recipes: recipes that are planned. targets: for each, the mean return of the last 100 training episodes
    that ends a run. trials: number of configurations that the random search tries, with one seed each.
    finalists: number of its fastest ones that run with all seeds.

    where: the folder that keeps rows, costs and trainings; what is measured with the same settings and
    versions, on the same processor, is not run again.
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
    """A row for each recipe: seconds to the target, without the start of processes. ``missed``: how many runs
    of a configuration missed the target; their seconds, to their end, count as infinite below.

    ``default_over_choice``: the recipe's seconds over those of the plan's choice, the median over pairs with
    the same seed of which one at least reached the target; ``choice_over_best``: the choice's over those of
    the search's best configuration. None where no such pair is left, or the median is infinite. The worst of
    each over the recipes is also given; None if any is None. ``unfinished``: number of the runs from which
    the plan was made that missed the target. ``planning_seconds``: how long the plan took, since the last
    interruption; it counts in no ratio. Raises Refusal unless each recipe has a target, which it reaches by
    itself.
    """
    if len(plan.recipes) != len(plan.targets):
        raise Refusal(
            f"there are {len(plan.recipes)} recipes and {len(plan.targets)} targets. Give each recipe one."
        )
    rows = []
    for name, target in zip(plan.recipes, plan.targets, strict=True):
        settings = [name, target, plan.trials, plan.finalists, plan.seeds, _RULE]
        measure_row = functools.partial(_row, name, target, plan, log)
        rows.append(cached_value(Path(plan.where), name, settings, measure_row))
    return {
        "least_default_over_choice": _worst(min, [row["default_over_choice"] for row in rows]),
        "greatest_choice_over_best": _worst(max, [row["choice_over_best"] for row in rows]),
        "rows": rows,
        "cores": usable_cores(),
    }


def _row(name: str, target: float, plan: PlanTargetPlan, log: Log) -> dict[str, Any]:
    run, where = recipe(name), Path(plan.where)

    def train(run: Run, target: float, seed: int) -> learning.Training:
        of = [learning.learned_by(run), plain(run.placement), target, seed, _RULE]
        training = cached_value(where, f"{name} training", of, lambda: learning.to_target(run, target, seed))
        return learning.Training(*training)

    began = time.monotonic()
    candidates, unfinished = _planned(run, target, cache_file(where, f"{name} profile", target), log, train)
    planning_seconds = time.monotonic() - began
    choice = candidates[0]
    draws = random.Random(0)
    trials = []
    # other seeds than those of the runs from which the plan is made, and than those of the trials
    compared = range(learning.MOST_SEEDS, learning.MOST_SEEDS + plan.seeds)
    in_any_order = sorted(candidates, key=lambda each: each.name)  # the same trials for another prediction
    for number, tried in enumerate(draws.sample(in_any_order, min(plan.trials, len(candidates)))):
        training = train(tried.run, target, compared.stop + number)
        trials.append((training.seconds if training.reached else math.inf, number, tried))
        log(f"{name} trial {number + 1}, {tried.name}: {_told(training)}")
    finalists = [tried for _, _, tried in sorted(trials, key=lambda trial: trial[:2])[: plan.finalists]]
    configurations = {UNCHANGED: run} | {each.name: each.run for each in [choice, *finalists]}
    seconds: dict[str, list[float]] = {named: [] for named in configurations}
    counted: dict[str, list[float]] = {named: [] for named in configurations}
    for seed in compared:  # all configurations in turn, on a machine that may change meanwhile
        for named, configuration in configurations.items():
            training = train(configuration, target, seed)
            seconds[named].append(training.seconds)
            counted[named].append(training.seconds if training.reached else math.inf)
            log(f"{name} seed {seed}, {named}: {_told(training)}")
    best = min((each.name for each in finalists), key=lambda named: statistics.median(counted[named]))
    return {
        "recipe": name,
        "target": target,
        "configurations": len(candidates),
        "choice": choice.name,
        "best": best,
        "planning_seconds": planning_seconds,
        "predicted_seconds": choice.predicted,
        "choice_seconds": spread(seconds[choice.name]),
        "default_seconds": spread(seconds[UNCHANGED]),
        "best_seconds": spread(seconds[best]),
        "missed": {named: values.count(math.inf) for named, values in counted.items()},
        "unfinished": unfinished,
        "default_over_choice": median_ratio(counted[UNCHANGED], counted[choice.name]),
        "choice_over_best": median_ratio(counted[choice.name], counted[best]),
    }


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float | None:
    """The median of their ratios, without pairs that are both infinite; None if it is not finite."""
    pairs = [(a, b) for a, b in zip(values, others, strict=True) if not a == b == math.inf]
    median = statistics.median(a / b for a, b in pairs) if pairs else math.inf
    return median if math.isfinite(median) else None


def _worst(extreme: Callable[[Iterable[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return extreme(known) if len(known) == len(values) else None


def _told(training: learning.Training) -> str:
    return f"{training.seconds:.1f} s{'' if training.reached else ', target missed'}"


def _planned(
    run: Run, target: float, kept: Path, log: Log, train: learning.Train
) -> tuple[list[Candidate], int]:
    """The candidates of ``murmurate plan``, the best predicted first, of which the one without changes is
    called ``UNCHANGED``; and how many runs missed the target. kept: the file of the profile."""
    profile = profiles.load(kept) if kept.exists() else DeviceProfile.here(usable_cores(), "cpu")
    save = functools.partial(profiles.save, profile, kept)
    costs.add_variants(profile, run, log, keep=save)
    for exchanging_run in runs_with_exchange(run, profile.cores, strategies_of(run, shorter=True)):
        costs.add_exchange(profile, exchanging_run, log)
        save()
    known = learn(run, profile, target, log, train=train, keep=save)
    return search(run, profile, "time"), known.unfinished
