"""Assran et al. 2019, Fig. 1a: how many of 10 runs succeed, against the number of simulators.

Months of this machine; cut off at any time, the same command goes on where it was (see ``_gala``).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from murmurate.bench import _gala
from murmurate.bench._gala import Facts, Job, Plan
from murmurate.bench._result import Log
from murmurate.errors import Refusal

NAME = "gala-sweep"
SUMMARY = "GALA's Fig. 1a, share of successful runs by simulators, resumable; --full: 600 runs, months"

QUICK = Plan(
    games=("cartpole",),
    seeds=1,
    env_steps=(20_000,),
    learners=2,
    simulators=(16, 32),
    eval_episodes=1,
    where="runs/gala-quick",
)
# The counts of simulators are ours: the text has only the number of runs, 600, which is 6 games x 10 trials x
# 2 methods x 5 counts.
FULL = Plan(simulators=(16, 32, 64, 96, 128))

SOURCE = (
    "the paper's: Assran et al., Gossip-based Actor-Learner Architectures, NeurIPS 2019, section 5 and "
    "Fig. 1a; its shares are drawn, not printed. Printed is: in every sweep GALA-A2C increases or maintains "
    "the share of A2C, and that of A2C falls as simulators are added; not measured here"
)
PAPER_GALA_AT_LEAST_A2C = True  # Fig. 1a, caption


def measure(
    full: bool,
    log: Log,
    plan: Plan | None = None,
    *,
    run: _gala.Runner = _gala.spawn,
    per_second: Callable[[Job], float] = _gala.measured_speed,
) -> dict[str, Any]:
    """The shares of Fig. 1a, and first the hours that they will take.

    A run succeeds if it scores more than half of what A2C with 16 simulators nominally scores (section 5).
    A score is the mean return of the last 100 training episodes, and the nominal one the median of our own
    A2C runs with 16 simulators that stayed finite; the paper names neither. A run that diverged, or in
    which no episode ended, has no score and does not succeed.

    Raises Refusal for a plan without 16 simulators: there would be nothing to compare with.
    """
    plan = plan or (FULL if full else QUICK)
    if _gala.NOMINAL_SIMULATORS not in plan.simulators:
        raise Refusal(
            f"success is measured by A2C with {_gala.NOMINAL_SIMULATORS} simulators, and the plan has only "
            f"{plan.simulators}. Add {_gala.NOMINAL_SIMULATORS} to its simulators."
        )
    field = _gala.jobs(plan)
    cost = _gala.expected(field, per_second, log)
    facts = _gala.all_facts(field, run, log)
    found = rows(plan, facts)
    compared = [row["gala_at_least_a2c"] for row in found if row["gala_at_least_a2c"] is not None]
    return {
        **({"scaled_down": _SCALED_DOWN} if plan.env_steps[-1] < FULL.env_steps[-1] else {}),
        "expected": cost,
        "paper_source": SOURCE,
        "rows": found,
        "compared": len(compared),
        "gala_at_least_a2c": sum(compared),
        "plan": dataclasses.asdict(plan),
    }


_SCALED_DOWN = "a rehearsal on CartPole, where few steps earn something: it says nothing of the paper's games"


def rows(plan: Plan, facts: Mapping[Job, Mapping[int, Facts]]) -> list[dict[str, Any]]:
    """One for each game, number of env steps and number of simulators."""

    def scores(game: str, end: int, method: str, simulators: int) -> list[float | None]:
        chosen = (game, method, simulators)
        return [score(facts[j][end]) for j in facts if (j.game, j.method, j.simulators) == chosen]

    found = []
    for game in plan.games:
        for end in plan.env_steps:
            nominal = nominal_score(scores(game, end, "A2C", _gala.NOMINAL_SIMULATORS))
            for simulators in plan.simulators:
                of = {method: scores(game, end, method, simulators) for method in _gala.METHODS}
                shares = {method: success_share(values, nominal) for method, values in of.items()}
                a2c, gala = shares["A2C"], shares["GALA-A2C"]
                found.append(
                    {
                        "game": game,
                        "env_steps": end,
                        "simulators": simulators,
                        "ours_nominal_score": nominal,
                        "ours_share_a2c": a2c,
                        "ours_share_gala": gala,
                        "scores_a2c": of["A2C"],
                        "scores_gala": of["GALA-A2C"],
                        "gala_at_least_a2c": None if a2c is None or gala is None else gala >= a2c,
                        "paper_gala_at_least_a2c": PAPER_GALA_AT_LEAST_A2C
                        if game in _gala.SIX_GAMES
                        else None,
                    }
                )
    return found


def score(run: Facts) -> float | None:
    """Mean return of the last 100 training episodes; None if it diverged or no episode has ended."""
    value = run["train_return_mean"]
    return None if value is None or _gala.diverged(run) else float(value)


def nominal_score(scores: Sequence[float | None]) -> float | None:
    """The median of the scores there are; None where half of it would be no bar: none, or not above 0."""
    known = [value for value in scores if value is not None]
    median = statistics.median(known) if known else 0.0
    return median if median > 0 else None


def success_share(scores: Sequence[float | None], nominal: float | None) -> float | None:
    """Share of all runs that score more than half of ``nominal``; None where that, or a run, is missing."""
    if nominal is None or not scores:
        return None
    return sum(value is not None and value > nominal / 2 for value in scores) / len(scores)
