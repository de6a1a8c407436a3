"""Runs in processes of their own, and how they end at Ctrl-C and SIGTERM."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from murmurate.errors import Refusal, cause_of, refuse_not_utf8
from murmurate.recipes import recipe
from murmurate.record.stored import UNSOUND, read_object, write_json
from murmurate.training import checkpoint, own_files
from murmurate.training.run import Run
from murmurate.training.run_folder import locked, plain

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
_POLL_SECONDS = 0.1


class RunProcess:
    """``murmurate WORDS`` in a process group of its own, so that a Ctrl-C reaches it only through ``signal``.

    output: the file to which its output is appended; None: this process's output.
    threads: number of threads of torch and of libraries for linear algebra, where the environment does not
    set it; None: their default.
    """

    def __init__(self, words: Sequence[str], output: Path | None = None, threads: int | None = None) -> None:
        environment = dict(os.environ)
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        file = None if output is None else output.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "murmurate", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=None if file is None else subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
        finally:
            if file is not None:
                file.close()

    def code(self) -> int | None:
        """The process's exit code; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process, if it still runs, after an error in this one."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def changed_files(folders: Iterable[Path], run: Run) -> str:
    """A warning, if files of the user's own have changed since the runs in ``folders`` began; else empty."""
    if not (paths := own_files.changed(folders, run)):
        return ""
    return (
        f"warning: since runs in this folder began, {' and '.join(paths)} changed: the next runs may differ "
        "from these in more than their settings. Restore the former content, or choose another folder with "
        "--out."
    )


class HeldRun:
    """A run that another process, such as one left by a killed command, still trains in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def code(self) -> int | None:
        """None while the folder is held; then 0 if the run has finished, else 1."""
        return None if is_held(self._folder) else int(not has_finished(self._folder))

    def signal(self, number: int) -> None:
        """Do nothing: whoever started the run stops it."""

    def end(self) -> None:
        """Do nothing: whoever started the run ends it."""


Running = RunProcess | HeldRun


class Signals:
    """Inside ``with``, SIGINT and SIGTERM are counted and do not end this process.

    number: number of the first signal received, or 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._unsent: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self._unsent.append(number)

    def forward(self, processes: Sequence[Running]) -> None:
        """Send the processes each signal that arrived since the last call: the first lets a run save and end,
        a second ends it at once."""
        while self._unsent:
            number = self._unsent.pop(0)
            for process in processes:
                process.signal(number)


def run_all(
    start: Callable[[], tuple[Any, Running] | None],
    ended: Callable[[Any, int], None],
    jobs: int,
    watch: Callable[[Any, Running], None] = lambda key, process: None,
) -> int:
    """Start processes, at most ``jobs`` at once, until ``start`` returns None and all have ended; returns the
    first signal received, or 0. After a signal no process is started, and each ``RunProcess`` is sent it and
    awaited.

    start: returns a key and its process. ended: called with a key and the exit code of its process, which is
    128 + n if signal n ended it; then ``start`` is called again. watch: called with a key and its process now
    and then while the process runs.
    """
    running: list[tuple[Any, Running]] = []
    exhausted = False
    try:
        with Signals() as signals:
            while True:
                while len(running) < jobs and not exhausted and not signals.number:
                    if (started := start()) is None:
                        exhausted = True
                    else:
                        running.append(started)
                if signals.number:  # runs that other processes train are not awaited
                    running = [(key, process) for key, process in running if isinstance(process, RunProcess)]
                if not running:
                    return signals.number
                time.sleep(_POLL_SECONDS)
                signals.forward([process for _, process in running])
                for key, process in list(running):
                    if (code := process.code()) is None:
                        watch(key, process)
                    else:
                        running.remove((key, process))
                        ended(key, code if code >= 0 else 128 - code)
                        exhausted = False
    finally:
        for _, process in running:
            process.end()


# -- what a folder says of its run ------------------------------------------------------------------------


def with_younger_fields(stored: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """The stored settings of a run. Fields of ``run`` that did not exist then have the recipe's values, those
    of the strategy its defaults."""
    usual = dataclasses.replace(recipe(run.recipe), strategy=type(run.strategy)())
    return _completed(stored, plain(usual))


def _completed(stored: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(usual) | dict(stored)
    for name, value in usual.items():
        if isinstance(value, dict) and isinstance(found[name], dict):
            found[name] = _completed(found[name], value)
    return found


def summary(folder: Path) -> dict[str, Any] | None:
    """``summary.json``; None if there is none that can be read."""
    try:
        return read_object(folder / "summary.json")
    except (OSError, *UNSOUND):
        return None


def has_finished(folder: Path) -> bool:
    stored = summary(folder)
    return stored is not None and stored.get("exit") == "finished"


def can_resume(folder: Path) -> bool:
    """Whether ``folder`` has a checkpoint from which ``resume`` goes on: at most its replays are damaged."""
    paths = (folder / "checkpoints" / name for name in ("last", "previous"))
    return any(checkpoint.damage(path, replays=False) is None for path in paths)


def is_held(folder: Path) -> bool:
    """Whether another process trains in ``folder``."""
    if not (folder / "checkpoints").is_dir():
        return False
    try:
        with locked(folder):
            return False
    except Refusal:
        return True


def check_free(folder: Path, kind: str) -> None:
    """Raise Refusal if there is a file, or a folder with content, where a sweep or study (``kind``) is to
    begin."""
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"{folder} is a file. Choose another with --out.")
    if folder.exists() and any(folder.iterdir()):
        raise Refusal(f"{folder} is not empty and holds no {kind}. Choose another: --out.")


def write_settings(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Write the file ``name`` of a sweep or study into ``folder``, which is made if needed."""
    refuse_not_utf8(content, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, content)
    except OSError as error:
        raise Refusal(f"{folder} cannot be written: {cause_of(error)}. Choose another with --out.") from error
