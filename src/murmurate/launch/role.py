"""What runs in a role's own process: one replica, started by the local launcher."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replica.clipping import NotFinite
from murmurate.training.centre_server import member
from murmurate.training.rejoin import NotLetIn
from murmurate.training.run import Run
from murmurate.training.worker import Post, Restored

FINISHED, FAILED, REFUSED, TOO_LATE = 0, 3, 4, 5
_HEARSAY_SECONDS = 2.0  # for the launcher, which was told at the same time, to say what it makes of it


def open_run_state(memory_file: SharedMemoryFile, size: int) -> RunState:
    """The run state is the shared memory's first region, for the launcher and the roles alike."""
    cells: np.ndarray[Any, np.dtype[np.int64]] = memory_file.counters(
        "run_state", (RunState.cells_needed(size),)
    )
    return RunState(size, cells)


def replica(
    run: Run,
    rank: int,
    memory_file: SharedMemoryFile,
    line: Connection,
    folder: Path,
    started_at: float,
    offset_seconds: float,
    part: tuple[Path, int] | None,
    joins: bool = False,
) -> None:
    """Process entry point. Says over ``line`` why, if it cannot go on, and exits with a code of its own.

    joins: in place of one that died; it comes in with a living peer's state.
    """
    run_state = open_run_state(memory_file, run.members)
    _settle(folder, rank, run.placement.threads, run_state)

    def post() -> Post:
        fabric = ProcessFabric(
            memory_file, run_state, rank, joins=joins, by_agreement=run.strategy.synchronous
        )
        return Post(
            rank,
            fabric,
            run_state,
            folder,
            started_at,
            offset_seconds,
            None if part is None else Restored.read(part[0], rank, part[1]),
            admission=fabric,
            joins=joins,
        )

    code, words = live(run, rank, post)
    if words is not None:
        line.send(words)
    line.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # simulators' native threads need no goodbye, and must not keep the process
    os._exit(code)


def live(run: Run, rank: int, post: Callable[[], Post]) -> tuple[int, str | None]:
    """A member's part of ``run`` to its end: (FINISHED or TOO_LATE, None), or FAILED or REFUSED and why."""
    try:
        member(run, post()).go()
    except NotLetIn:
        return TOO_LATE, None
    except Refusal as refusal:
        return REFUSED, str(refusal)
    except RunFailed as failure:
        return FAILED, str(failure)
    except (NotFinite, FabricError) as failure:
        traceback.print_exc()
        return FAILED, f"replica {rank}: {failure}"
    except Exception as error:
        traceback.print_exc()
        return (
            FAILED,
            f"replica {rank} stopped with {type(error).__name__}: {error} (see logs/ in the run folder)",
        )
    return FINISHED, None


def settle_arithmetic(threads: int) -> None:
    """What every thread that learns does first: the same sums everywhere, and no denormals."""
    torch.set_num_threads(threads)
    # Second moments of weights behind dead ReLUs decay into denormals, on which a CPU is a hundred times
    # slower: after an hour of Pong an eighth of them had (docs/decisions/0007).
    torch.set_flush_denormal(True)


def keep_log(folder: Path, rank: int) -> None:
    """From now on this process speaks into its log in the run folder."""
    log = os.open(folder / "logs" / f"replica-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()


def _settle(folder: Path, rank: int, threads: int, run_state: RunState) -> None:
    """Make this process a good member: own log, no terminal signals, and gone with the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: leave_unless_stopping(run_state))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # see local.start
    keep_log(folder, rank)
    settle_arithmetic(threads)
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        threading.Thread(target=_leave_with, args=(launcher.sentinel,), daemon=True).start()


def leave_unless_stopping(run_state: RunState) -> None:
    """SIGTERM to all processes of the run (a scheduler does that) saves and stops; to this one, ends it."""

    def decide() -> None:
        if not run_state.stop_requested:
            os._exit(128 + signal.SIGTERM)

    timer = threading.Timer(_HEARSAY_SECONDS, decide)
    timer.daemon = True
    timer.start()


def _leave_with(sentinel: int) -> None:
    wait([sentinel])
    # nobody else is left to remove the fork server's socket
    shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    os._exit(1)
