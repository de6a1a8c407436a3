"""Evaluates snapshots of a run's consensus parameters while the run learns, one at a time.

When an evaluation is due, the coordinator requests a snapshot (the parts of a checkpoint without the state of
their sources), and gives it to ``Evaluator``. A separate process evaluates it; if this process is killed, or
fails, the run goes on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from murmurate.errors import Refusal
from murmurate.fabric.processes.spawn import (
    FINISHED,
    REFUSED,
    Exit,
    Worker,
    WorkerProcesses,
    describe,
    take_signals,
)
from murmurate.spec import derive_seed
from murmurate.training import checkpoint
from murmurate.training.evaluate import figures
from murmurate.training.run import Run

LOG = "logs/evaluator.log"
_NICE = 10  # the learners come first


@dataclass(frozen=True)
class Snapshot:
    """What is evaluated. env_steps, updates: total, and median, over the replicas. seconds: run time when it
    was made."""

    folder: Path
    env_steps: int
    updates: int
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that has ended. figures: by name. failure: why it failed; empty if it did not."""

    snapshot: Snapshot
    took_seconds: float
    figures: dict[str, Any]
    failure: str = ""

    def record(self, sentence: str, at: str) -> dict[str, Any]:
        """The record for ``metrics.jsonl``, without the matrix ``confusion``: it may have 10,000 numbers, and
        nothing draws it. sentence: about the figures. at: the snapshot's env steps."""
        return {
            "kind": "evaluation",
            **{name: figure for name, figure in self.figures.items() if name != "confusion"},
            "env_steps": self.snapshot.env_steps,
            "updates": self.snapshot.updates,
            "snapshot_seconds": self.snapshot.seconds,
            "evaluation_seconds": self.took_seconds,
            "message": f"at {at}: {sentence}" if sentence else f"evaluated at {at}",
        }


class Evaluator:
    """Evaluates a run's snapshots. in_process: do so at once in this process, not in a separate process."""

    def __init__(self, run: Run, in_process: bool) -> None:
        self.run, self._in_process = run, in_process
        self._every = run.evaluate_every_env_steps
        self._next_at = 0
        self._snapshot: Snapshot | None = None
        self._workers: WorkerProcesses | None = None
        self._began_at = 0.0
        self._ended: Evaluated | None = None

    def begin_at(self, total_env_steps: int) -> None:
        """Make an evaluation due at the next multiple of ``evaluate_every_env_steps``."""
        if self._every:
            self._next_at = (total_env_steps // self._every + 1) * self._every

    def is_due(self, total_env_steps: int) -> bool:
        return bool(self._every) and self._snapshot is None and total_env_steps >= self._next_at

    @property
    def is_busy(self) -> bool:
        return self._snapshot is not None

    def begin(self, snapshot: Snapshot) -> None:
        """Evaluate ``snapshot``."""
        self.begin_at(snapshot.env_steps)
        self._snapshot, self._began_at = snapshot, time.monotonic()
        if self._in_process:
            with torch.random.fork_rng(devices=[]):
                try:
                    self._end(snapshot, _figures(self.run, snapshot.folder))
                except Refusal as refusal:
                    self._end(snapshot, {}, str(refusal))
                except Exception as error:
                    self._end(snapshot, {}, describe(error))
            return
        work = functools.partial(_evaluate, run=self.run, snapshot_folder=snapshot.folder)
        try:
            self._workers = WorkerProcesses(1)
            self._workers.start(0, work)
        except (Refusal, OSError) as error:
            self._end(snapshot, {}, describe(error))

    def poll(self, wait_seconds: float = 0.0) -> Evaluated | None:
        """The evaluation that has ended since the last call, or ends within ``wait_seconds``, if one has."""
        if self._workers is not None and self._snapshot is not None:
            for worker in self._workers.wait(wait_seconds):
                worker_exit = worker.exit
                assert worker_exit is not None
                if worker_exit.how == FINISHED:
                    self._end(self._snapshot, worker_exit.result)
                else:
                    self._end(self._snapshot, {}, worker_exit.error or worker_exit.how)
        if self._ended is None:
            return None
        ended, self._ended, self._snapshot = self._ended, None, None
        return ended

    def close(self) -> None:
        """End the process; an unfinished evaluation is lost."""
        self._end_process()
        self._snapshot = self._ended = None

    def _end_process(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _end(self, snapshot: Snapshot, results: dict[str, Any], failure: str = "") -> None:
        self._end_process()
        self._ended = Evaluated(snapshot, time.monotonic() - self._began_at, results, failure)


def best_mean(checkpoints: Path) -> float:
    """The best mean training return when the best checkpoint was kept; minus infinity without one. It is not
    read from the newest checkpoint, which may have a higher one whose best checkpoint a crash prevented."""
    with contextlib.suppress(Refusal):
        if (mean := checkpoint.read_manifest(checkpoints / "best")["best"]) is not None:
            return float(mean)
    return float("-inf")


def best_so_far(run: Run, checkpoints: Path) -> float:
    """The score (see ``score``) of the best checkpoint, if an evaluation chose it; else minus infinity."""
    with contextlib.suppress(Refusal):
        value = checkpoint.read_manifest(checkpoints / "best").get("score")
        if run.evaluation.plays and value is not None:
            return float(value)
    return float("-inf")


def score(run: Run, results: dict[str, Any]) -> float:
    """The figure by which the best checkpoint is chosen (the greater, the better): the headline of an
    evaluation by games; minus infinity for other evaluations, which choose no checkpoint."""
    curve = run.evaluation.headline
    value = None if curve is None or not run.evaluation.plays else results.get(curve.metric)
    if curve is None or value is None:
        return float("-inf")
    return -float(value) if curve.lower_is_better else float(value)


def _figures(run: Run, snapshot_folder: Path) -> dict[str, Any]:
    """The figures of a snapshot, in other games than those at the run's end: if the same games chose the best
    checkpoint, its figures at the end would be biased."""
    seed = derive_seed(run.seed, "evaluation while training")
    results = figures(run, snapshot_folder, seed=seed, alone=False)
    results.pop("best_eval_return_mean", None)  # it compares two checkpoints
    return results


def _evaluate(worker: Worker, run: Run, snapshot_folder: Path) -> Exit:
    """The work of the evaluator's process."""
    take_signals()
    os.nice(_NICE)
    log_path = snapshot_folder.parents[1] / LOG
    log_path.parent.mkdir(exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    torch.set_num_threads(run.placement.threads)
    torch.set_flush_denormal(True)
    try:
        return Exit(FINISHED, result=_figures(run, snapshot_folder))
    except Refusal as refusal:
        return Exit(REFUSED, str(refusal))
