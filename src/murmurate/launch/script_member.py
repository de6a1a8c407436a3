"""One member of a user's own script: its settings, its output, and how it ends, under every launcher."""

from __future__ import annotations

import abc
import contextlib
import functools
import io
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Fabric
from murmurate.fabric.processes.spawn import DIED, FAILED, FINISHED, LEFT, REFUSED, Died, Exit
from murmurate.replicator.replica_parts import role_of
from murmurate.replicator.stopping import StopSignals
from murmurate.replicator.user_loop import OwnLoop
from murmurate.spatial.parts import PartLost, Parts
from murmurate.strategies.interface import Strategy

Main = Callable[[OwnLoop], Any]


@dataclass(frozen=True)
class ScriptSettings:
    """The settings of ``murmurate.run`` that all members share."""

    main: Main
    strategy: Strategy
    replicas: int
    seed: int
    workers: int
    devices: tuple[tuple[str, ...], ...]
    collectives: bool
    output: str
    threads: int
    deadline_seconds: float
    grid: tuple[int, int]  # rows and columns of parts into which each replica is split

    @property
    def parts(self) -> int:
        return math.prod(self.grid)

    @property
    def members(self) -> int:
        return self.replicas * self.parts + self.strategy.centre

    def members_of(self, replica: int) -> range:
        """The ranks of the replica's parts; the first one leads the replica."""
        return range(replica * self.parts, (replica + 1) * self.parts)

    @property
    def centre_rank(self) -> int:
        """The rank of the centre, if the strategy has one."""
        return self.replicas * self.parts

    def name_of(self, rank: int) -> str:
        if self.strategy.centre and rank == self.centre_rank:
            return "the centre"
        replica, part = divmod(rank, self.parts)
        return f"replica {rank}" if self.parts == 1 else f"part {part} of replica {replica}"

    def run_member(self, fabric: Fabric, signals: StopSignals | None = None) -> Any:
        """Run ``main`` as the member behind ``fabric``; None for a centre. signals: see ``OwnLoop``."""
        strategy, strategy_fabric = role_of(self.strategy, fabric, self.parts)
        is_centre = fabric.rank == self.centre_rank
        deadline = self.deadline_seconds
        grid = (1, 1) if is_centre else self.grid
        devices = self.devices[fabric.rank % len(self.devices)]
        parts = Parts.open(fabric, grid, seed=self.seed, deadline_seconds=deadline)
        loop = OwnLoop(
            strategy,
            strategy_fabric,
            parts=parts,
            seed=self.seed,
            workers=self.workers,
            devices=devices,
            collectives=self.collectives,
            signals=signals,
        )
        result = None
        if isinstance(sys.stdout, OfMain):
            sys.stdout.is_main = lambda: loop.is_main
        with _current_device(devices[0]), parts.in_script(), loop:
            try:
                result = self.main(loop)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
        return result

    def run_to_exit(
        self, fabric: Fabric, out: IO[str] | io.TextIOBase, signals: StopSignals | None = None
    ) -> Exit:
        """Run ``main`` as the member behind ``fabric``, with its output to ``out``; returns how it ended.

        Errors of ``main`` are raised, except Refusal and PartLost.
        """
        torch.set_num_threads(self.threads)
        try:
            with contextlib.redirect_stdout(out), ended(out):
                result = self.run_member(fabric, signals)
        except Refusal as refusal:
            return Exit(REFUSED, str(refusal))
        except PartLost as lost:
            return Exit(LEFT, str(lost))
        return Exit(FINISHED, result=result)

    def result_of(self, rank: int, end: Exit, exit_code: int | None = None) -> Any:
        """The result of the member ``rank``, which ended as ``end`` says. Prints how it ended if it died or
        stopped; raises Refusal or RunFailed if it ended by an error."""
        name = self.name_of(rank)
        if end.how == REFUSED:
            raise Refusal(end.error)
        if end.how == FAILED:
            raise RunFailed(failure(name, end))
        if end.how in (DIED, LEFT):
            how = f"died ({end.error})" if end.how == DIED else f"stopped: {end.error}"
            print(f"murmurate: {name} {how}", file=sys.stderr, flush=True)
            return Died(rank, exit_code if end.how == DIED else None)
        return end.result

    def results(self, of_members: Mapping[int, Any]) -> list[Any]:
        """The results by replica, from those by rank: each is the result of the replica's first part, or
        ``Died`` if one of its parts died, or ended as another part was lost. Raises RunFailed if all died, or
        the centre."""
        replicas = [self._of_replica(of_members, replica) for replica in range(self.replicas)]
        if all(isinstance(result, Died) for result in replicas):
            codes = ", ".join(str(result.exit_code) for result in replicas)
            raise RunFailed(
                f"all replicas ended without a result (exit codes {codes}); see their output above"
            )
        if isinstance(of_members.get(self.centre_rank), Died):
            raise RunFailed(self.lost_centre())
        return replicas

    def lost_centre(self) -> str:
        """The message about a centre that died."""
        return (
            f"the centre of {self.strategy.name} died before it had ended, and with it the last updates "
            "of the replicas; see the output above"
        )

    def _of_replica(self, results: Mapping[int, Any], replica: int) -> Any:
        of_parts = [results[rank] for rank in self.members_of(replica)]
        dead = [result for result in of_parts if isinstance(result, Died)]
        codes = (result.exit_code for result in dead if result.exit_code is not None)
        return Died(replica, next(codes, None)) if dead else of_parts[0]

    def pickled(self) -> bytes:
        """These settings, pickled for another process. Raises Refusal if that could not import ``main``."""
        try:
            content = pickle.dumps(self)
        except Exception as error:
            raise Refusal(
                f"the script's main cannot be sent to a process ({error}). Let it be a function at module "
                "level, or use launcher='inline'."
            ) from error
        script = sys.modules["__main__"]
        if b"__main__" in content and getattr(script, "__file__", "<stdin>") == "<stdin>":
            raise Refusal(
                f"{_name(self.main)} was defined in a notebook or at a prompt, or read from standard input, "
                "and other processes cannot import it from there. Write it to a file (in a notebook, "
                "%%writefile my_training.py at the top of its cell) and import it from there, or use "
                "launcher='inline'."
            )
        started_as = getattr(getattr(script, "__spec__", None), "name", "")  # "" for python FILE
        if b"__main__" in content and started_as.split(".")[-1] == "__main__":
            raise Refusal(
                f"{_name(self.main)} was defined in a file __main__.py, and other processes cannot import it "
                "from there where the folder's name is what was started. Move it to another file and import "
                "it from there, or use launcher='inline'."
            )
        return content


