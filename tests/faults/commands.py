"""Real ``murmurate`` commands for tests, each in a session and with a temporary folder of its own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from murmurate.cli.main import main
from sessions import end
from waiting import DEADLINE_SECONDS, until


class Written:
    """What a run has written to its folder so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return read_lines(path) if path.exists() else []

    def records(self, replica: int) -> list[dict[str, Any]]:
        return [r for r in self._lines("metrics.jsonl") if r["replica"] == replica and "kind" not in r]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [r for r in self._lines("metrics.jsonl") if r.get("event") == name]

    def pids(self) -> dict[int, int]:
        """Process id by rank, from ``roles.jsonl``; a centre comes after the replicas."""
        lines = until(lambda: self._lines("roles.jsonl"), "roles.jsonl")
        replicas = sum(role["role"] == "replica" for role in lines)
        return {role["index"] + replicas * (role["role"] == "center"): role["pid"] for role in lines}

    def manifest(self) -> dict[str, Any]:
        """``state.json`` of the last checkpoint."""
        found: dict[str, Any] = json.loads((self.folder / "checkpoints" / "last" / "state.json").read_text())
        return found

    def has_checkpoint(self) -> bool:
        return (self.folder / "checkpoints" / "last" / "state.json").exists()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


class Command(Written):
    """``python -m murmurate ...`` as it runs."""

    program: Sequence[str] = ("murmurate",)

    def __init__(self, folder: Path, *arguments: object, environment: dict[str, str] | None = None) -> None:
        super().__init__(folder)
        # not under pytest's own folder: a socket's path has at most 107 characters
        self.temporary = Path(tempfile.mkdtemp(prefix="murmur"))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed at exit
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.program, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self.temporary),
                # torch's cache of compiled kernels is not ours to remove
                "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), "torchinductor"),
                **(environment or {}),
            },
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.members():
            process.kill()
        end(self.process)
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._said.close()

    # -- the processes

    def members(self) -> list[psutil.Process]:
        """Every process of the session that still runs: launcher, fork server, roles, resource tracker."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """The exit code (negative: the signal that ended it)."""
        return int(self.process.wait(seconds))

    def kill_group(self, number: signal.Signals) -> None:
        """What a terminal, or a scheduler, does: one signal to every process of the group."""
        os.killpg(self.process.pid, number)

    def limit_file_size(self, size_bytes: int) -> None:
        """From now on no process of the run can make a file larger: what a full disk looks like."""
        for process in self.members():
            process.rlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    # -- what it wrote

    def said(self) -> str:
        """stdout and stderr so far."""
        self._said.seek(0)
        return self._said.read().decode()

    def learning(self, replicas: int | Sequence[int], records: int = 3, after_seconds: float = 0.0) -> None:
        """Wait until every one of these replicas has written so many records after a time of the run."""
        ranks = range(replicas) if isinstance(replicas, int) else replicas

        def late(rank: int) -> int:
            return sum(record["time_seconds"] > after_seconds for record in self.records(rank))

        until(
            lambda: self.process.poll() is not None or all(late(rank) >= records for rank in ranks),
            f"{records} records of each replica; it said: {self.said()}",
        )
        assert self.process.poll() is None, f"it ended too soon: {self.said()}"

    def until_checkpoint(self) -> None:
        until(lambda: self.has_checkpoint() or self.process.poll() is not None, "a checkpoint")
        assert self.process.poll() is None, f"it ended too soon: {self.said()}"

    # -- what it leaves behind

    def shares_by_name(self) -> list[str]:
        """Named shared memory that its processes have mapped (which a SIGKILL would leave behind)."""
        named = []
        for process in self.members():
            try:
                named += [m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")]
            except psutil.Error:
                continue
        return named

    def leaves_nothing(self) -> None:
        """No process of the session remains, and no socket or other temporary file."""
        self.leaves_no_process()
        until(lambda: not self.left(), f"no temporary files; there are {self.left()}")

    def leaves_no_process(self) -> None:
        until(lambda: not self.members(), f"all processes gone; there are {self.members()}")

    def left(self) -> list[str]:
        return [str(path) for path in self.temporary.rglob("*")]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that may be growing."""
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def _train(folder: Path, recipe: str, *options: object) -> list[str]:
    """The arguments of a ``murmurate train`` without an early end and with a short evaluation."""
    common = ("--stop-at-return", "none", "--eval-episodes", 1, "--out", folder)
    return [str(argument) for argument in ("train", recipe, *common, *options)]


@contextmanager
def training(folder: Path, recipe: str = "cartpole-gala", *options: object) -> Iterator[Command]:
    """A command of its own, which can be signalled, killed, and searched for what it leaves behind."""
    with Command(folder, *_train(folder, recipe, *options)) as command:
        yield command


def trained(folder: Path, recipe: str = "cartpole-gala", *options: object, code: int = 0) -> Written:
    """The same in this process, where a test does nothing to its launcher: it has imported what a command
    takes seconds to import, and so has the fork server that is left by the run before."""
    assert main(_train(folder, recipe, *options)) == code
    return Written(folder)
