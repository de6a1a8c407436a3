"""Zhang 2022, Fig. 3.5 and 3.6: returns of MEMR, MBPO and SAC at equal env steps, and how much work each
needs.

After an interruption, the same command continues (see ``_resumable``).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench import _resumable
from murmurate.bench._result import Log, mean
from murmurate.bench._resumable import ResumableRun, Summary, diverged
from murmurate.errors import unknown
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.record.runs import RecordedRun, open_run

NAME = "memr"
SUMMARY = "returns and work of MEMR, MBPO and SAC on two tasks, resumable; --agents adds MEMR's ablations"

# task -> env steps, and how many of them are random at the start, for all three algorithms
BUDGETS = {"inverted-pendulum": (15_000, 500), "hopper": (70_000, 5_000)}
# agent -> the algorithm of its recipe, and options that make a variant of it (Fig. 3.6)
AGENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sac": ("sac", ()),
    "mbpo": ("mbpo", ()),
    # MBPO with as many updates as MEMR makes on inverted-pendulum and on hopper
    "mbpo-updates-2.5": ("mbpo", ("--updates-per-step", "2.5")),
    "mbpo-updates-5": ("mbpo", ("--updates-per-step", "5")),
    "memr": ("memr", ()),
    "memr-alpha-0.2": ("memr", ("--rollouts.alpha", "0.2")),
    "memr-alpha-1": ("memr", ("--rollouts.alpha", "1.0")),
    "memr-updates-1": ("memr", ("--updates-per-step", "1")),
    "memr-updates-10": ("memr", ("--updates-per-step", "10")),
    "memr-keeps-20000": ("memr", ("--rollouts.kept", "20")),
    "memr-keeps-1000000": ("memr", ("--rollouts.kept", "1000")),
}
_MAIN = ("sac", "mbpo", "memr")
# the authors' curve of MBPO on Hopper, version 2 of the task, read off a figure (+-150)
PUBLISHED = {("hopper", "mbpo"): {50_000: 1_700, 70_000: 3_100, 100_000: 3_330}}


@dataclass(frozen=True)
class MEMRPlan:
    """Every agent is trained once for each task and seed.

    tasks: names in ``BUDGETS``. agents: names in ``AGENTS``. seeds: number of seeds (0, 1, ...). mbpo_seeds:
    number of seeds of MBPO, which takes longest. env_steps: number of env steps of each run; 0: as in
    ``BUDGETS``. points: number of evaluations of a run. where: the folder that keeps the runs.

    eval_episodes: number of games of each final policy.
    """

    tasks: tuple[str, ...] = tuple(BUDGETS)
    agents: tuple[str, ...] = _MAIN
    seeds: PositiveInt = 5
    mbpo_seeds: PositiveInt = 2
    env_steps: NonNegativeInt = 0
    points: PositiveInt = 10
    eval_episodes: PositiveInt = 10
    where: str = "runs/memr"


QUICK = MEMRPlan(
    tasks=("inverted-pendulum",), seeds=1, mbpo_seeds=1, env_steps=3_000, where="runs/memr-quick"
)
FULL = MEMRPlan()


def measure(plan: MEMRPlan, log: Log) -> dict[str, Any]:
    """For each task and agent, the evaluation returns of the last policies, one for each seed, and ``curve``:
    the means over seeds of evaluations while they learned, without the last one.

    ``policy_updates``, ``imagined_transitions`` and ``model_error`` are means over seeds. All of these are of
    the seeds that did not diverge, and None or empty if all did; ``diverged``: number of the others.
    ``claims``: for each task, whether none of MEMR's seeds diverged and its mean return is at least MBPO's
    minus one deviation of MBPO's seeds (None with fewer than two of them), and MEMR's shares of MBPO's
    updates and imagined transitions (Zhang 2022, section 3.3.1, claims 1/4 of the updates, and fewer
    transitions).
    """
    runs = {
        (task, agent, seed): planned(plan, task, agent, seed)
        for task, agent in itertools.product(plan.tasks, plan.agents)
        for seed in range(plan.mbpo_seeds if agent == "mbpo" else plan.seeds)
    }
    cost = _resumable.expected(list(runs.values()), log)
    summaries = {key: _resumable.train(run, log)[run.ends[-1]] for key, run in runs.items()}
    rows = [
        _row(task, agent, {key[2]: runs[key] for key in runs if key[:2] == (task, agent)}, summaries)
        for task, agent in itertools.product(plan.tasks, plan.agents)
    ]
    return {
        "expected": cost,
        "published": [
            {"task": task, "agent": agent, "returns": returns}
            for (task, agent), returns in PUBLISHED.items()
            if task in plan.tasks
        ],
        "rows": rows,
        "claims": claims(rows),
        "reports": _resumable.reports(runs, plan.where),
    }


def planned(plan: MEMRPlan, task: str, agent: str, seed: int) -> ResumableRun:
    """Raises Refusal for an unknown task or agent."""
    if task not in BUDGETS:
        raise unknown("task", task, BUDGETS)
    if agent not in AGENTS:
        raise unknown("agent of this benchmark", agent, AGENTS)
    algorithm, variant = AGENTS[agent]
    budget, random = BUDGETS[task]
    env_steps = plan.env_steps or budget
    starts = ["--random-env-steps", str(random), "--replay.learning-starts", str(random)]
    settings = (
        *(starts if algorithm == "sac" else ()),
        *variant,
        "--seed", str(seed),
        "--stop-at-return", "none",
        "--eval-episodes", str(plan.eval_episodes),
        "--evaluate-every-env-steps", str(max(1, env_steps // plan.points)),
    )  # fmt: skip
    # while the speed is measured, learning begins early
    speed_settings = ["--random-env-steps", "300", "--replay.learning-starts", "300"]
    if algorithm != "sac":
        speed_settings = ["--learning-starts", "300"]
    return ResumableRun(
        f"{task}-{algorithm}",
        settings,
        seed,
        (env_steps,),
        Path(plan.where) / f"{task}-{agent}-to-{env_steps}-seed-{seed}",
        label=f"{task}, {agent}",
        speed_like=f"{task} {agent}",
        speed_settings=tuple(speed_settings),
    )


def _row(
    task: str,
    agent: str,
    runs: Mapping[int, ResumableRun],
    summaries: Mapping[tuple[str, str, int], Summary],
) -> dict[str, Any]:
    final = [summaries[task, agent, seed] for seed in runs]
    ended = {seed: summary for seed, summary in zip(runs, final, strict=True) if not diverged(summary)}
    recorded = [open_run(runs[seed].folder) for seed in ended]
    return {
        "task": task,
        "agent": agent,
        "env_steps": next(iter(runs.values())).ends[-1],
        **_resumable.returns(final),
        "policy_updates": mean([summary["updates"] for summary in ended.values()]),
        "imagined_transitions": mean([_last(run, "imagined_transitions") for run in recorded]),
        "model_error": mean([_last(run, "model_error") for run in recorded]),
        "curve": _curve(recorded),
    }


def _last(run: RecordedRun, key: str) -> float:
    """The last value of a field; 0 where there is none."""
    values = [series.value[-1] for series in run.series(key).values()]
    return float(values[0]) if values else 0.0


def _curve(runs: Sequence[RecordedRun]) -> list[dict[str, float]]:
    """Means over the runs of their evaluations that were due at the same number of env steps, where all have
    one, and of the numbers of env steps at which these were made, this one or a little later."""
    known = [_evaluations(run) for run in runs]
    if not known:
        return []
    return [
        {
            "env_steps": statistics.fmean(each[due][0] for each in known),
            "return": statistics.fmean(each[due][1] for each in known),
        }
        for due in sorted(set(known[0]).intersection(*known))
    ]


def _evaluations(run: RecordedRun) -> dict[int, tuple[float, float]]:
    """(env steps, mean return) of evaluations, by which multiple of ``evaluate_every_env_steps`` was due: one
    is left out while another goes on, and where it failed."""
    found, every = run.evaluations, run.run["evaluate_every_env_steps"]
    if found is None:
        return {}
    pairs = zip(found.env_steps, found.mean, strict=True)
    return {int(at // every): (float(at), float(mean)) for at, mean in pairs}


def claims(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """MEMR against MBPO on each task that has both."""
    results = []
    by_case = {(row["task"], row["agent"]): row for row in rows}
    for task in dict.fromkeys(row["task"] for row in rows):
        memr, mbpo = by_case.get((task, "memr")), by_case.get((task, "mbpo"))
        if memr is None or mbpo is None or memr["mean"] is None or mbpo["mean"] is None:
            continue
        # from one seed nobody knows how far a seed of MBPO may be from its mean
        least = None if mbpo["deviation"] is None else mbpo["mean"] - mbpo["deviation"]
        results.append(
            {
                "task": task,
                "reached": None if least is None else not memr["diverged"] and memr["mean"] >= least,
                "share_of_updates": _share(memr, mbpo, "policy_updates"),
                "share_of_imagined_transitions": _share(memr, mbpo, "imagined_transitions"),
            }
        )
    return results


def _share(memr: Mapping[str, Any], mbpo: Mapping[str, Any], name: str) -> float | None:
    """MEMR's number over MBPO's; None where MBPO has none, as with a budget that ends before its first
    update."""
    return memr[name] / mbpo[name] if mbpo[name] else None