def failure(name: str, end: Exit) -> str:
    """The message about a member that failed, called ``name``, with its error and traceback."""
    return f"{name} failed: {end.error}" + f"\n\n{end.trace}" * bool(end.trace)


def _current_device(name: str) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile ``.cuda()`` and ``torch.device("cuda")`` mean the GPU ``name`` in this thread; otherwise they
    mean the first GPU in every replica."""
    device = torch.device(name)
    if device.type != "cuda" or device.index is None:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _name(main: Main) -> str:
    while isinstance(main, functools.partial):
        main = main.func
    return str(getattr(main, "__name__", "main"))


def stdout_of(output: str, rank: int) -> IO[str] | io.TextIOBase:
    """The stream for this member's output: stdout, ``OfMain``, or stdout with lines marked by rank."""
    if output == "main":
        return sys.stdout if rank == 0 else OfMain()
    return _Marked(f"[{rank}] ")


@contextlib.contextmanager
def ended(out: IO[str] | io.TextIOBase) -> Iterator[None]:
    """At the end, write the last line of a stream of whole lines, even if its end is missing."""
    try:
        yield
    finally:
        if isinstance(out, WholeLines):
            out.end()


class OfMain(io.TextIOWrapper):
    """Writes to ``os.devnull``, and to stdout as soon as ``is_main()``: when all lower ranks have died."""

    def __init__(self) -> None:
        super().__init__(open(os.devnull, "wb"), encoding="utf-8", errors="replace")  # noqa: SIM115
        self.is_main: Callable[[], bool] = lambda: False
        self._stdout, self._has_written = sys.stdout, False

    def write(self, text: str) -> int:
        if not self.is_main():
            return super().write(text)
        self._has_written = True
        return self._stdout.write(text)

    def flush(self) -> None:
        super().flush()
        if self._has_written:
            self._stdout.flush()


class ByThread(io.TextIOBase):
    """Writes to the stream registered for the thread that prints (in ``streams``), or to ``otherwise``.

    For members that are threads of one process, which has only one ``sys.stdout``.
    """

    def __init__(self, otherwise: IO[str]) -> None:
        self.otherwise = otherwise
        self.streams: dict[int, IO[str] | io.TextIOBase] = {}

    def write(self, text: str) -> int:
        return self.streams.get(threading.get_ident(), self.otherwise).write(text)

    def flush(self) -> None:
        self.streams.get(threading.get_ident(), self.otherwise).flush()


class WholeLines(io.TextIOBase):
    """A stream that passes on whole lines, so that those of several members do not mix."""

    def __init__(self) -> None:
        self._last_line = ""

    @abc.abstractmethod
    def pass_on(self, lines: Sequence[str]) -> None:
        """Write or send complete lines, without their ends."""

    def write(self, text: str) -> int:
        *lines, self._last_line = (self._last_line + text).split("\n")
        self.pass_on(lines)
        return len(text)

    def end(self) -> None:
        """Pass on the last line, if it was not ended."""
        if self._last_line:
            self.write("\n")


class _Marked(WholeLines):
    """Writes whole lines to stdout, each after ``mark``."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark, self._out = mark, sys.stdout

    def pass_on(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._out.write(f"{self._mark}{line}\n")
        self._out.flush()

    def flush(self) -> None:
        self._out.flush()
