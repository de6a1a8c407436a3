"""The processes of a local run: starting one, starting it again, and what it said at its end."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch.role import replica
from murmurate.training.run import Run
from murmurate.training.run_folder import write_roles


@dataclass
class Role:
    """A member's process, and the line over which it says why it could not go on."""

    rank: int
    process: ForkServerProcess
    line: Connection
    joins: bool = False  # started again, in place of one that died
    ended: bool = False
    ended_by_us: str = ""  # why the launcher ended it

    def end(self, why: str) -> None:
        """SIGKILL: also a process that is stopped, or stuck, writes nothing any more after it."""
        self.ended_by_us = why
        self.process.kill()

    def how(self) -> str:
        """How it ended, in a word or two."""
        if self.ended_by_us:
            return self.ended_by_us
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def last_words(self) -> str | None:
        """What it sent before it ended; a pipe that was merely closed also polls as readable."""
        try:
            return str(self.line.recv()) if self.line.poll() else None
        except EOFError:
            return None


class Crew:
    """One process a rank; ``roles[rank]`` is the newest."""

    def __init__(
        self,
        context: ForkServerContext,
        run: Run,
        memory_file: SharedMemoryFile,
        folder: Path,
        started_at: float,
        offset_seconds: float,
    ) -> None:
        self.run, self.folder = run, folder
        self.roles: list[Role] = []
        self._context, self._memory_file = context, memory_file
        self._clock = started_at, offset_seconds

    def start(self, parts: list[tuple[Path, int] | None]) -> None:
        """All of them; ``parts``: which part of which checkpoint each goes on from."""
        for rank, part in enumerate(parts):
            self.roles.append(self._begin(rank, part, joins=False))
        self._write_roles()

    def start_again(self, rank: int) -> None:
        """A process for a rank whose last one has ended; it waits for a peer's state."""
        self.roles[rank].line.close()
        self.roles[rank] = self._begin(rank, None, joins=True)
        self._write_roles()

    def _begin(self, rank: int, part: tuple[Path, int] | None, joins: bool) -> Role:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=replica,
            args=(self.run, rank, self._memory_file, theirs, self.folder, *self._clock, part, joins),
            name=f"murmurate-replica-{rank}",
            daemon=True,
        )
        process.start()
        theirs.close()
        return Role(rank, process, ours, joins)

    def _write_roles(self) -> None:
        write_roles(self.folder, {role.rank: role.process.pid for role in self.roles}, self.run.replicas)

    def kill(self) -> None:
        for role in self.roles:
            if role.process.is_alive():
                role.process.kill()
            role.process.join()
