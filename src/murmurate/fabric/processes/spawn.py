"""Members as functions in processes of this host: what tests and small experiments start.

One fork server, with torch imported, serves all calls of a session.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from murmurate.fabric.interface import Fabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile

_LINGER_SECONDS = 60.0  # at most; whoever started the members ends them once all have given their results

MakeFabric = Callable[[SharedMemoryFile, RunState, int, float], Fabric]


@dataclass(frozen=True)
class Died:
    """Stands for the result of a member whose process ended without one (by SIGKILL, say)."""

    rank: int
    exit_code: int | None


def run(
    size: int,
    functions: Sequence[Callable[[Fabric], Any]],
    make_fabric: MakeFabric,
    deadline_seconds: float,
) -> list[Any]:
    """Start one process a function and wait for all; see ``run_members``."""
    if len(functions) != size:
        raise ValueError(f"{len(functions)} functions for {size} members: give one each.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the fork server's torch makes its pools
    context = multiprocessing.get_context("forkserver")
    # an optimizer's first step imports the latter: a second for each process, if not done before the fork
    context.set_forkserver_preload(
        ["murmurate.fabric.processes.fabric", "murmurate.fabric.network.channel", "torch._dynamo"]
    )
    memory_file = SharedMemoryFile.create()
    run_state = _open_run_state(memory_file, size)
    run_state.open()
    members: dict[Any, tuple[int, ForkServerProcess]] = {}
    try:
        for rank, function in enumerate(functions):
            ours, theirs = context.Pipe(duplex=False)
            role = pickle.dumps((function, make_fabric))  # torch's own pickling would lend shared memory
            process = context.Process(
                target=_live, args=(rank, size, role, memory_file, theirs, deadline_seconds), daemon=True
            )
            process.start()
            theirs.close()
            members[ours] = rank, process
        return _collect(members, run_state)
    finally:
        for line, (_, process) in members.items():
            process.kill()
            process.join()
            line.close()
        memory_file.close()


def _collect(members: dict[Any, tuple[int, ForkServerProcess]], run_state: RunState) -> list[Any]:
    """Wait for what each member sends, and mark dead those that fail, so that nobody waits for them."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    silent = set(members)
    while silent:
        for line in wait(list(silent)):
            silent.remove(line)
            rank, process = members[line]
            error, results[rank] = _outcome(rank, process, line)
            if error is not None:
                errors.append(error)
            if error is not None or isinstance(results[rank], Died):
                run_state.mark_dead(rank)
    if errors:
        raise errors[0]
    return [results[rank] for rank in sorted(results)]


def _outcome(rank: int, process: ForkServerProcess, line: Any) -> tuple[BaseException | None, Any]:
    """What the member sent, (error, result); its line reads as closed if it died before it could."""
    try:
        sent: tuple[BaseException | None, Any] = pickle.loads(line.recv_bytes())
        return sent
    except EOFError:
        process.join()
        return None, Died(rank, process.exitcode)


def _open_run_state(memory_file: SharedMemoryFile, size: int) -> RunState:
    """The shared memory's first region, for whoever started the members and for them."""
    return RunState(size, memory_file.counters("run_state", (RunState.cells_needed(size),)))


def _live(
    rank: int,
    size: int,
    role: bytes,
    memory_file: SharedMemoryFile,
    line: Connection,
    deadline_seconds: float,
) -> None:
    """Process entry point of one member."""
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    outcome: tuple[BaseException | None, Any]
    fabric: Any = None
    try:
        function, make_fabric = pickle.loads(role)
        fabric = make_fabric(memory_file, _open_run_state(memory_file, size), rank, deadline_seconds)
        outcome = None, function(fabric)
    except BaseException as error:
        outcome = error, None
    try:
        message = pickle.dumps(outcome)
        pickle.loads(message)
    except Exception as error:  # an exception whose arguments are not its message, say
        words = f"rank {rank} ended with what cannot be sent back ({error}): {outcome}"
        message = pickle.dumps((RuntimeError(words), None))
    line.send_bytes(message)
    line.close()
    if outcome[0] is None and hasattr(fabric, "close"):
        fabric.close(_LINGER_SECONDS)  # others may still read what this one published


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
