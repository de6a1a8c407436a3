"""GALA beside IMPALA, A2C and all-reduce, at equal env steps and at equal seconds.

Assran et al. 2019, Table 1 and Figures 1b and 1c, at a smaller scale. After an interruption, the same command
continues (see ``_resumable``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from murmurate.bench import _gala, _resumable
from murmurate.bench._result import Log, spread
from murmurate.bench._resumable import ResumableRun, diverged
from murmurate.ranges import PositiveInt
from murmurate.record.report import report
from murmurate.record.runs import Axis, RecordedRun, open_run

NAME = "actor-learners"
SUMMARY = (
    "GALA, IMPALA, A2C and all-reduce on Pong at equal env steps and seconds, resumable; --full: 3 seeds"
)

# method -> algorithm, and its options; {n}: number of learners or actors, {each}: simulators of one of them,
# {all}: simulators of all of them
METHODS: dict[str, tuple[str, str]] = {
    "A2C": ("a2c", "--replicas 1 --simulators {all}"),
    "all-reduce": ("a2c", "--replicas {n} --simulators {each}"),
    "GALA": ("gala", "--replicas {n} --simulators {each}"),
    "IMPALA": ("impala", "--actors {n} --simulators {all}"),
}


@dataclass(frozen=True)
class ActorLearnersPlan:
    """Every method is trained once for each seed.

    seeds: number of seeds (0, 1, ...). env_steps: number of env steps of all learners of a run. processes:
    number of learners, or of actors of IMPALA's one learner. simulators: number of simulators of all of them
    together. where: the folder that keeps the runs.

    world: the world that is played. eval_episodes: number of games of each final policy.
    """

    world: str = "pong"
    env_steps: PositiveInt = 2_000_000
    seeds: PositiveInt = 3
    processes: PositiveInt = 2
    simulators: PositiveInt = 32
    eval_episodes: PositiveInt = 10
    where: str = "runs/actor-learners"


QUICK = ActorLearnersPlan(world="cartpole", env_steps=40_000, seeds=1, simulators=16)
FULL = ActorLearnersPlan()


def measure(plan: ActorLearnersPlan, log: Log) -> dict[str, Any]:
    """Evaluation returns after all env steps, training returns at equal env steps and at equal seconds, and
    speeds, each with its spread over seeds; the expected hours are logged first.

    The equal seconds are those of the slowest run of the fastest method. ``diverged``: number of runs of each
    method that did, which the figures leave out. Curves against env steps and seconds are in the report.
    """
    runs = {(method, seed): planned(plan, method, seed) for seed in range(plan.seeds) for method in METHODS}
    cost = _resumable.expected(list(runs.values()), log)
    summaries = {key: _resumable.train(run, log)[plan.env_steps] for key, run in runs.items()}
    finite = {key: open_run(runs[key].folder) for key, summary in summaries.items() if not diverged(summary)}
    page = Path(plan.where) / f"{plan.world}-to-{plan.env_steps}.html"
    report([run.folder for run in runs.values()], page)
    lost = {m: sum(key[0] == m and key not in finite for key in runs) for m in METHODS}
    return {"expected": cost, **compared(finite), "diverged": lost, "report": str(page)}


def planned(plan: ActorLearnersPlan, method: str, seed: int) -> ResumableRun:
    """Raises Refusal if the processes cannot have equally many simulators."""
    algorithm, options = METHODS[method]
    each = _gala.share(plan.simulators, plan.processes)
    counts = {"n": plan.processes, "each": each, "all": plan.simulators}
    rate = _gala.learning_rate(f"{plan.world}-{algorithm}", plan.simulators)
    settings = (
        *options.format(**counts).split(),
        *(() if algorithm == "impala" else ("--agent.learning-rate", repr(rate))),
        "--seed", str(seed),
        "--stop-at-return", "none",
        "--eval-episodes", str(plan.eval_episodes),
    )  # fmt: skip
    name = f"{plan.world}-{method.lower()}-{plan.processes}-{plan.simulators}-to-{plan.env_steps}-seed-{seed}"
    return ResumableRun(
        f"{plan.world}-{algorithm}",
        settings,
        seed,
        (plan.env_steps,),
        Path(plan.where) / name,
        label=method,
        speed_like=method,
    )


def compared(runs: Mapping[tuple[str, int], RecordedRun]) -> dict[str, Any]:
    """The rows of the table: one for each method of which at least one run has not diverged. Training returns
    are of the runs in which an episode had ended by then, None without any."""
    by_method: dict[str, list[RecordedRun]] = {}
    for (method, _), run in runs.items():
        by_method.setdefault(method, []).append(run)
    slowest = [max(float(run.fact("wall_seconds")) for run in its_runs) for its_runs in by_method.values()]
    seconds = min(slowest, default=0.0)
    env_steps = min((float(run.fact("env_steps")) for run in runs.values()), default=0.0)
    rows = [
        {
            "method": method,
            "seeds": len(its_runs),
            "eval_return_mean": spread([run.fact("eval_return_mean") for run in its_runs]),
            "return_at_equal_env_steps": _returns_at(its_runs, "total_env_steps", env_steps),
            "return_at_equal_seconds": _returns_at(its_runs, "time_seconds", seconds),
            # not the run's own figure, which leaves out what was made before it was resumed
            "env_steps_per_second": spread(
                [run.fact("env_steps") / run.fact("wall_seconds") for run in its_runs]
            ),
            "wall_seconds": spread([run.fact("wall_seconds") for run in its_runs]),
        }
        for method, its_runs in by_method.items()
    ]
    return {"equal_seconds": seconds, "equal_env_steps": env_steps, "rows": rows}


def _returns_at(runs: Sequence[RecordedRun], axis: Axis, x: float) -> dict[str, Any] | None:
    """The spread over runs of ``_return_at``; None if no run has it."""
    returns = [value for run in runs if (value := _return_at(run, axis, x)) is not None]
    return spread(returns) if returns else None


def _return_at(run: RecordedRun, axis: Axis, x: float) -> float | None:
    """The mean training return over replicas at the last record up to ``x`` of ``axis``; None if there is
    none."""
    curve = run.mean("return_mean", axis)
    if curve is None:
        return None
    positions, values = curve
    earlier = np.flatnonzero(positions <= x)
    return float(values[earlier[-1]]) if len(earlier) else None
