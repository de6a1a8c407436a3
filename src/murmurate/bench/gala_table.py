"""Assran et al. 2019, Table 1: A2C and GALA-A2C on six Atari games, with the paper's figures.

It takes weeks on two cores. After an interruption, the same command continues (see ``_gala``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from murmurate.bench import _gala, _resumable
from murmurate.bench._gala import GalaPlan, Job
from murmurate.bench._result import Log
from murmurate.bench._resumable import Summary, diverged

NAME = "gala-table"
SUMMARY = "GALA's Table 1, A2C and GALA-A2C on six games, resumable; --full: 10 seeds to 40 million env steps"

QUICK = GalaPlan(
    games=("pong",),
    seeds=1,
    env_steps=(1_000, 2_000),
    learners=2,
    simulators=(8,),
    eval_episodes=1,
    where="runs/gala-quick",
)
FULL = GalaPlan()

SOURCE = (
    "the paper's: Assran et al., Gossip-based Actor-Learner Architectures, NeurIPS 2019, Table 1 "
    "(mean and standard error of 10 games of the best of its training seeds); not measured here"
)
# (method, env steps): mean and standard error, games in the order of _gala.SIX_GAMES
PAPER: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {
    ("A2C", 25_000_000): (
        (8755, 811), (419, 3), (21, 0), (16805, 172), (1850, 5), (2846, 22),
    ),
    ("A2C", 40_000_000): (
        (9829, 1355), (495, 57), (21, 0), (19928, 99), (1894, 6), (3021, 36),
    ),
    ("GALA-A2C", 25_000_000): (
        (9500, 1020), (690, 72), (21, 0), (18810, 37), (1874, 4), (2726, 189),
    ),
    ("GALA-A2C", 40_000_000): (
        (10188, 1316), (690, 72), (21, 0), (20150, 28), (1892, 6), (3074, 69),
    ),
}  # fmt: skip


_SCALED_DOWN = "a rehearsal with too few env steps to learn: not comparable with the paper's scores"


def measure(plan: GalaPlan, log: Log) -> dict[str, Any]:
    """The rows of Table 1; the hours that the runs will take are logged first.

    ``ours_mean`` and ``ours_stderr`` are over the evaluation games (up to 30 no-ops, argmax) of one final
    policy: the policy of the seed whose last 100 training episodes had the highest mean return. (The paper
    does not name its criterion; the games that select a seed must not also be its score.) The final policy of
    several learners has the mean of their parameters.
    """
    runs = _gala.jobs(plan)
    cost = _resumable.expected([job.run for job in runs], log)
    summaries = {job: _resumable.train(job.run, log) for job in runs}
    return {
        **({"scaled_down": _SCALED_DOWN} if plan.env_steps[-1] < FULL.env_steps[0] else {}),
        "expected": cost,
        "paper_source": SOURCE,
        "rows": rows(plan, summaries),
    }


def rows(plan: GalaPlan, summaries: Mapping[Job, Mapping[int, Summary]]) -> list[dict[str, Any]]:
    """A row for each number of simulators, method, number of env steps and game."""
    table = []
    for simulators in plan.simulators:
        for method in _gala.METHODS:
            for end in plan.env_steps:
                for game in plan.games:
                    runs = [
                        summaries[job][end]
                        for job in sorted(summaries, key=lambda job: job.seed)
                        if (job.game, job.method, job.simulators) == (game, method, simulators)
                    ]
                    setup = {"game": game, "method": method, "env_steps": end, "simulators": simulators}
                    table.append({**setup, **ours(runs), **paper_figures(method, end, game)})
    return table


def ours(runs: Sequence[Summary]) -> dict[str, Any]:
    """The score of the best of ``runs`` (one for each seed), and figures of all of them."""
    finite = [run for run in runs if not diverged(run)]
    best = max(finite, key=_training_return, default=None)
    return {
        "ours_mean": None if best is None else best["eval_return_mean"],
        "ours_stderr": None if best is None else best["eval_return_stderr"],
        "ours_seed": None if best is None else best["seed"],
        "seeds": len(runs),
        "diverged": len(runs) - len(finite),
        "eval_return_by_seed": {str(run["seed"]): run["eval_return_mean"] for run in finite},
        "train_return_by_seed": {str(run["seed"]): run["train_return_mean"] for run in finite},
        "lost_replicas": sum(len(run["dead_replicas"]) for run in runs),
        "wall_hours": sum(run["wall_seconds"] for run in runs) / 3600,
    }


def _training_return(run: Summary) -> float:
    value = run["train_return_mean"]  # None where no episode has ended
    return float("-inf") if value is None else float(value)


def paper_figures(method: str, env_steps: int, game: str) -> dict[str, Any]:
    """The paper's figures for the nearest number of env steps; None for games that it does not have."""
    if game not in _gala.SIX_GAMES:
        return {"paper_mean": None, "paper_stderr": None, "paper_env_steps": None}
    steps = min((s for m, s in PAPER if m == method), key=lambda s: abs(s - env_steps))
    mean, stderr = PAPER[method, steps][_gala.SIX_GAMES.index(game)]
    return {"paper_mean": mean, "paper_stderr": stderr, "paper_env_steps": steps}
