"""The local launcher."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.spawn import (
    DIED,
    FINISHED,
    LATE,
    LEFT,
    REFUSED,
    WorkerProcess,
    WorkerProcesses,
)
from murmurate.launch import shutdown
from murmurate.launch.failure_detector import OVER, FailureDetector
from murmurate.launch.role import log_end, run_replica
from murmurate.training.coordinator import Coordinator
from murmurate.training.interrupts import SecondInterrupt, signals
from murmurate.training.launcher import Launcher
from murmurate.training.run import Run
from murmurate.training.run_folder import write_roles
from murmurate.training.worker_context import FINAL_REQUEST, Resume

_POLL_SECONDS = 0.1


class Local(Launcher):
    """Processes of this host, one for each replica and for a centre: the default launcher."""

    name = "local"
    restarts = True

    def start(self, run: Run, folder: Path, resume: Resume | None) -> Coordinator:
        with WorkerProcesses(run.members) as workers:
            started_at = time.monotonic()
            (folder / "logs").mkdir(exist_ok=True)
            if resume is not None:
                workers.run_state.set_counts(resume.counts())
            coordinator = Coordinator(run, folder, workers.run_state, started_at, resume)
            work = functools.partial(
                run_replica,
                run=run,
                folder=folder,
                started_at=started_at,
                offset_seconds=coordinator.seconds_before,
                resume=resume,
            )

            def record_processes() -> None:
                pids = {rank: worker.process.pid for rank, worker in workers.by_rank.items()}
                write_roles(folder, pids, run.replicas)

            def start_again(rank: int) -> None:
                workers.start(rank, functools.partial(work, joins=True), joins=True)
                record_processes()

            try:
                with signals(coordinator), coordinator.console:
                    for rank in range(run.members):
                        workers.start(rank, functools.partial(work, joins=False))
                    record_processes()
                    _watch(workers, coordinator, FailureDetector(workers, coordinator, start_again))
                    _finish(coordinator)
            except (RunFailed, SecondInterrupt) as failure:
                coordinator.failure = failure
            finally:
                workers.kill()
                coordinator.close()
        return coordinator


def _watch(workers: WorkerProcesses, coordinator: Coordinator, detector: FailureDetector) -> None:
    """Handle deaths, and let detector and coordinator work, until every worker has ended."""
    ending = shutdown.Shutdown(coordinator)
    while workers.alive:
        for worker in workers.wait(_POLL_SECONDS):
            _handle_end(worker, coordinator, detector)
        coordinator.poll()
        detector.poll()
        if ending.is_overdue():
            for rank in shutdown.members_to_kill(coordinator, [worker.rank for worker in workers.alive]):
                workers.by_rank[rank].kill()


def _handle_end(worker: WorkerProcess, coordinator: Coordinator, detector: FailureDetector) -> None:
    end, rank = worker.exit, worker.rank
    if end is None:
        return
    log_end(coordinator.folder, rank, end)
    if end.how == FINISHED:
        return
    if end.how in (DIED, LATE, LEFT) and coordinator.run_state.has_saved(rank, FINAL_REQUEST):
        message = f"{coordinator.name(rank)} died after it had saved all that it learned"
        coordinator.event("warning", message, member=rank)
        return
    joining = worker.joins and not coordinator.run_state.has_entered(rank)
    if end.how == REFUSED and not joining:
        raise Refusal(end.error)
    if end.how in (DIED, LATE, LEFT) or joining:  # a joiner that fails does not end the others
        too_late = end.how == LATE or worker.killed_because == OVER
        if not (too_late and joining) or coordinator.run_state.is_alive(rank):
            error = "" if end.how in (DIED, LATE, LEFT) else end.error
            coordinator.died(rank, end.error or "too late to join", error)
        detector.died(worker)
        return
    raise coordinator.failed(rank, end.error)


def _finish(coordinator: Coordinator) -> None:
    if set(coordinator.dead) >= set(range(coordinator.run.replicas)):
        needs_peer = " --restarts starts a replica again only while another lives, whose state it takes."
        raise RunFailed(shutdown.ALL_DIED + (needs_peer if coordinator.run.restarts else ""))
    coordinator.commit_final()
