"""Racers: real training commands in processes of their own, measured one at a time in windows.

All racers of a benchmark are started and warmed up once and then stopped with SIGSTOP. During a window one of
them runs (SIGCONT), so racers can be interleaved without starting them again. A racer needs no change to be
measured: it only has to append JSON lines with the number of env steps it has made. The unit is the CPU
second of the whole process tree, launcher included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from murmurate.bench._result import Log
from murmurate.errors import RunFailed
from murmurate.ranges import PositiveInt, PositiveSeconds

_POLL_SECONDS = 0.004
_SILENCE_SECONDS = 300.0
_END_SECONDS = 10.0  # longest wait for processes that end by themselves
_WRITE_EVERY_SECONDS = 0.25


class ProgressFile:
    """What a program that is a racer appends its number of env steps to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._bench, self._written_at = os.getppid(), time.monotonic()

    def write(self, env_steps: int) -> bool:
        """Append the number so far, a few times a second; returns whether the benchmark goes on."""
        if (now := time.monotonic()) - self._written_at > _WRITE_EVERY_SECONDS:
            self._written_at = now
            self._file.write(json.dumps({"env_steps": env_steps}) + "\n")
        return os.getppid() == self._bench


def write_progress(progress: Path, work: Callable[[], int]) -> None:
    """The main loop of a program that is a racer: call ``work``, which returns its number of env steps, until
    the benchmark has ended."""
    file, env_steps = ProgressFile(progress), 0
    while file.write(env_steps):
        env_steps += work()


@dataclass(frozen=True)
class RaceWindow:
    """Env steps, CPU seconds of the process tree and wall seconds of a racer in one window."""

    env_steps: int
    cpu_seconds: float
    wall_seconds: float

    @property
    def per_cpu_second(self) -> float:
        return self.env_steps / self.cpu_seconds

    @property
    def per_second(self) -> float:
        return self.env_steps / self.wall_seconds


Windows = Mapping[str, Sequence[RaceWindow]]  # by racer, of each round


def rates_by_cpu(windows: Windows) -> dict[str, list[float]]:
    """Env steps per CPU second of each window."""
    return {label: [w.per_cpu_second for w in of_racer] for label, of_racer in windows.items()}


def rates_by_wall(windows: Windows) -> dict[str, list[float]]:
    """Env steps per second of each window."""
    return {label: [w.per_second for w in of_racer] for label, of_racer in windows.items()}


def plain_windows(windows: Windows) -> dict[str, list[dict[str, Any]]]:
    """The windows as JSON values."""
    return {label: [dataclasses.asdict(w) for w in of_racer] for label, of_racer in windows.items()}


