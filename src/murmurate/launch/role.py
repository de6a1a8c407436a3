"""The main function of a worker process, and what the workers of all launchers have in common."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.spawn import (
    FAILED,
    FINISHED,
    LATE,
    LEFT,
    REFUSED,
    Exit,
    Worker,
    describe,
    exit_now,
    take_signals,
)
from murmurate.replica.clipping import NotFinite
from murmurate.spatial.parts import PartLost
from murmurate.training.rejoin import JoinCancelled
from murmurate.training.run import Run
from murmurate.training.worker import work
from murmurate.training.worker_context import Resume, WorkerContext

# by how much the fabric's deadline, which ends the run, is later than the launcher's for a silent member
_AFTER_EXCLUSION_SECONDS = 15.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_STOP_SECONDS = 2.0  # how long the launcher, which got the same signal, may take to request a stop


def run_replica(
    worker: Worker,
    run: Run,
    folder: Path,
    started_at: float,
    offset_seconds: float,
    resume: Resume | None,
    joins: bool,
) -> Exit:
    """The function of a worker process of the local launcher.

    joins: the process replaces one that died, and begins by taking a peer's state.
    """
    take_signals(lambda *_: leave_unless_stopping(worker.run_state))
    redirect_output_to_log(folder, worker.rank)
    prepare_process(run.placement.threads)

    def context() -> WorkerContext:
        fabric = ProcessFabric(
            worker.memory_file,
            worker.run_state,
            worker.rank,
            deadline_seconds=run.hang_after_seconds + run.saving_seconds() + _AFTER_EXCLUSION_SECONDS,
            joins=joins,
            by_agreement=run.strategy.synchronous,
        )
        restored = None if resume is None or joins else resume.part(worker.rank)
        return WorkerContext(
            worker.rank,
            fabric,
            worker.run_state,
            folder,
            started_at,
            offset_seconds,
            restored,
            admission=fabric,
            joins=joins,
        )

    return run_member(run, context)


def run_member(run: Run, context: Callable[[], WorkerContext]) -> Exit:
    """Execute one member's part of ``run`` to its end; returns how it ended."""
    try:
        work(run, context())
    except JoinCancelled:
        return Exit(LATE)
    except Refusal as refusal:
        return Exit(REFUSED, str(refusal))
    except RunFailed as failure:
        if failure.__cause__ is not None:
            traceback.print_exc()
        return Exit(FAILED, str(failure))
    except PartLost as lost:  # another part of this replica was lost; the run goes on without the replica
        return Exit(LEFT, str(lost))
    except (NotFinite, FabricError) as failure:
        traceback.print_exc()
        return Exit(FAILED, str(failure))
    except (Exception, SystemExit) as error:  # SystemExit: of a library or a simulator
        traceback.print_exc()
        return Exit(FAILED, f"{describe(error)} (see logs/ in the run folder)")
    return Exit(FINISHED)


def prepare_process(threads: int) -> None:
    """Call ``fix_arithmetic``, and keep freed memory for the next tensors. Only for processes that exist for
    one run: both settings are of the whole process."""
    fix_arithmetic(threads)
    _keep_freed_memory()


def fix_arithmetic(threads: int) -> None:
    """Set the number of torch threads, so that sums are the same everywhere, and flush denormals to zero."""
    torch.set_num_threads(threads)
    # An optimizer's second moments of weights behind dead ReLUs decay into denormals, on which a CPU is a
    # hundred times slower: after an hour of Pong, an eighth of the moments were (docs/decisions/0007).
    torch.set_flush_denormal(True)


def _keep_freed_memory() -> None:
    """If the C library is glibc, do not return the memory of freed tensors of up to 32 MB to the system.

    Otherwise those of the next step would cost a page fault for every 4 kB: a seventh of the time of a step
    of ResNet-20 (docs/decisions/0032).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def log_name(rank: int) -> str:
    """The path of the log of ``rank`` within the run folder."""
    return f"logs/replica-{rank}.log"


def redirect_output_to_log(folder: Path, rank: int) -> None:
    """Redirect this process's output to its log in the run folder, where SIGUSR1 then writes all stacks."""
    log = os.open(folder / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    print(_dated(f"rank {rank} begins: process {os.getpid()} on {socket.gethostname()}"), file=sys.stderr)


def log_end(folder: Path, rank: int, end: Exit) -> None:
    """Write how ``rank`` ended as the last line of its log; for a killed process the launcher does this."""
    why = f": {end.error}" if end.error else ""
    with contextlib.suppress(OSError), (folder / log_name(rank)).open("a") as log:
        log.write(_dated(f"rank {rank} ended ({end.how}){why}") + "\n")


def _dated(line: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"


def leave_unless_stopping(run_state: RunState) -> None:
    """Handle SIGTERM. If it was sent to all processes of the run, as schedulers do, the launcher soon
    requests a stop, and this process goes on to save and stop; else it exits."""

    def exit_unless_stopping() -> None:
        if not run_state.stop_requested:
            exit_now(128 + signal.SIGTERM)

    timer = threading.Timer(_STOP_SECONDS, exit_unless_stopping)
    timer.daemon = True
    timer.start()
