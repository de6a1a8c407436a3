"""What ``murmurate plan`` predicts against what is measured, for configurations drawn at random.

After an interruption, the same command continues: costs and rates are kept in files.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cache_file, cached_value
from murmurate.bench._result import Log
from murmurate.errors import Refusal
from murmurate.mapping import measure as costs
from murmurate.mapping.candidates import Candidate, runs_with_exchange
from murmurate.mapping.check import measured
from murmurate.mapping.learning import digest
from murmurate.mapping.profile import DeviceProfile, load, save
from murmurate.mapping.search import search
from murmurate.native.cores import usable_cores
from murmurate.ranges import PositiveInt, PositiveSeconds, Seed
from murmurate.recipes import recipe
from murmurate.training.host import hardware
from murmurate.training.run import Run
from murmurate.training.run_folder import plain

NAME = "plan"
SUMMARY = "throughput that a plan predicts from measured costs, over what the same run reaches; resumable"


@dataclasses.dataclass(frozen=True)
class PlanPlan:
    """recipes: recipes that are profiled, then run in their plan's first choice and in ``placements``
    configurations drawn at random. exhaustive: recipes of which all configurations are run. seconds: duration
    of a run that is measured. seed: seed of the draws.

    where: the folder that keeps the profile and the rates; what was measured with the same versions, on the
        same cores and GPUs, is not measured again. After a change of the code use another one.
    placements: number of configurations drawn for each recipe.
    rounds: number of times that each configuration of a recipe is measured, one round after the other. The
        greatest rate counts, as what disturbs a measurement makes it slower; so it is with the costs.
    """

    recipes: tuple[str, ...] = ("cartpole-a2c", "cartpole-dqn", "cartpole-impala")
    placements: PositiveInt = 2
    rounds: PositiveInt = 1
    exhaustive: tuple[str, ...] = ()
    seconds: PositiveSeconds = 6.0
    seed: Seed = 0
    where: str = "runs/plan"


QUICK = PlanPlan()
FULL = PlanPlan(
    (
        *("cartpole-a2c", "cartpole-dqn", "cartpole-gala", "cartpole-ppo", "cartpole-impala"),
        *("cartpole-apex-dqn", "cartpole-spo-dqn", "pong-a2c", "pong-dqn", "pong-ppo"),
        *("hopper-td3", "hopper-sac"),
    ),
    placements=4,
    rounds=2,
    exhaustive=("cartpole-a2c", "cartpole-gala", "cartpole-ppo"),
    seconds=10.0,
)


def measure(plan: PlanPlan, log: Log) -> dict[str, Any]:
    """``median_error`` and ``worst_error``: of the relative errors of the predictions for the drawn
    configurations, as many of each recipe; ``median_error_exhaustive`` and ``worst_error_exhaustive``: for
    all configurations of the exhaustive recipes. The plan's first choices count in none of them.

    ``choice_over_best``: how much faster the fastest measured configuration of a recipe is than its
    plan's first choice, the greatest over the recipes; ``choice_over_best_of_all``: the same over the
    exhaustive recipes alone. The fastest of many measurements is so by chance, too: those that were
    faster than the choice are measured again, together with it, in as many rounds, and only these count
    here. ``profile_seconds``: for each recipe, how long its costs took; after an interruption those that
    were left.

    ``raw``: for each case, the predicted seconds of the parts of a batch, the rate in each round, and in each
    of the rounds in which it was measured again.

    Raises Refusal for an exhaustive recipe that is not among ``recipes``.
    """
    if other := [name for name in plan.exhaustive if name not in plan.recipes]:
        raise Refusal(f"--exhaustive names {', '.join(other)}, and --recipes does not. Add it there.")
    draws = random.Random(plan.seed)
    where = Path(plan.where)
    here = [usable_cores(), hardware().get("gpus", [])]
    path = cache_file(where, "profile", here)
    profile = load(path) if path.exists() else DeviceProfile.here(usable_cores(), "cpu")
    cases: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    choice_shortfall: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name in plan.recipes:
        run = recipe(name)
        spent = _add_costs(profile, run, path, log)
        seconds[name] = cached_value(where, f"{name} costs", here, lambda: spent)  # noqa: B023
        candidates = search(run, profile)
        choice = candidates[0]
        others = candidates[1:]
        drawn = draws.sample(others, min(plan.placements, len(others)))
        chosen = [choice, *(others if name in plan.exhaustive else drawn)]
        rates = _rates(plan, here, name, chosen, 1, log)
        faster = [other for other in chosen if max(rates[other.name]) > max(rates[choice.name])]
        again = _rates(plan, here, name, [choice, *faster], 1 + plan.rounds, log) if faster else {}
        for candidate in chosen:
            case = _case(name, candidate, rates[candidate.name])
            cases.append(case | {"choice": candidate is choice, "drawn": candidate in drawn})
            found = {"rates": rates[candidate.name], "again": again.get(candidate.name, [])}
            raw.append({"seconds": candidate.prediction.seconds} | found)
        compared = again or rates
        choice_shortfall[name] = max(map(max, compared.values())) / max(compared[choice.name]) - 1
    return {
        **errors(cases, plan.exhaustive),
        "choice_over_best": max(choice_shortfall.values()),
        "choice_over_best_of_all": max((choice_shortfall[name] for name in plan.exhaustive), default=None),
        "profile_seconds": seconds,
        "cases": cases,
        "raw": raw,
        "cores": profile.cores,
    }


def _rates(
    plan: PlanPlan, here: list[Any], name: str, candidates: Sequence[Candidate], first: int, log: Log
) -> dict[str, list[float]]:
    """The rate of each candidate of the recipe ``name`` in each of ``plan.rounds`` rounds, which are
    numbered from ``first`` on. here: what the rates depend on besides."""
    rates = {candidate.name: list[float]() for candidate in candidates}
    for number in range(first, first + plan.rounds):
        for candidate in candidates:
            settings = digest([plain(candidate.run.learner), plain(candidate.run.source)])
            key = [candidate.name, settings, plan.seconds, number, *here]
            rate = functools.partial(measured, candidate.run, plan.seconds)
            rates[candidate.name].append(cached_value(Path(plan.where), f"{name} rate", key, rate))
            ratio = candidate.prediction.env_steps_per_second / rates[candidate.name][-1]
            log(f"{name} {candidate.name}, round {number}: predicted over measured {ratio:.2f}")
    return rates


def _add_costs(profile: DeviceProfile, run: Run, path: Path, log: Log) -> float:
    """Measure what a plan of ``run`` needs and the profile lacks, and keep it in the file ``path``. Returns
    the seconds that it took."""
    began = time.monotonic()
    costs.add_variants(profile, run, log, keep=lambda: save(profile, path))
    for exchanging_run in runs_with_exchange(run, profile.cores):
        if costs.add_exchange(profile, exchanging_run, log):
            save(profile, path)
    return time.monotonic() - began


def errors(cases: Sequence[Mapping[str, Any]], exhaustive: Sequence[str]) -> dict[str, float | None]:
    """The medians and the worst of the cases' errors: see ``measure``. None where there are no such cases, as
    where each recipe has one configuration that fits in memory."""
    others = [case for case in cases if not case["choice"]]
    drawn = [case["error"] for case in others if case["drawn"]]
    of_all = [case["error"] for case in others if case["recipe"] in exhaustive]
    return {
        "median_error": statistics.median(drawn) if drawn else None,
        "worst_error": max(drawn, default=None),
        "median_error_exhaustive": statistics.median(of_all) if of_all else None,
        "worst_error_exhaustive": max(of_all, default=None),
    }


def _case(name: str, candidate: Candidate, rates: Sequence[float]) -> dict[str, Any]:
    rate = max(rates)
    ratio = candidate.prediction.env_steps_per_second / rate
    return {
        "recipe": name,
        "configuration": candidate.name,
        "predicted": candidate.prediction.env_steps_per_second,
        "measured": rate,
        "ratio": ratio,
        "error": abs(ratio - 1),
        "bottleneck": candidate.prediction.bottleneck,
    }