@dataclass
class Racer:
    """A command that appends lines with ``key`` (env steps so far) to the file ``progress``.

    The folder that holds the folder of ``progress`` is to be removed after the race: it also gets the
    command's output and temporary files, which a killed command leaves behind.
    """

    label: str
    command: Sequence[str]
    progress: Path
    key: str = "env_steps"
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _processes: list[psutil.Process] = field(default_factory=list, init=False)  # the command's process tree
    _bytes_read: int = field(default=0, init=False)  # of ``progress``

    def start(self, warm_up_cpu_seconds: float = 3.0) -> None:
        """Start the command, let it warm up, and stop it with SIGSTOP. Raises RunFailed if it ends
        before that."""
        self.progress.parent.mkdir(parents=True, exist_ok=True)
        with open(self._output_file, "wb") as log:
            # A process group of its own in this session: if this process dies, the kernel sends SIGHUP to
            # the stopped group, so no racer is left behind.
            self._process = subprocess.Popen(
                [*_ending_with_this_process(), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._output_file.parent)},
                process_group=0,
            )
        self._next_progress()
        self._processes = self._tree()
        self._run_for(warm_up_cpu_seconds)
        self._signal(signal.SIGSTOP)

    def window(self, cpu_seconds: float) -> RaceWindow:
        """Let the command run for at least that many CPU seconds, from one progress line to another."""
        self._skip_to_now()
        self._signal(signal.SIGCONT)
        try:
            return self._run_for(cpu_seconds)
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """Kill the command and all that it has started: nothing in its folder is worth saving."""
        if self._process is None:
            return
        # also if the command has ended by itself: processes that it has started may still run
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        # a server of games has a group of its own: it ends as soon as its learner has, and removes its folder
        deadline = time.monotonic() + _END_SECONDS
        while any(map(_runs, self._processes)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def rows(self) -> list[dict[str, Any]]:
        """The newest progress line of each replica, by rank."""
        newest: dict[Any, dict[str, Any]] = {}
        for line in self.progress.read_bytes().splitlines():
            if f'"{self.key}"'.encode() in line:
                row = json.loads(line)
                newest[row.get("replica")] = row
        return [newest[rank] for rank in sorted(newest, key=str)]

    @property
    def _output_file(self) -> Path:
        return self.progress.parent.parent / f"{self.progress.parent.name}.log"

    def _run_for(self, cpu_seconds: float) -> RaceWindow:
        first = last = self._next_progress()
        while last[1] - first[1] < cpu_seconds:
            last = self._next_progress()
        return RaceWindow(last[0] - first[0], last[1] - first[1], last[2] - first[2])

    def _next_progress(self) -> tuple[int, float, float]:
        """Wait for the next progress line; returns (env steps, CPU seconds, wall seconds) when it appears."""
        deadline = time.monotonic() + _SILENCE_SECONDS
        while time.monotonic() < deadline:
            row = self._newest_row()
            if row is not None:
                return int(row[self.key]), self.cpu_seconds(), time.monotonic()
            if self._process is None or self._process.poll() is not None:
                raise RunFailed(f"{self.label} ended unexpectedly. Its last output: {self._last_output()}")
            time.sleep(_POLL_SECONDS)
        raise RunFailed(f"{self.label} wrote nothing for {_SILENCE_SECONDS:g} s: {self._last_output()}")

    def _newest_row(self) -> dict[str, Any] | None:
        """The newest complete line with the key among those appended since the last call."""
        if not self.progress.exists():
            return None
        with open(self.progress, "rb") as file:
            file.seek(self._bytes_read)
            data = file.read()
        complete_lines = data[: data.rfind(b"\n") + 1]
        self._bytes_read += len(complete_lines)
        for line in reversed(complete_lines.splitlines()):
            if f'"{self.key}"'.encode() in line:
                row: dict[str, Any] = json.loads(line)
                return row
        return None

    def _skip_to_now(self) -> None:
        """Skip the progress lines so far, and look for new processes."""
        if self.progress.exists():
            self._bytes_read = self.progress.stat().st_size
        self._processes = self._tree()

    def cpu_seconds(self) -> float:
        """User and system time of all processes of the tree, ended ones included."""
        total = 0.0
        for process in self._processes:
            try:
                total += sum(process.cpu_times()[:4])  # user and system time, with ended children's
            except psutil.NoSuchProcess:
                continue
        return total

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _last_output(self) -> str:
        try:
            return self._output_file.read_text(errors="replace")[-600:].strip() or "(nothing)"
        except OSError:
            return "(nothing)"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ending_with_this_process() -> list[str]:
    """What to put before a racer's command, so that it is killed if this process is while the racer runs.
    Nothing where the system has no ``setpriv``; there only racers end that look for their parent."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL"]


@dataclass(frozen=True)
class ThroughputPlan:
    """Interleaved rounds of one window for each racer.

    rounds: number of rounds, in each of which every racer has a window. window_cpu_seconds: CPU seconds of
    each window. warm_up_cpu_seconds: CPU seconds of each racer between its first env steps and its first
    window, in which it compiles and begins to learn.
    """

    rounds: PositiveInt = 5
    window_cpu_seconds: PositiveSeconds = 5.0
    warm_up_cpu_seconds: PositiveSeconds = 3.0


@contextlib.contextmanager
def stopped_at_the_end(racers: Mapping[str, Racer]) -> Iterator[None]:
    """A context at whose end all racers are killed."""
    try:
        yield
    finally:
        for racer in racers.values():
            racer.stop()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for racers, removed at the end. Its name is short, because paths of sockets are limited."""
    # errors are ignored: a process that does not end may still write there, and all is measured by then
    with tempfile.TemporaryDirectory(prefix="murmurate-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def started(
    make_racers: Callable[[Path], Mapping[str, Racer]], plan: ThroughputPlan, log: Log
) -> Iterator[Mapping[str, Racer]]:
    """The racers that ``make_racers`` makes in a temporary folder, started; they are killed at the end."""
    with temporary_folder() as folder:
        racers = make_racers(folder)
        with stopped_at_the_end(racers):
            for racer in racers.values():
                log(f"starting {racer.label}")
                racer.start(plan.warm_up_cpu_seconds)
            yield racers


def race(
    make_racers: Callable[[Path], Mapping[str, Racer]], plan: ThroughputPlan, log: Log
) -> dict[str, list[RaceWindow]]:
    """Windows of all racers (see ``started``), one of each in every round; every second round begins with the
    last racer, so that a drift of the machine's speed within a round favours none."""
    with started(make_racers, plan, log) as racers:
        windows: dict[str, list[RaceWindow]] = {label: [] for label in racers}
        for number in range(plan.rounds):
            for label in list(racers)[:: -1 if number % 2 else 1]:
                window = racers[label].window(plan.window_cpu_seconds)
                windows[label].append(window)
                log(f"round {number + 1}: {label} {window.per_cpu_second:,.0f} env steps per CPU second")
    return windows
