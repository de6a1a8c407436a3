"""Run a user's own script as several replicas: ``murmurate.run(main, replicas=4, strategy="gala")``."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import multiprocessing
import multiprocessing.process
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.spawn import (
    DIED,
    FAILED,
    FINISHED,
    LEFT,
    REFUSED,
    Died,
    Exit,
    Worker,
    WorkerProcess,
    WorkerProcesses,
    take_signals,
)
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replica_parts import check_parts, role_of
from murmurate.replicator.replicator import check_capabilities, check_common_rounds
from murmurate.replicator.user_loop import OwnLoop
from murmurate.spatial.parts import PartLost, Parts, checked_grid
from murmurate.strategies import strategy as strategy_by_name
from murmurate.strategies.interface import Strategy

Main = Callable[[OwnLoop], Any]
_PRELOADED = ("murmurate.launch.script", "torch._dynamo")  # an optimizer imports the second, for 1.6 s
_POLL_SECONDS = 1.0


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
    grid: tuple[int, int]  # of the parts of a replica

    @property
    def parts(self) -> int:
        return math.prod(self.grid)

    @property
    def members(self) -> int:
        return self.replicas * self.parts + self.strategy.centre

    def members_of(self, replica: int) -> range:
        """Its parts; the first one is its leader."""
        return range(replica * self.parts, (replica + 1) * self.parts)

    def name_of(self, rank: int) -> str:
        replica, part = divmod(rank, self.parts)
        return f"replica {rank}" if self.parts == 1 else f"part {part} of replica {replica}"

    def run_member(self, fabric: Fabric) -> Any:
        """Run ``main`` as the member behind ``fabric``; None for a centre."""
        strategy, across = role_of(self.strategy, fabric, self.parts)
        is_centre = fabric.rank == self.replicas * self.parts
        deadline = self.deadline_seconds
        grid = (1, 1) if is_centre else self.grid
        loop = OwnLoop(
            strategy,
            across,
            parts=Parts.open(fabric, grid, seed=self.seed, deadline_seconds=deadline),
            seed=self.seed,
            workers=self.workers,
            devices=self.devices[fabric.rank % len(self.devices)],
            collectives=self.collectives,
        )
        result = None
        with loop:
            result = self.main(loop)
        return result


def run(
    main: Main,
    *,
    replicas: int = 1,
    parts: int | tuple[int, int] = 1,
    strategy: str | Strategy = "all-reduce",
    launcher: Literal["local", "inline"] = "local",
    seed: int = 0,
    workers: int = 1,
    devices: Sequence[str | Sequence[str]] = ("cpu",),
    collectives: bool = False,
    output: Literal["main", "all"] = "main",
    threads: int = 1,
    deadline_seconds: float = 60.0,
) -> list[Any]:
    """Run ``main(replicator)`` as each replica, and return their results, by rank.

    Call it under ``if __name__ == "__main__":``, as each process imports the script again.

    Args:
        main: takes an ``OwnLoop``; a function at module level, as other processes import it by name.
        parts: of each replica, along rows and columns of its images (see ``murmurate.spatial``); each part is
            a member, and ``replicator.parts`` joins those of a replica.
        strategy: a name, or a strategy with other hyper-parameters. One with a centre gets one more member.
        launcher: "local" gives each member a process on this host; "inline" a thread of this one, one running
            at a time in an order drawn from ``seed``: repeatable, and breakpoints work.
        workers, collectives: see ``OwnLoop``.
        devices: of each replica (or part), cycled over them; a sequence of them for a model-parallel one.
        output: "main" prints the first replica's output, and errors; "all" that of all, marked by rank.
        threads: of torch in each process.
        deadline_seconds: how long a collective waits for a silent member.

    A member that raises ends them all: RunFailed carries its traceback, Refusal its message. A process that
    is killed is ``Died`` in the result, and the others go on as their strategy does; RunFailed if all are.
    A replica ends with each of its parts.
    """
    kind = strategy_by_name(strategy)() if isinstance(strategy, str) else strategy
    replica_devices = tuple((d,) if isinstance(d, str) else tuple(d) for d in devices)
    check_capabilities(kind, frozenset(Capability), "this host", itertools.chain(*replica_devices))
    if collectives:
        check_common_rounds(kind, "collectives")
    if replicas < 1:
        raise Refusal(f"replicas is {replicas}: use at least 1")
    kind.check(replicas)
    settings = ScriptSettings(
        main, kind, replicas, seed, workers, replica_devices, collectives, output, threads, deadline_seconds,
        checked_grid(parts),
    )  # fmt: skip
    check_parts(kind, settings.parts)
    if launcher == "inline":
        return _inline(settings)
    if launcher == "local":
        return _local(settings)
    raise Refusal(f"there is no launcher '{launcher}' for scripts: use local or inline")


def _inline(settings: ScriptSettings) -> list[Any]:
    fabric = SimulatedFabric(settings.members, settings.seed, keep_log=False, coroutines="threads")

    def run_member(fabric: Fabric) -> Any:
        try:
            return settings.run_member(fabric)
        except Refusal:
            raise
        except Exception as error:
            raise RunFailed(_failure(settings.name_of(fabric.rank), Exit.failed(error))) from error

    results = fabric.run([run_member] * settings.members)
    return [results[settings.members_of(replica)[0]] for replica in range(settings.replicas)]


# -- processes ----------------------------------------------------------------------------------------


def _local(settings: ScriptSettings) -> list[Any]:
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise Refusal(
            "each process imports the script, and this one started replicas while it was imported. Put "
            "murmurate.run(...) under: if __name__ == '__main__':"
        )
    try:
        pickle.dumps(settings)
    except Exception as error:
        raise Refusal(
            f"the script's main cannot be sent to a process ({error}). Let it be a function at module level, "
            "or use launcher='inline'."
        ) from error
    sys.stdout.flush()
    with WorkerProcesses(settings.members, _PRELOADED) as workers:
        for rank in range(settings.members):
            workers.start(rank, functools.partial(_run_worker, settings))
        return _collect(settings, workers)


def _collect(settings: ScriptSettings, workers: WorkerProcesses) -> list[Any]:
    """Collect results as they arrive; the first worker that fails ends the rest, one that is killed is left
    out. Once one has finished, a worker that stays stopped is killed; so is a centre that outlives all
    replicas."""
    results: dict[int, Any] = {}
    idle: Counter[int] = Counter()  # polls in a row at which a worker was idle
    while workers.alive:
        ended = workers.wait(_POLL_SECONDS)
        for worker in workers.alive if results and not ended else ():
            alone = worker.rank == settings.replicas * settings.parts and len(workers.alive) == 1
            idle[worker.rank] = idle[worker.rank] + 1 if alone or worker.is_stopped else 0
            if idle[worker.rank] * _POLL_SECONDS > settings.deadline_seconds:
                worker.kill()
        for worker in ended:
            results[worker.rank] = _result(worker, settings)
            if isinstance(results[worker.rank], Died) or settings.strategy.common_rounds:
                workers.run_state.mark_dead(worker.rank)  # the others go on without it
    replicas = [_of_replica(settings, results, replica) for replica in range(settings.replicas)]
    if all(isinstance(r, Died) for r in replicas):
        codes = ", ".join(str(r.exit_code) for r in replicas)
        raise RunFailed(f"all replicas ended without a result (exit codes {codes}); see their output above")
    return replicas


def _of_replica(settings: ScriptSettings, results: dict[int, Any], replica: int) -> Any:
    """The leader's result; if one of its parts was killed, or left as another was, ``Died``."""
    own = [results[rank] for rank in settings.members_of(replica)]
    dead = [result for result in own if isinstance(result, Died)]
    return Died(replica, next((d.exit_code for d in dead if d.exit_code), None)) if dead else own[0]


