"""What ``gala-table`` and ``gala-sweep`` share: runs of hours that can be cut off, and what they will cost.

A run keeps its folder below ``Plan.where``. What it scored at each planned count of env steps is kept there
as ``summary-<env steps>.json``; a run that has them all is not run again, and one that was cut off goes on
from its newest checkpoint. The two benches name equal runs alike: what one has done the other need not do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

from murmurate.agents.a2c import A2C
from murmurate.bench import _commands
from murmurate.bench._result import Log, number
from murmurate.errors import RunFailed
from murmurate.recipes import recipe
from murmurate.training import checkpoint
from murmurate.training.run_folder import write_json

SIX_GAMES = ("beam-rider", "breakout", "pong", "qbert", "seaquest", "space-invaders")
METHODS = {"A2C": "all-reduce", "GALA-A2C": "gala"}  # the paper's name, our strategy
NOMINAL_SIMULATORS = 16  # what a learning rate is meant for, and what Fig. 1a compares with

Runner = Callable[[Sequence[str], Path], int]  # (words after ``murmurate``, log file) -> exit code
Facts = dict[str, Any]  # a run's summary.json at one of its ends

_SAVE_SECONDS = 120.0
_OF_THE_LOG = 800  # bytes of its end that go into an error
_NOT_FINITE = re.compile(r"not finite|the loss of replica .* is -?(nan|inf)")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained; every method once for each of games x simulators x seeds.

    games: worlds. seeds: 0 up to this. env_steps: over all learners together, ascending; one run is scored
    at each (the learning rate is constant, so a shorter run is the beginning of a longer one).
    learners: of each run. simulators: of all learners together. eval_episodes: whole games by a final policy.
    where: the folder that keeps the runs.

    Raises ValueError for what makes no sense.
    """

    games: tuple[str, ...] = SIX_GAMES
    seeds: int = 10
    env_steps: tuple[int, ...] = (25_000_000, 40_000_000)
    learners: int = 4
    simulators: tuple[int, ...] = (64,)
    eval_episodes: int = 10
    where: str = "runs/gala"

    def __post_init__(self) -> None:
        if not (self.games and self.simulators and self.env_steps and self.seeds > 0):
            raise ValueError("a plan names at least one game, one number of simulators, an end and a seed")
        if self.env_steps[0] <= 0 or list(self.env_steps) != sorted(set(self.env_steps)):
            raise ValueError(f"env_steps must be positive and ascend, got {self.env_steps}")
        if any(n <= 0 or n % self.learners for n in self.simulators):
            raise ValueError(
                f"simulators {self.simulators} cannot be dealt evenly to {self.learners} learners"
            )


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: a method on a game with one seed, to its last end."""

    game: str
    method: str
    simulators: int
    seed: int
    plan: Plan

    @property
    def folder(self) -> Path:
        """Named by all that the run depends on, so that a changed plan does not take up another's run."""
        plan, to = self.plan, "-".join(map(str, self.plan.env_steps))
        each = self.simulators // plan.learners
        setup = f"{self.game}-{METHODS[self.method]}-{plan.learners}x{each}"
        return Path(plan.where) / f"{setup}-to-{to}-seed-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.game}, {self.method}, {self.simulators} simulators"

    def settings(self) -> tuple[str, ...]:
        """Options of ``murmurate train``, all but the end and the folder.

        The learning rate grows with the square root of the simulators of all learners (as the authors' own
        command does for 64: 0.0014, github.com/facebookresearch/gala), alike for both methods.
        """
        plan = self.plan
        usual = cast(A2C, recipe(self.recipe).learner).learning_rate
        rate = usual * math.sqrt(self.simulators / NOMINAL_SIMULATORS)
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

    @property
    def recipe(self) -> str:
        return f"{self.game}-a2c"

    def kept(self, end: int) -> Facts | None:
        """What the run scored at ``end`` env steps; None if it has not been there."""
        try:
            facts: Facts = json.loads(self._file(end).read_text())
        except FileNotFoundError:
            return None
        return facts

    def keep(self, end: int, facts: Facts) -> None:
        write_json(self._file(end), facts)

    def _file(self, end: int) -> Path:
        return self.folder / f"summary-{end}.json"

    def checkpoint(self) -> Path | None:
        """The newest whole checkpoint; None if there is none to go on from."""
        found = (self.folder / "checkpoints" / name for name in ("last", "previous"))
        return next((path for path in found if checkpoint.damage(path) is None), None)

    def env_steps_left(self) -> int:
        """0 for a run that is over, diverged ones among them."""
        *_, last = self.plan.env_steps
        if self.kept(last) is not None or any(diverged(f) for f in map(self.kept, self.plan.env_steps) if f):
            return 0
        found = self.checkpoint()
        done = 0 if found is None else int(checkpoint.read_manifest(found)["env_steps"])
        return max(0, last - done)


def jobs(plan: Plan) -> list[Job]:
    """All runs of a plan, seed by seed: cut off early, it has some of every row.

    Raises Refusal for a game that nobody knows, MissingExtra where its package is not installed.
    """
    for game in plan.games:
        recipe(f"{game}-a2c")
    return [
        Job(game, method, simulators, seed, plan)
        for seed in range(plan.seeds)
        for game in plan.games
        for simulators in plan.simulators
        for method in METHODS
    ]


def diverged(facts: Facts) -> bool:
    """Whether the run was ended by a loss, gradient or parameter that was not finite."""
    return str(facts["exit"]).startswith("failed") and bool(_NOT_FINITE.search(str(facts["exit"])))


