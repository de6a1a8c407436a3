"""Real runs under faults: replicas are killed and stopped while they learn, and the results are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil

from murmurate.agents.a2c import A2C
from murmurate.bench._result import Log
from murmurate.errors import RunFailed
from murmurate.ranges import PositiveFloat, PositiveInt, PositiveSeconds, Seed
from murmurate.recipes import recipe
from murmurate.record.reader import Record, read_metrics

NAME = "chaos"
SUMMARY = "eight replicas, one killed or stopped every 20 s, against the same run without faults"

_OVERTIME_SECONDS = 180.0
_POLL_SECONDS = 0.2
_CLEAN_UP_SECONDS = 20.0
_RECIPE = "cartpole-gala"
# strategies whose centre makes a whole step with each replica's gradient: the learning rate is divided by the
# number of replicas
_STEP_PER_REPLICA = ("parameter-server",)
_SUMMARY_FACTS = (
    "exit", "env_steps", "updates", "eval_return_mean", "train_return_mean", "best_eval_return_mean",
    "disagreement_final", "dead_replicas",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ChaosPlan:
    """For each strategy, a run of ``minutes`` with faults and one without.

    Every ``every_seconds`` a replica, drawn with ``seed``, is sent SIGKILL or SIGSTOP in turn; a stopped
    replica is sent SIGCONT after ``stopped_seconds``. (The processes fabric has no connection to break.)

    The learning rate is constant, because the number of env steps in these minutes is not known.

    minutes: length of each run. every_seconds: seconds between two faults. stopped_seconds: seconds for which
    a replica is stopped. replicas: number of learners of a run. simulators: number of simulators of each
    learner. seed: seed of the draws. strategies: the strategies that are run.
    """

    minutes: PositiveFloat = 1.0
    every_seconds: PositiveSeconds = 20.0
    stopped_seconds: PositiveSeconds = 10.0
    replicas: PositiveInt = 8
    simulators: PositiveInt = 4
    seed: Seed = 0
    strategies: tuple[str, ...] = ("gala", "dpsgd", "all-reduce", "parameter-server")


QUICK, FULL = ChaosPlan(), ChaosPlan(minutes=3.0)


def measure(plan: ChaosPlan, log: Log) -> dict[str, Any]:
    """Each strategy's results with and without faults, and the processes and files that the runs left
    behind."""
    rows: dict[str, Any] = {}
    for name in plan.strategies:
        with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
            log(f"{name}, without faults")
            undisturbed = Trial(name, plan, Path(folder) / "peace").run(lambda trial: None)
            log(f"{name}, under faults")
            injector = Injector(plan)
            disturbed = Trial(name, plan, Path(folder) / "faults").run(injector.act)
        rows[name] = {
            "faults": injector.done,
            "under_faults": disturbed,
            "in_peace": undisturbed,
            "return_ratio": disturbed["eval_return_mean"] / max(undisturbed["eval_return_mean"], 1e-9),
            "throughput_ratio": disturbed["env_steps"] / max(undisturbed["env_steps"], 1),
        }
        log(f"{name}: return {rows[name]['return_ratio']:.3f} of that without faults")
    return {"fabric": "processes", "strategies": rows}


class Trial:
    """One ``murmurate train`` in a session of its own, with its own temporary folder."""

    def __init__(self, strategy: str, plan: ChaosPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self._temporary = folder.parent / f"{folder.name}-tmp"
        self._temporary.mkdir()
        self._errors = folder.parent / f"{folder.name}-errors"
        options: dict[str, Any] = {
            "--strategy": strategy,
            "--replicas": plan.replicas,
            "--simulators": plan.simulators,
            "--minutes": plan.minutes,
            "--env-steps": 10**9,
            "--stop-at-return": "none",
            "--restarts": 1000,
            "--out": folder,
        }
        if strategy in _STEP_PER_REPLICA:
            default = cast(A2C, recipe(_RECIPE).learner).learning_rate
            options["--agent.learning-rate"] = default / plan.replicas
        words = [str(word) for pair in options.items() for word in pair]
        # not a pipe, which could fill up, and which processes left behind keep open
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "murmurate", "train", _RECIPE, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary)},
            )

    def run(self, act: Callable[[Trial], None]) -> dict[str, Any]:
        """Wait for the end, calling ``act`` again and again. Raises RunFailed if the run fails or does not
        end in time."""
        deadline = time.monotonic() + 60 * self.plan.minutes + _OVERTIME_SECONDS
        try:
            while self.process.poll() is None:
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"{self.folder.name} has not ended {_OVERTIME_SECONDS:g} s after its time was over"
                    )
                act(self)
                time.sleep(_POLL_SECONDS)
            return self._outcome()
        finally:
            left = self._session()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    process.kill()
            self.process.wait()
            psutil.wait_procs(left, timeout=_CLEAN_UP_SECONDS)

    def pids(self) -> dict[int, int]:
        """Process id by replica; empty before the replicas have been started, and while the file is written
        anew."""
        try:
            lines = (self.folder / "roles.jsonl").read_text().splitlines()
            roles = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return {}
        return {role["index"]: role["pid"] for role in roles if role["role"] == "replica"}

    def seconds(self) -> float:
        """Seconds since every replica had written a record; 0 before that."""
        first: dict[int, float] = {}
        records = self._records()
        for record in records:
            first.setdefault(record["replica"], record["time_seconds"])
        if len(first) < self.plan.replicas:
            return 0.0
        return float(records[-1]["time_seconds"] - max(first.values()))

    def _records(self) -> list[Record]:
        path = self.folder / "metrics.jsonl"
        return [r for r in read_metrics(path) if "kind" not in r] if path.exists() else []

    def _outcome(self) -> dict[str, Any]:
        if self.process.returncode != 0:
            errors = self._errors.read_text(errors="replace")[-500:]
            raise RunFailed(f"{self.folder.name} ended with exit code {self.process.returncode}: {errors}")
        summary = json.loads((self.folder / "summary.json").read_text())
        deadline = time.monotonic() + _CLEAN_UP_SECONDS  # the fork server ends after the launcher
        while self._session() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        events = [event["event"] for event in summary["events"]]
        times = [record["time_seconds"] for record in self._records()]
        return {
            **{key: summary[key] for key in _SUMMARY_FACTS},
            "events": {name: events.count(name) for name in sorted(set(events))},
            "longest_time_without_a_record_seconds": max(
                (after - before for before, after in itertools.pairwise(times)), default=0.0
            ),
            "left_processes": len(self._session()),
            "left_files": len([path for path in self._temporary.rglob("*") if path.is_file()]),
        }

    def _session(self) -> list[psutil.Process]:
        """The living processes of the run's session."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and os.getsid(process.pid) == self.process.pid:
                    living.append(process)
        return living