def _result(worker: WorkerProcess, settings: ScriptSettings) -> Any:
    """The result of an ended worker. Raises Refusal and RunFailed."""
    rank, end = worker.rank, worker.exit
    assert end is not None
    name = settings.name_of(rank)
    if end.how == REFUSED:
        raise Refusal(end.error)
    if end.how == FAILED:
        raise RunFailed(_failure(name, end))
    if end.how == DIED:
        print(f"murmurate: {name} died ({end.error})", file=sys.stderr, flush=True)
        return Died(rank, worker.process.exitcode)
    if end.how == LEFT:
        print(f"murmurate: {name} stopped: {end.error}", file=sys.stderr, flush=True)
        return Died(rank, None)
    return end.result


def _failure(name: str, end: Exit) -> str:
    return f"{name} failed: {end.error}" + f"\n\n{end.trace}" * bool(end.trace)


def _run_worker(settings: ScriptSettings, worker: Worker) -> Exit:
    """The work of a worker process of a script."""
    take_signals()
    torch.set_num_threads(settings.threads)
    fabric = ProcessFabric(worker.memory_file, worker.run_state, worker.rank, settings.deadline_seconds)
    try:
        with contextlib.redirect_stdout(_stdout(settings.output, worker.rank)):
            result = settings.run_member(fabric)
    except Refusal as refusal:
        return Exit(REFUSED, str(refusal))
    except PartLost as lost:
        return Exit(LEFT, str(lost))
    worker.run_state.finished(worker.rank)
    return Exit(FINISHED, result=result)


def _stdout(output: str, rank: int) -> IO[str] | io.TextIOBase:
    """The stream for this member's output: none, stdout, or stdout with lines marked by rank."""
    if output == "main":
        return sys.stdout if rank == 0 else open(os.devnull, "w")
    return _Marked(f"[{rank}] ")


class _Marked(io.TextIOBase):
    """Writes whole lines to stdout, each after ``mark``, so that those of several processes do not mix."""

    def __init__(self, mark: str) -> None:
        self._mark, self._begun, self._out = mark, "", sys.stdout

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._out.write(f"{self._mark}{line}\n")
        self._out.flush()
        return len(text)

    def flush(self) -> None:
        self._out.flush()
