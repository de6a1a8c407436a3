"""Racers: real training commands in their own processes, run one at a time in windows.

All racers of a bench are started and warmed up once. A window lets one go on while the others are
stopped by a signal, so pairs can be interleaved without paying start-ups again, and neither side is
changed for being measured: a racer only has to append JSON lines that say how many env steps it has
made. The unit is the CPU second of the whole process tree, launcher included.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from murmurate.bench._result import Log
from murmurate.errors import RunFailed

_POLL_SECONDS = 0.004
_SILENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Window:
    """What a racer did while it ran: env steps, CPU seconds of its tree, wall seconds."""

    env_steps: int
    cpu_seconds: float
    wall_seconds: float

    @property
    def per_cpu_second(self) -> float:
        return self.env_steps / self.cpu_seconds

    @property
    def per_second(self) -> float:
        return self.env_steps / self.wall_seconds


@dataclass
class Racer:
    """One competitor: a command that appends lines with ``key`` (env steps so far) to ``progress``."""

    label: str
    command: Sequence[str]
    progress: Path
    key: str = "env_steps"
    last: dict[str, Any] = field(default_factory=dict, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _members: list[psutil.Process] = field(default_factory=list, init=False)
    _read: int = field(default=0, init=False)

    def start(self, warm_up_cpu_seconds: float = 3.0) -> None:
        """Begin, warm up, and stand still. Raises RunFailed if it ends before that."""
        self.progress.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "wb") as log:
            # A process group of its own, but in this session: should this process die, the kernel
            # hangs up on a group that is stopped, so none is left behind for ever.
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                process_group=0,
            )
        self._mark()
        self._members = self._tree()
        self._run_for(warm_up_cpu_seconds)
        self._signal(signal.SIGSTOP)

    def window(self, cpu_seconds: float) -> Window:
        """Go on for at least that many CPU seconds, from one progress line to another."""
        self._skip()
        self._signal(signal.SIGCONT)
        try:
            return self._run_for(cpu_seconds)
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End it without ceremony: its files are the bench's, and hold nothing worth saving."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def rows(self) -> list[dict[str, Any]]:
        """The newest progress line of each replica, by rank."""
        newest: dict[Any, dict[str, Any]] = {}
        for line in self.progress.read_bytes().splitlines():
            if f'"{self.key}"'.encode() in line:
                row = json.loads(line)
                newest[row.get("replica")] = row
        return [newest[rank] for rank in sorted(newest, key=str)]

    @property
    def _log(self) -> Path:
        return self.progress.parent.parent / f"{self.progress.parent.name}.log"

    def _run_for(self, cpu_seconds: float) -> Window:
        steps, cpu, wall = self._mark()
        while True:
            now = self._mark()
            if now[1] - cpu >= cpu_seconds:
                return Window(now[0] - steps, now[1] - cpu, now[2] - wall)

    def _mark(self) -> tuple[int, float, float]:
        """The next progress line: (env steps, CPU seconds, wall seconds) at the time it appears."""
        deadline = time.monotonic() + _SILENCE_SECONDS
        while time.monotonic() < deadline:
            fresh = self._fresh()
            if fresh is not None:
                self.last = fresh
                return int(fresh[self.key]), self.cpu_seconds(), time.monotonic()
            if self._process is None or self._process.poll() is not None:
                raise RunFailed(f"{self.label} ended by itself. Its last words: {self._last_words()}")
            time.sleep(_POLL_SECONDS)
        raise RunFailed(f"{self.label} said nothing for {_SILENCE_SECONDS:g} s: {self._last_words()}")

    def _fresh(self) -> dict[str, Any] | None:
        """The newest whole line with the key that has been appended since the last look."""
        if not self.progress.exists():
            return None
        with open(self.progress, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in reversed(whole.splitlines()):
            if f'"{self.key}"'.encode() in line:
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def _skip(self) -> None:
        if self.progress.exists():
            self._read = self.progress.stat().st_size
        self._members = self._tree()

    def cpu_seconds(self) -> float:
        """User and system time of all processes of the tree, those that have ended included."""
        total = 0.0
        for process in self._members:
            try:
                total += sum(process.cpu_times()[:4])  # own and waited-for children's, user and system
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

    def _last_words(self) -> str:
        try:
            return self._log.read_text(errors="replace")[-600:].strip() or "(nothing)"
        except OSError:
            return "(nothing)"


@contextlib.contextmanager
def stopped_at_the_end(field: dict[str, Racer]) -> Iterator[dict[str, Racer]]:
    """Whatever happens, none outlives the context."""
    try:
        yield field
    finally:
        for racer in field.values():
            racer.stop()


def windows_in_turn(
    field: dict[str, Racer], rounds: int, cpu_seconds: float, log: Log, warm_up_cpu_seconds: float = 3.0
) -> dict[str, list[Window]]:
    """Start all, and take one window of each, round after round."""
    windows: dict[str, list[Window]] = {label: [] for label in field}
    for racer in field.values():
        log(f"starting {racer.label}")
        racer.start(warm_up_cpu_seconds)
    for number in range(rounds):
        for label, racer in field.items():
            done = racer.window(cpu_seconds)
            windows[label].append(done)
            log(f"round {number + 1}: {label} {done.per_cpu_second:,.0f} env steps per CPU second")
    return windows
