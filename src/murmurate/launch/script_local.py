"""A user's own script as processes of this host: each member is one, and this process waits for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from murmurate.errors import Refusal
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.spawn import (
    FAILED,
    FINISHED,
    REFUSED,
    Died,
    Exit,
    Worker,
    WorkerProcess,
    WorkerProcesses,
    take_signals,
)
from murmurate.launch.script_launcher import ScriptLauncher
from murmurate.launch.script_member import ScriptSettings, failure, stdout_of
from murmurate.replicator.stopping import StopSignals
from murmurate.training.interrupts import RepeatedSigterm, hangup_terminates

_PRELOADED = ("murmurate.launch.script", "torch._dynamo")  # optimizers import the second, which takes 1.6 s
_POLL_SECONDS = 1.0
_SAVING_SECONDS = 10.0  # how long replicas that do not call ``stopping`` may go on after Ctrl-C or SIGTERM
_AGAIN_SECONDS = 0.01  # until an interrupt that Python has dropped is raised again


def refuse_import() -> None:
    """Raises Refusal in a process that is importing the script for a replica."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise Refusal(
            "each process imports the script, and this one started replicas while it was imported. Put what "
            "starts them (murmurate.run, or fit of an estimator) under: if __name__ == '__main__':"
        )


class LocalScripts(ScriptLauncher):
    """Processes of this host."""

    name = "local"

    def run(self, settings: ScriptSettings) -> list[Any]:
        refuse_import()
        packed = settings.pickled()  # raises Refusal if they cannot be sent to another process
        sys.stdout.flush()
        with _exit_at_sigterm(), WorkerProcesses(settings.members, _PRELOADED) as workers:
            try:
                for rank in range(settings.members):
                    workers.start(rank, functools.partial(_run_worker, packed))
                return _collect(settings, workers)
            except (KeyboardInterrupt, SystemExit):
                _interrupt(settings, workers)
                raise


def _collect(settings: ScriptSettings, workers: WorkerProcesses) -> list[Any]:
    """Collect results as they arrive. The first worker that fails ends the rest; if a worker is killed, the
    others go on without it. Workers that stay suspended are killed, and so is a centre that outlives all
    replicas."""
    results: dict[int, Any] = {}
    idle: Counter[int] = Counter()  # by rank: at how many successive polls the worker was idle
    while workers.alive:
        ended = workers.wait(_POLL_SECONDS)
        for worker in workers.alive if not ended else ():
            is_suspended = worker.is_stopped
            only_centre = worker.rank == settings.centre_rank and len(workers.alive) == 1
            idle[worker.rank] = idle[worker.rank] + 1 if only_centre or is_suspended else 0
            if idle[worker.rank] * _POLL_SECONDS > settings.deadline_seconds:
                worker.kill("it was suspended" if is_suspended else "it outlived all replicas")
        for worker in ended:
            assert worker.exit is not None
            end = worker.exit
            suspended = [settings.name_of(w.rank) for w in workers.alive if w.is_stopped]
            if suspended and end.how == FAILED:
                end = dataclasses.replace(end, error=f"{end.error} Suspended: {', '.join(suspended)}.")
            result = settings.result_of(worker.rank, end, worker.process.exitcode)
            results[worker.rank] = result
            if isinstance(result, Died) or settings.strategy.common_rounds:
                workers.run_state.mark_dead(worker.rank)  # the others go on without it
    return settings.results(results)


# -- Ctrl-C and SIGTERM ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Meanwhile SIGTERM or a closed terminal raises SystemExit, unless the script handles SIGTERM itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    repeats = RepeatedSigterm()

    def exit_once(*_: object) -> None:
        if not repeats():  # else replicas are saving already
            raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, exit_once)
    try:
        with hangup_terminates():
            yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(settings: ScriptSettings, workers: WorkerProcesses) -> None:
    """Raise KeyboardInterrupt in all replicas, and wait for them to end, while the centre goes on: a replica
    that saves may exchange with it. For replicas that have called ``stopping`` there is no time limit. A
    second signal ends the wait, unless it is a SIGTERM within 5 s."""
    for worker in _replicas(workers, settings.centre_rank):
        worker.terminate()
    latest = time.monotonic() + _SAVING_SECONDS
    while replicas := _replicas(workers, settings.centre_rank):
        seconds_left = latest - time.monotonic()
        if seconds_left <= 0 and not all(workers.run_state.heeds_signals(r.rank) for r in replicas):
            return
        for worker in workers.wait(seconds_left if seconds_left > 0 else _POLL_SECONDS):
            end = worker.exit
            assert end is not None
            if end.how in (FAILED, REFUSED):  # perhaps while it saved
                message = failure(settings.name_of(worker.rank), end)
                print(f"murmurate: {message}", file=sys.stderr, flush=True)
            elif end.how != FINISHED and worker.process.exitcode != -signal.SIGTERM:
                settings.result_of(worker.rank, end)  # which prints how it died or stopped
            if end.how != FINISHED or settings.strategy.common_rounds:
                workers.run_state.mark_dead(worker.rank)  # the others go on without it


def _replicas(workers: WorkerProcesses, centre: int) -> list[WorkerProcess]:
    """The replicas' processes that are alive."""
    return [worker for worker in workers.alive if worker.rank != centre]


# -- in a worker ----------------------------------------------------------------------------------------


def _run_worker(packed: bytes, worker: Worker) -> Exit:
    """The function of a script's worker process. packed: the ``ScriptSettings``, pickled."""
    was_signalled, own_process = False, os.getpid()

    def interrupt(*_: object) -> None:
        nonlocal was_signalled
        if os.getpid() != own_process:  # a process that main has forked, which another Python process ends
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not was_signalled:  # a scheduler's SIGTERM may come before or after the launcher's
            was_signalled = True
            raise KeyboardInterrupt

    report = sys.unraisablehook

    def raise_again(dropped: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in ``__del__`` and in callbacks of weak references, which mail has."""
        nonlocal was_signalled
        if dropped.exc_type is not KeyboardInterrupt or os.getpid() != own_process:
            report(dropped)
            return
        was_signalled = False
        later = (threading.main_thread().ident, signal.SIGTERM)
        again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, later)
        again.daemon = True  # this process may end before
        again.start()

    sys.unraisablehook = raise_again
    try:
        settings = _unpickled(packed)
        # the centre has nothing to save, and replicas may need it while they do: the launcher ends it
        take_signals(signal.SIG_IGN if worker.rank == settings.centre_rank else interrupt)
        fabric = ProcessFabric(worker.memory_file, worker.run_state, worker.rank, settings.deadline_seconds)
        signals = StopSignals(lambda: worker.run_state.mark_heeding(worker.rank))
        end = settings.run_to_exit(fabric, stdout_of(settings.output, worker.rank), signals)
        if end.how == FINISHED:
            worker.run_state.mark_finished(worker.rank)
        was_signalled = True
        return end
    except Refusal as refusal:
        return Exit(REFUSED, str(refusal))
    except KeyboardInterrupt:
        if was_signalled:
            _die_by_sigterm()
        raise


def _unpickled(packed: bytes) -> ScriptSettings:
    try:
        settings: ScriptSettings = pickle.loads(packed)
        return settings
    except AttributeError as error:
        raise Refusal(
            f"a process cannot import what it is to run ({error}). Let it be at module level, and not under: "
            "if __name__ == '__main__':, or use launcher='inline'."
        ) from error


def _die_by_sigterm() -> None:
    """End this process as if it had no handler, and the processes that it has started."""
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