class Injector:
    """Sends the faults of the plan, and lists them in ``done``."""

    def __init__(self, plan: ChaosPlan) -> None:
        self.plan = plan
        self.done: list[dict[str, Any]] = []
        self._random = random.Random(plan.seed)
        self._next_fault_at: float | None = None
        self._to_continue: list[tuple[float, int]] = []  # (time, pid) of each SIGCONT to come

    def act(self, trial: Trial) -> None:
        """Send the signals that are due."""
        now = time.monotonic()
        if self._next_fault_at is None:
            if trial.seconds() > 0:
                self._next_fault_at = now + self.plan.every_seconds
            return
        while self._to_continue and now >= self._to_continue[0][0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._to_continue.pop(0)[1], signal.SIGCONT)
        if now < self._next_fault_at or not (pids := trial.pids()):
            return
        self._next_fault_at += self.plan.every_seconds
        rank, pid = self._random.choice(sorted(pids.items()))
        fault = (signal.SIGKILL, signal.SIGSTOP)[len(self.done) % 2]
        try:
            os.kill(pid, fault)
        except ProcessLookupError:
            return  # it has died and is being restarted
        if fault is signal.SIGSTOP:
            self._to_continue.append((now + self.plan.stopped_seconds, pid))
        self.done.append({"fault": fault.name, "replica": rank})
