"""Start a script of one's own as several replicas: ``murmurate.run(main, replicas=4, strategy="gala")``."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import IO, Any, Literal

import psutil
import torch

# the first optimizer of a process imports this, for 1.6 s: here the fork server does, once for all members
import torch._dynamo

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.processes.fabric import Died, ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.meeting import check_meeting, meets
from murmurate.replicator.replicator import check_capabilities
from murmurate.replicator.user_loop import OwnLoop
from murmurate.strategies import strategy as strategy_by_name
from murmurate.strategies.interface import Strategy

Main = Callable[[OwnLoop], Any]
_FINISHED = "finished"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Plan:
    """One start of a script: what all members get alike."""

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

    @property
    def members(self) -> int:
        return self.replicas + self.strategy.centre

    def live(self, door: Fabric) -> Any:
        """What the member behind ``door`` does; None for a centre."""
        loop = OwnLoop(
            self.strategy,
            door,
            seed=self.seed,
            workers=self.workers,
            devices=self.devices[door.rank % len(self.devices)],
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
    """Run ``main(replicator)`` once a replica, and return what each returned, by rank.

    Call it under ``if __name__ == "__main__":``, for each process imports the script again.

    Args:
        main: takes an ``OwnLoop``; stands at module level (a process of its own imports it by name).
        strategy: a name, or a strategy with hyper-parameters of one's own. One with a centre gets one more
            member.
        launcher: "local" gives each member a process on this host; "inline" a thread of this one, one running
            at a time in an order drawn from ``seed``: repeatable, and breakpoints work.
        workers, collectives: see ``OwnLoop``.
        devices: of each replica, cycled over the replicas; a sequence of them for a model-parallel one.
        output: "main" keeps what the first replica prints, and errors; "all" marks lines by their rank.
        threads: torch's, in each process.
        deadline_seconds: how long one waits for a silent member in a collective.

    A member that raises ends them all: RunFailed carries its traceback, Refusal its words. A process that is
    killed is ``Died`` in the result, and the others go on as their strategy says; RunFailed if all are.
    """
    kind = strategy_by_name(strategy)() if isinstance(strategy, str) else strategy
    check_capabilities(kind, frozenset(Capability), "this host")
    if collectives:
        check_meeting(kind, "collectives")
    if replicas < 1:
        raise Refusal(f"{replicas} replicas are none: use at least 1")
    if replicas > 1 and not kind.needs:
        raise Refusal(
            f"{kind.name} trains one replica and {replicas} were asked for: let them agree, all-reduce"
        )
    own = tuple((d,) if isinstance(d, str) else tuple(d) for d in devices)
    plan = Plan(
        main, kind, replicas, seed, workers, own, collectives, output, threads, deadline_seconds
    )  # fmt: skip
    if launcher == "inline":
        return _inline(plan)
    if launcher == "local":
        return _local(plan)
    raise Refusal(f"there is no launcher '{launcher}' for scripts: use local or inline")


def _inline(plan: Plan) -> list[Any]:
    fabric = SimulatedFabric(plan.members, plan.seed, keep_log=False, contexts="threads")

    def live(door: Fabric) -> Any:
        try:
            return plan.live(door)
        except Refusal:
            raise
        except Exception as error:
            raise RunFailed(_words(door.rank, error)) from error

    return fabric.run([live] * plan.members)[: plan.replicas]


# -- processes ----------------------------------------------------------------------------------------


def _local(plan: Plan) -> list[Any]:
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise Refusal(
            "each process imports the script, and this one started replicas while it was imported. Put "
            "murmurate.run(...) under: if __name__ == '__main__':"
        )
    try:
        packed = pickle.dumps(plan)
    except Exception as error:
        raise Refusal(
            f"the script's main cannot be sent to a process ({error}). Let it be a function at module level, "
            "or use launcher='inline'."
        ) from error
    context = _context()
    memory_file = SharedMemoryFile.create()
    run_state = _open_run_state(memory_file, plan.members)
    run_state.open()
    members: dict[Any, tuple[int, ForkServerProcess]] = {}
    sys.stdout.flush()
    try:
        for rank in range(plan.members):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_live,
                args=(rank, packed, plan.members, memory_file, theirs),
                name=f"replica-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            members[ours] = rank, process
        return _collect(plan, members, run_state)
    finally:
        for line, (_, process) in members.items():
            process.kill()
            process.join()
            line.close()
        memory_file.close()


def _context() -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the fork server's torch makes its pools
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["murmurate.launch.script"])
    return context


def _open_run_state(memory_file: SharedMemoryFile, size: int) -> RunState:
    return RunState(size, memory_file.counters("run_state", (RunState.cells_needed(size),)))


def _collect(plan: Plan, members: dict[Any, tuple[int, ForkServerProcess]], run_state: RunState) -> list[Any]:
    """Take results in as they come; the first that failed ends the rest, who is killed is left out. Once one
    has finished, who is stopped and does not go on is killed; so is a centre that outlives all replicas."""
    results: dict[int, Any] = {}
    silent = set(members)
    idle: Counter[Any] = Counter()  # looks in a row at which it was of no use
    while silent:
        found = silent & set(wait(list(silent), _LOOK_SECONDS))
        for line in silent - found if results and not found else ():
            rank, process = members[line]
            alone = rank >= plan.replicas and len(silent) == 1
            idle[line] = idle[line] + 1 if alone or _is_stopped(process) else 0
            if idle[line] * _LOOK_SECONDS > plan.deadline_seconds:
                process.kill()
        for line in found:
            silent.remove(line)
            rank, process = members[line]
            try:
                how, what = pickle.loads(line.recv_bytes())
            except EOFError:
                process.join()
                results[rank] = Died(rank, process.exitcode)
                run_state.mark_dead(rank)
                continue
            if how == "refused":
                raise Refusal(what)
            if how != _FINISHED:
                raise RunFailed(what)
            results[rank] = what
            if meets(plan.strategy):
                run_state.mark_dead(rank)  # who still steps does so without it
    replicas = [results[rank] for rank in range(plan.replicas)]
    if all(isinstance(r, Died) for r in replicas):
        codes = ", ".join(str(r.exit_code) for r in replicas)
        raise RunFailed(
            f"all replicas ended without a result (exit codes {codes}); see what they printed above"
        )
    return replicas


def _is_stopped(process: ForkServerProcess) -> bool:
    """By a signal or a debugger: one that only takes long is not."""
    try:
        return psutil.Process(process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _live(rank: int, packed: bytes, size: int, memory_file: SharedMemoryFile, line: Connection) -> None:
    """Process entry point of one member."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the starting process's, which ends the members
    faulthandler.enable()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    run_state = _open_run_state(memory_file, size)
    message: tuple[str, Any]
    try:
        plan: Plan = pickle.loads(packed)
        torch.set_num_threads(plan.threads)
        with contextlib.redirect_stdout(_stdout(plan.output, rank)):
            message = _FINISHED, plan.live(ProcessFabric(memory_file, run_state, rank, plan.deadline_seconds))
        run_state.finished(rank)
        packed_message = _sendable(rank, message)
    except Refusal as refusal:
        packed_message = pickle.dumps(("refused", str(refusal)))
    except BaseException as error:
        packed_message = pickle.dumps(("failed", _words(rank, error)))
    sys.stdout.flush()
    line.send_bytes(packed_message)
    line.close()


def _sendable(rank: int, message: tuple[str, Any]) -> bytes:
    try:
        packed = pickle.dumps(message)
        pickle.loads(packed)
        return packed
    except Exception as error:
        words = f"replica {rank} returned what cannot be sent back ({error}): return tensors and plain values"
        return pickle.dumps(("failed", words))


def _words(rank: int, error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error))
    return f"replica {rank} failed: {error}\n\n{trace.rstrip()}"


def _stdout(output: str, rank: int) -> IO[str] | io.TextIOBase:
    """Where this member's prints go: nowhere, as they are, or marked by its rank."""
    if output == "main":
        return sys.stdout if rank == 0 else open(os.devnull, "w")
    return _Marked(f"[{rank}] ")


class _Marked(io.TextIOBase):
    """Writes whole lines to stdout, each begun by ``mark``, so that those of several processes do not mix."""

    def __init__(self, mark: str) -> None:
        self._mark, self._begun, self._out = mark, "", sys.stdout

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for one in lines:
            self._out.write(f"{self._mark}{one}\n")
        self._out.flush()
        return len(text)

    def flush(self) -> None:
        self._out.flush()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