# -- what it will cost ---------------------------------------------------------------------------------


def expected(field: Sequence[Job], per_second: Callable[[Job], float], log: Log) -> dict[str, Any]:
    """Hours that the runs still take, in all and for each row, told through ``log``.

    per_second: measures the env steps a second of a run; asked once, for the first that is not over. Every
    run is taken to be as fast as that one, and evaluation games are not counted.
    """
    left = {job: job.env_steps_left() for job in field}
    first = next((job for job in field if left[job]), None)
    speed = None if first is None else per_second(first)

    def hours(of: Sequence[Job]) -> float:
        return 0.0 if speed is None else sum(left[job] for job in of) / speed / 3600

    rows: dict[str, list[Job]] = {}
    for job in field:
        rows.setdefault(job.label, []).append(job)
    by_row = {label: hours(of) for label, of in rows.items()}
    cost = {
        "hours": hours(field),
        "hours_by_row": by_row,
        "env_steps_left": sum(left.values()),
        "env_steps_planned": sum(job.plan.env_steps[-1] for job in field),
        "env_steps_per_second": speed,
        "measured_on": None if first is None else first.label,
    }
    if first is not None:
        log(f"{first.label}: {speed:,.0f} env steps a second here")
    log(
        f"expected: {number(cost['hours'])} hours for {cost['env_steps_left']:,} env steps left of "
        f"{cost['env_steps_planned']:,}, in {len(field)} runs kept in {field[0].plan.where}"
    )
    for label, of_row in by_row.items():
        log(f"expected: {number(of_row)} hours for {label}")
    return cost


def measured_speed(job: Job, warm_up_cpu_seconds: float = 4.0, window_cpu_seconds: float = 8.0) -> float:
    """Env steps a wall second of all learners together, by training a few seconds in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="murmurate-gala-") as folder:
        options = (*job.settings(), "--record-every-seconds", "0.25")
        racer = _commands.ours("speed", job.recipe, Path(folder), *options)
        try:
            racer.start(warm_up_cpu_seconds)
            return racer.window(window_cpu_seconds).per_second
        finally:
            racer.stop()


# -- carrying it out -----------------------------------------------------------------------------------


def carry_out(job: Job, run: Runner, log: Log) -> dict[int, Facts]:
    """The run's facts at each of its ends, from its folder where they are there already.

    Raises RunFailed if it was stopped, or failed of something else than its learning.
    """
    facts: dict[int, Facts] = {}
    for end in job.plan.env_steps:
        kept = job.kept(end)
        if kept is None:
            former = next(iter(reversed(facts.values())), None)
            kept = former if former is not None and diverged(former) else _reach(job, end, run)
            job.keep(end, kept)
            log(_told(job, end, kept))
        facts[end] = kept
    return facts


def all_facts(field: Sequence[Job], run: Runner, log: Log) -> dict[Job, dict[int, Facts]]:
    return {job: carry_out(job, run, log) for job in field}


def _reach(job: Job, end: int, run: Runner) -> Facts:
    """Train on to ``end`` env steps from wherever the run stands."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    if job.checkpoint() is not None:
        words = ["resume", str(job.folder), "--env-steps", str(end)]
    else:
        if job.folder.exists():  # killed before its first checkpoint: there is nothing to go on from
            job.folder.rename(
                job.folder.with_name(f"{job.folder.name}-cut-off-{job.folder.stat().st_mtime_ns}")
            )
        words = ["train", job.recipe, *job.settings(), "--env-steps", str(end), "--out", str(job.folder)]
    told = job.folder.with_suffix(".log")
    code = run(words, told)
    try:
        facts: Facts = json.loads((job.folder / "summary.json").read_text())
    except FileNotFoundError:
        facts = {"exit": "without a summary", "env_steps": 0}
    is_there = code == 0 and facts["exit"] == "finished" and facts["env_steps"] >= end
    if not is_there and not (code == 1 and diverged(facts)):
        raise RunFailed(
            f"murmurate {shlex.join(words)} ended with {code} before {end:,} env steps. The same bench "
            f"goes on from there. Its last words: {_last_words(told)}"
        )
    return facts


def _told(job: Job, end: int, facts: Facts) -> str:
    if diverged(facts):
        return f"{job.label}, seed {job.seed}: diverged ({facts['exit']})"
    return f"{job.label}, seed {job.seed}: evaluation {facts['eval_return_mean']:.1f} after {end:,} env steps"


def _last_words(told: Path) -> str:
    try:
        return told.read_bytes()[-_OF_THE_LOG:].decode(errors="replace").strip() or "(nothing)"
    except OSError:
        return "(nothing)"


def spawn(words: Sequence[str], told: Path) -> int:
    """``murmurate words`` to its end; whatever ends this process ends it too, saved. Returns its exit code.

    It has a process group of its own: a Ctrl-C reaches it through here, once, and this waits until it has
    saved (two minutes at most).
    """
    with told.open("ab") as out, _sigterm_raises():
        process = subprocess.Popen(
            [sys.executable, "-m", "murmurate", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,
        )
        try:
            return process.wait()
        except BaseException:
            _let_it_save(process)
            raise


def _let_it_save(process: subprocess.Popen[bytes]) -> None:
    try:
        # not SIGINT: a child of a shell's background job would be deaf to it until its handlers are there
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SAVE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """By default it would end this process at once, and the run would go on with nobody waiting for it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
