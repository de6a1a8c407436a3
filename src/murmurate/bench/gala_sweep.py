"""Assran et al. 2019, Fig. 1a: how many of 10 runs succeed, against the number of simulators.

It takes months on two cores. After an interruption, the same command continues (see ``_gala``).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from murmurate.bench import _gala, _resumable
from murmurate.bench._gala import GalaPlan, Job
from murmurate.bench._result import Log
from murmurate.bench._resumable import Summary, diverged
from murmurate.errors import Refusal

NAME = "gala-sweep"
SUMMARY = "GALA's Fig. 1a, share of successful runs by simulators, resumable; --full: 600 runs, months"

QUICK = GalaPlan(
    games=("cartpole",),
    seeds=1,
    env_steps=(20_000,),
    learners=2,
    simulators=(16, 32),
    eval_episodes=1,
    where="runs/gala-quick",
)
# The paper names only the number of runs: 600 = 6 games x 10 trials x 2 methods x 5 numbers of simulators.
# The five numbers are our choice; 16 must be among them.
FULL = GalaPlan(simulators=(16, 32, 64, 96, 128))

SOURCE = (
    "the paper's: Assran et al., Gossip-based Actor-Learner Architectures, NeurIPS 2019, Fig. 1a, which "
    "shows the shares without numbers, and section 5: in every sweep GALA-A2C increases or maintains the "
    "share of A2C, and that of A2C falls as simulators are added; not measured here"
)
PAPER_GALA_AT_LEAST_A2C = True  # section 5


_SCALED_DOWN = "fewer env steps than the paper's runs: not comparable with its shares"


def measure(plan: GalaPlan, log: Log) -> dict[str, Any]:
    """The shares of Fig. 1a; the hours that the runs will take are logged first.

    A run succeeds if it scores more than half of the nominal score of A2C with 16 simulators (section 5).
    A score is the mean return of the last 100 training episodes, and the nominal one is the median of our own
    A2C runs with 16 simulators that stayed finite; the paper defines neither. A run that diverged, or in
    which no episode ended, has no score and does not succeed. Raises Refusal without 16 simulators in the
    plan, as no run could succeed.
    """
    if _gala.NOMINAL_SIMULATORS not in plan.simulators:
        raise Refusal(
            f"--simulators is {','.join(map(str, plan.simulators))}, and a run succeeds by the score of A2C "
            f"with {_gala.NOMINAL_SIMULATORS}: add {_gala.NOMINAL_SIMULATORS}."
        )
    runs = _gala.jobs(plan)
    cost = _resumable.expected([job.run for job in runs], log)
    table = rows(plan, {job: _resumable.train(job.run, log) for job in runs})
    compared = [row["gala_at_least_a2c"] for row in table if row["gala_at_least_a2c"] is not None]
    return {
        **({"scaled_down": _SCALED_DOWN} if plan.env_steps[-1] < FULL.env_steps[-1] else {}),
        "expected": cost,
        "paper_source": SOURCE,
        "rows": table,
        "compared": len(compared),
        "gala_at_least_a2c": sum(compared),
    }


def rows(plan: GalaPlan, summaries: Mapping[Job, Mapping[int, Summary]]) -> list[dict[str, Any]]:
    """A row for each game, number of env steps and number of simulators."""

    def scores(game: str, end: int, method: str, simulators: int) -> list[float | None]:
        chosen = (game, method, simulators)
        return [score(s[end]) for j, s in summaries.items() if (j.game, j.method, j.simulators) == chosen]

    table = []
    for game in plan.games:
        for end in plan.env_steps:
            nominal = nominal_score(scores(game, end, "A2C", _gala.NOMINAL_SIMULATORS))
            for simulators in plan.simulators:
                by_method = {method: scores(game, end, method, simulators) for method in _gala.METHODS}
                shares = {method: success_share(values, nominal) for method, values in by_method.items()}
                a2c, gala = shares["A2C"], shares["GALA-A2C"]
                table.append(
                    {
                        "game": game,
                        "env_steps": end,
                        "simulators": simulators,
                        "ours_nominal_score": nominal,
                        "ours_share_a2c": a2c,
                        "ours_share_gala": gala,
                        "scores_a2c": by_method["A2C"],
                        "scores_gala": by_method["GALA-A2C"],
                        "gala_at_least_a2c": None if a2c is None or gala is None else gala >= a2c,
                        "paper_gala_at_least_a2c": PAPER_GALA_AT_LEAST_A2C
                        if game in _gala.SIX_GAMES
                        else None,
                    }
                )
    return table


def score(run: Summary) -> float | None:
    """Mean return of the last 100 training episodes; None if it diverged or no episode has ended."""
    value = run["train_return_mean"]
    return None if value is None or diverged(run) else float(value)


def nominal_score(scores: Sequence[float | None]) -> float | None:
    """The median of the known scores; None without any, or if it is not positive and so cannot be halved."""
    known = [value for value in scores if value is not None]
    median = statistics.median(known) if known else 0.0
    return median if median > 0 else None


def success_share(scores: Sequence[float | None], nominal: float | None) -> float | None:
    """Share of the runs that score more than half of ``nominal``; None without runs or a nominal score."""
    if nominal is None or not scores:
        return None
    return sum(value is not None and value > nominal / 2 for value in scores) / len(scores)
