"""Runs of long benchmarks, which continue where they were interrupted, and how long the rest will take.

The folder of a run is kept, with its summary at each planned number of env steps in ``summary-<env
steps>.json``. A finished run is not run again, and an interrupted one continues from its newest checkpoint.
Equal runs of two benchmarks have the same folder, so one benchmark reuses the other's runs.
"""

from __future__ import annotations

import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench import _commands
from murmurate.bench._racer import temporary_folder
from murmurate.bench._result import Log, format_number, mean
from murmurate.errors import RunFailed
from murmurate.record.report import report
from murmurate.record.stored import read_object, write_json
from murmurate.training import checkpoint
from murmurate.training.run_folder import set_aside

Summary = dict[str, Any]  # ``summary.json`` of a run at one of its ends

_NOT_FINITE = re.compile(r"not finite|the loss of replica .* is -?(nan|inf)")


@dataclass(frozen=True)
class ResumableRun:
    """A run that is evaluated at each of its ends, and stops at the last.

    settings: options of ``murmurate train``, without the run's length and folder. ends: ascending numbers of
    env steps of all learners together. label: label of its row in a table. speed_like: runs with the same
    value are equally fast. speed_settings: further options while the speed is measured. unit: what the run's
    env steps are, as in ``Run.unit``.
    """

    recipe: str
    settings: tuple[str, ...]
    seed: int
    ends: tuple[int, ...]
    folder: Path
    label: str
    speed_like: str = ""
    speed_settings: tuple[str, ...] = ()
    unit: str = "env steps"

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
        """The newest intact checkpoint; None if there is none."""
        paths = (self.folder / "checkpoints" / name for name in ("last", "previous"))
        return next((path for path in paths if checkpoint.damage(path) is None), None)

    def env_steps_left(self) -> int:
        """Env steps to the last end; 0 for a run that has ended or diverged."""
        *_, last = self.ends
        summaries = [self.summary(end) for end in self.ends]
        if summaries[-1] is not None or any(diverged(summary) for summary in summaries if summary):
            return 0
        path = self.checkpoint()
        trained = 0 if path is None else int(checkpoint.read_manifest(path)["env_steps"])
        return max(0, last - trained)


def diverged(summary: Summary) -> bool:
    """Whether the run ended with a loss, gradient or parameter that was not finite."""
    return str(summary["exit"]).startswith("failed") and bool(_NOT_FINITE.search(str(summary["exit"])))


def expected(runs: Sequence[ResumableRun], log: Log) -> dict[str, Any]:
    """The hours that the runs will still take, in all and for each row of the table; they are also logged.

    Speed is measured once for each value of ``speed_like``, on the first of its runs that has not ended.
    Evaluation games are not counted.
    """
    left = {run: run.env_steps_left() for run in runs}
    measured_on: dict[str, ResumableRun] = {}
    for run in runs:
        if left[run]:
            measured_on.setdefault(run.speed_like, run)
    speeds = {}
    for kind, run in measured_on.items():
        speeds[kind] = measured_speed(run)
        log(f"{run.label}: {speeds[kind]:,.0f} {run.unit} a second here")
    by_row: dict[str, float] = {}
    for run in runs:
        hours = left[run] / speeds[run.speed_like] / 3600 if left[run] else 0.0
        by_row[run.label] = by_row.get(run.label, 0.0) + hours
    cost = {
        "hours": sum(by_row.values()),
        "hours_by_row": by_row,
        "env_steps_left": sum(left.values()),
        "env_steps_planned": sum(run.ends[-1] for run in runs),
        "env_steps_per_second": {run.label: speeds[kind] for kind, run in measured_on.items()},
    }
    log(
        f"expected: {format_number(cost['hours'])} hours for {cost['env_steps_left']:,} {runs[0].unit} left "
        f"of {cost['env_steps_planned']:,}, in {len(runs)} runs kept in {runs[0].folder.parent}"
    )
    for label, row_hours in by_row.items():
        log(f"expected: {format_number(row_hours)} hours for {label}")
    return cost


def measured_speed(run: ResumableRun) -> float:
    """Env steps of all learners per wall second, from a few seconds of training in a temporary folder."""
    with temporary_folder() as folder:
        options = (*run.settings, *run.speed_settings, "--record-every-seconds", "0.25")
        racer = _commands.murmurate_train("speed", run.recipe, folder, *options)
        try:
            racer.start(warm_up_cpu_seconds=4.0)
            return racer.window(8.0).per_second
        finally:
            racer.stop()


