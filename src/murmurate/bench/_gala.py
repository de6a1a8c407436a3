"""Shared by ``gala-table`` and ``gala-sweep``: their runs, the runs' results, and how long the rest will
take.

A run keeps its folder below ``GalaPlan.where``, with its summary at each planned number of env steps in
``summary-<env steps>.json``. A finished run is not run again, and an interrupted one goes on from its newest
checkpoint. Equal runs of the two benchmarks have the same folder, so one benchmark reuses those of the other.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from murmurate.agents.a2c import A2C
from murmurate.bench import _commands
from murmurate.bench._cache import set_aside
from murmurate.bench._result import Log, format_number
from murmurate.errors import RunFailed
from murmurate.recipes import recipe
from murmurate.record.stored import read_object
from murmurate.training import checkpoint
from murmurate.training.run_folder import write_json

SIX_GAMES = ("beam-rider", "breakout", "pong", "qbert", "seaquest", "space-invaders")
METHODS = {"A2C": "all-reduce", "GALA-A2C": "gala"}  # the paper's name, our strategy
NOMINAL_SIMULATORS = 16  # to which the learning rate refers, and with which Fig. 1a compares

Summary = dict[str, Any]  # of a run at one of its ends

_NOT_FINITE = re.compile(r"not finite|the loss of replica .* is -?(nan|inf)")


@dataclasses.dataclass(frozen=True)
class GalaPlan:
    """Every method is trained once for each of games x simulators x seeds.

    seeds: 0 up to this. env_steps: of all learners together, ascending; one run is evaluated at each (the
    learning rate is constant, so a shorter run is the beginning of a longer one).
    simulators: of all learners together. eval_episodes: whole games of a final policy.
    where: the folder that keeps the runs.
    """

    games: tuple[str, ...] = SIX_GAMES
    seeds: int = 10
    env_steps: tuple[int, ...] = (25_000_000, 40_000_000)
    learners: int = 4
    simulators: tuple[int, ...] = (64,)
    eval_episodes: int = 10
    where: str = "runs/gala"


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: a method on a game with one seed, to its last end."""

    game: str
    method: str
    simulators: int
    seed: int
    plan: GalaPlan

    @property
    def folder(self) -> Path:
        """Named by all that the run depends on, so that a changed plan does not reuse another's run."""
        plan, ends = self.plan, "-".join(map(str, self.plan.env_steps))
        each = self.simulators // plan.learners
        setup = f"{self.game}-{METHODS[self.method]}-{plan.learners}x{each}"
        return Path(plan.where) / f"{setup}-to-{ends}-seed-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.game}, {self.method}, {self.simulators} simulators"

    @property
    def recipe(self) -> str:
        return f"{self.game}-a2c"

    def settings(self) -> tuple[str, ...]:
        """Options of ``murmurate train``, without the end and the folder.

        The learning rate grows with the square root of the simulators of all learners (as the authors' own
        command has 0.0014 for 64, github.com/facebookresearch/gala), alike for both methods.
        """
        plan = self.plan
        base = cast(A2C, recipe(self.recipe).learner).learning_rate
        rate = base * math.sqrt(self.simulators / NOMINAL_SIMULATORS)
        return (
            "--strategy", METHODS[self.method],
            "--replicas", str(plan.learners),
            "--simulators", str(self.simulators // plan.learners),
            "--seed", str(self.seed),
            "--agent.learning-rate", repr(rate),
            "--agent.learning-rate-end", "1",
            "--stop-at-return", "none",
            "--eval-episodes", str(plan.eval_episodes),
        )  # fmt: skip

    def summary(self, end: int) -> Summary | None:
        """The summary at ``end`` env steps; None if the run has not got there."""
        try:
            summary: Summary = read_object(self.summary_file(end))
        except FileNotFoundError:
            return None
        return summary

    def summary_file(self, end: int) -> Path:
        return self.folder / f"summary-{end}.json"

    def checkpoint(self) -> Path | None:
        """The newest intact checkpoint."""
        paths = (self.folder / "checkpoints" / name for name in ("last", "previous"))
        return next((path for path in paths if checkpoint.damage(path) is None), None)

    def env_steps_left(self) -> int:
        """0 for a run that has ended or diverged."""
        *_, last = self.plan.env_steps
        summaries = [self.summary(end) for end in self.plan.env_steps]
        if summaries[-1] is not None or any(diverged(summary) for summary in summaries if summary):
            return 0
        path = self.checkpoint()
        done = 0 if path is None else int(checkpoint.read_manifest(path)["env_steps"])
        return max(0, last - done)


def jobs(plan: GalaPlan) -> list[Job]:
    """All runs of a plan, seed by seed: when interrupted early it has some of every row."""
    return [
        Job(game, method, simulators, seed, plan)
        for seed in range(plan.seeds)
        for game in plan.games
        for simulators in plan.simulators
        for method in METHODS
    ]


def diverged(summary: Summary) -> bool:
    """Whether the run ended with a loss, gradient or parameter that was not finite."""
    return str(summary["exit"]).startswith("failed") and bool(_NOT_FINITE.search(str(summary["exit"])))


def expected(jobs: Sequence[Job], log: Log) -> dict[str, Any]:
    """Hours that the runs still take, in all and for each row, also logged.

    The speed is measured on the first run that has not ended, and taken for all; evaluation games are not
    counted.
    """
    left = {job: job.env_steps_left() for job in jobs}
    first = next((job for job in jobs if left[job]), None)
    speed = None if first is None else measured_speed(first)
    by_row: dict[str, float] = {}
    for job in jobs:
        hours = left[job] / speed / 3600 if speed else 0.0
        by_row[job.label] = by_row.get(job.label, 0.0) + hours
    cost = {
        "hours": sum(by_row.values()),
        "hours_by_row": by_row,
        "env_steps_left": sum(left.values()),
        "env_steps_planned": sum(job.plan.env_steps[-1] for job in jobs),
        "env_steps_per_second": speed,
        "measured_on": None if first is None else first.label,
    }
    if first is not None:
        log(f"{first.label}: {speed:,.0f} env steps a second here")
    log(
        f"expected: {format_number(cost['hours'])} hours for {cost['env_steps_left']:,} env steps left of "
        f"{cost['env_steps_planned']:,}, in {len(jobs)} runs kept in {jobs[0].plan.where}"
    )
    for label, row_hours in by_row.items():
        log(f"expected: {format_number(row_hours)} hours for {label}")
    return cost


def measured_speed(job: Job) -> float:
    """Env steps a wall second of all learners together, by training a few seconds in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="murmurate-gala-") as folder:
        options = (*job.settings(), "--record-every-seconds", "0.25")
        racer = _commands.ours("speed", job.recipe, Path(folder), *options)
        try:
            racer.start(warm_up_cpu_seconds=4.0)
            return racer.window(8.0).per_second
        finally:
            racer.stop()


def train(job: Job, log: Log) -> dict[int, Summary]:
    """The run's summary at each of its ends, trained as far as they are missing.

    Raises RunFailed if it is interrupted, or fails for another reason than divergence.
    """
    summaries: dict[int, Summary] = {}
    for end in job.plan.env_steps:
        summary = job.summary(end)
        if summary is None:
            former = next(iter(reversed(summaries.values())), None)
            summary = former if former is not None and diverged(former) else _train_to(job, end)
            write_json(job.summary_file(end), summary)
            result = summary["exit"] if diverged(summary) else f"evaluation {summary['eval_return_mean']:.1f}"
            log(f"{job.label}, seed {job.seed}: {result} after {end:,} env steps")
        summaries[end] = summary
    return summaries


def _train_to(job: Job, end: int) -> Summary:
    """Start the run, or resume it from its newest checkpoint, and train to ``end`` env steps."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    if job.checkpoint() is not None:
        words = ["resume", str(job.folder), "--env-steps", str(end)]
    else:
        set_aside(job.folder)  # interrupted before its first checkpoint
        words = ["train", job.recipe, *job.settings(), "--env-steps", str(end), "--out", str(job.folder)]
    output = job.folder.with_suffix(".log")
    code = murmurate(words, output)
    try:
        summary: Summary = read_object(job.folder / "summary.json")
    except FileNotFoundError:
        summary = {"exit": "without a summary", "env_steps": 0}
    finished = code == 0 and summary["exit"] == "finished" and summary["env_steps"] >= end
    if not finished and not (code == 1 and diverged(summary)):
        last = output.read_text(errors="replace")[-800:].strip() if output.exists() else ""
        raise RunFailed(
            f"murmurate {shlex.join(words)} ended with {code} before {end:,} env steps. The same bench "
            f"goes on from there. Its last output: {last or '(nothing)'}"
        )
    return summary


def murmurate(words: Sequence[str], output: Path) -> int:
    """Run ``murmurate WORDS`` to its end; its exit code. A Ctrl-C here ends it after it has saved.

    It has a process group of its own, so that it is signalled once.
    """
    with output.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "murmurate", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,
        )
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