def train(run: ResumableRun, log: Log) -> dict[int, Summary]:
    """The run's summary at each of its ends; the run is trained as far as summaries are missing.

    Raises RunFailed if it is interrupted, fails for another reason than divergence, or was made with other
    settings.
    """
    _check_settings(run)
    summaries: dict[int, Summary] = {}
    for end in run.ends:
        summary = run.summary(end)
        if summary is None:
            previous = next(iter(reversed(summaries.values())), None)
            summary = previous if previous is not None and diverged(previous) else _train_to(run, end)
            write_json(run.summary_file(end), summary)
            result = summary["exit"] if diverged(summary) else _evaluation(summary)
            log(f"{run.label}, seed {run.seed}: {result} after {end:,} {run.unit}")
        summaries[end] = summary
    return summaries


def returns(runs: Sequence[Summary]) -> dict[str, Any]:
    """``returns``: evaluation returns of the runs that have not diverged, with ``mean`` and ``deviation``,
    None where there are too few; ``diverged``: number of the others; ``hours``: of all."""
    finite = [float(run["eval_return_mean"]) for run in runs if not diverged(run)]
    return {
        "mean": mean(finite),
        "deviation": statistics.stdev(finite) if len(finite) > 1 else None,
        "returns": finite,
        "diverged": len(runs) - len(finite),
        "hours": sum(run["wall_seconds"] for run in runs) / 3600,
    }


def reports(runs: Mapping[Any, ResumableRun], where: str) -> list[str]:
    """A report of each first part of a run's key, such as its world, with the curves of all its runs; runs of
    another length have another page."""
    pages = {name: Path(where) / f"{name}-to-{run.ends[-1]}.html" for (name, *_), run in runs.items()}
    for name, page in pages.items():
        report([run.folder for key, run in runs.items() if key[0] == name], page)
    return list(map(str, pages.values()))


def _check_settings(run: ResumableRun) -> None:
    """Refuse to reuse a folder whose run had other or unknown settings; note those of a new run beside it."""
    path = run.folder.with_name(f"{run.folder.name}.settings.json")
    settings = {"recipe": run.recipe, "settings": list(run.settings)}
    if not path.exists():
        if run.checkpoint() is not None or any(run.summary_file(end).exists() for end in run.ends):
            raise RunFailed(
                f"{run.folder} holds a run, and {path.name}, which says with what settings, is missing. "
                "Choose another folder with --where, or remove this one."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    elif (stored := read_object(path)) != settings:
        raise RunFailed(
            f"{run.folder} holds a run of {stored['recipe']} {shlex.join(stored['settings'])}; this plan "
            f"would train {run.recipe} {shlex.join(run.settings)} there. Choose another folder with --where, "
            f"or remove this one and {path.name}."
        )


def _evaluation(summary: Summary) -> str:
    """The main figure of the run's evaluation, in words."""
    if (mean := summary.get("eval_return_mean")) is not None:
        return f"evaluation {mean:.1f}"
    if (distance := summary.get("frechet_distance")) is not None:
        return f"Fréchet distance {distance:.2f}"
    return f"accuracy {summary['accuracy']:.4f}" if summary.get("accuracy") is not None else summary["exit"]


def _train_to(run: ResumableRun, end: int) -> Summary:
    """Start the run, or resume it from its newest checkpoint, and train to ``end`` env steps."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if run.checkpoint() is not None:
        words = ["resume", str(run.folder), "--env-steps", str(end)]
    else:
        set_aside(run.folder)  # interrupted before its first checkpoint
        words = ["train", run.recipe, *run.settings, "--env-steps", str(end), "--out", str(run.folder)]
    output = run.folder.with_name(f"{run.folder.name}.log")
    code = murmurate(words, output)
    try:
        summary: Summary = read_object(run.folder / "summary.json")
    except FileNotFoundError:
        summary = {"exit": "without a summary", "env_steps": 0}
    finished = code == 0 and summary["exit"] == "finished" and summary["env_steps"] >= end
    if not finished and not (code == 1 and diverged(summary)):
        last_output = output.read_text(errors="replace")[-800:].strip() if output.exists() else ""
        raise RunFailed(
            f"murmurate {shlex.join(words)} ended with {code} before {end:,} {run.unit}. The same bench "
            f"command continues the run. Its last output: {last_output or '(nothing)'}"
        )
    return summary


def murmurate(words: Sequence[str], output: Path) -> int:
    """Run ``murmurate WORDS`` to its end; returns its exit code. On Ctrl-C here it gets SIGTERM, so that it
    saves and ends.

    It has a process group of its own, so that the terminal does not interrupt it, too.
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
