"""Processes of this host, one a replica: the default launcher."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch import shutdown as _ending
from murmurate.launch.failure_detector import Arbiter
from murmurate.launch.fork_server import fork_server
from murmurate.launch.role import FAILED, FINISHED, REFUSED, TOO_LATE, open_run_state
from murmurate.launch.worker_processes import Crew, Role
from murmurate.training.coordinator import Coordinator, SecondInterrupt, signals
from murmurate.training.run import Run

CAPABILITIES = frozenset(Capability)
_POLL_SECONDS = 0.1


def start(
    run: Run,
    folder: Path,
    *,
    offset_seconds: float = 0.0,
    manifest: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
    parts: dict[int, int] | None = None,
) -> Coordinator:
    """Run the roles to their end; the coordinator knows how it came (see its ``failure``).

    ``checkpoint`` and ``parts`` (rank -> which replica's part) say what a resumed run goes on from.
    Raises Refusal if a role refused before it began.
    """
    context = fork_server()
    memory_file = SharedMemoryFile.create()
    run_state = open_run_state(memory_file, run.members)
    run_state.open()
    started_at = time.monotonic()
    (folder / "logs").mkdir(exist_ok=True)
    coordinator = Coordinator(run, folder, run_state, started_at, offset_seconds)
    if manifest is not None:
        coordinator.restore(manifest)
        coordinator.event("resumed", f"resumed at {manifest['env_steps']:,} env steps")
    crew = Crew(context, run, memory_file, folder, started_at, offset_seconds)
    try:
        with signals(coordinator), coordinator.console:
            crew.start(
                [
                    None if checkpoint is None or parts is None else (checkpoint, parts[rank])
                    for rank in range(run.members)
                ]
            )
            _watch(crew, coordinator)
            _settle_end(coordinator)
    except (RunFailed, SecondInterrupt) as failure:
        coordinator.failure = failure
    finally:
        crew.kill()
        coordinator.close()
        memory_file.close()
    return coordinator


def _watch(crew: Crew, coordinator: Coordinator) -> None:
    """Until every role has ended: take in deaths as they happen, and let arbiter and coordinator work."""
    arbiter, ending = Arbiter(crew, coordinator), _ending.Ending(coordinator)
    while any(not role.ended for role in crew.roles):
        wait([role.process.sentinel for role in crew.roles if not role.ended], timeout=_POLL_SECONDS)
        for role in list(crew.roles):
            if not role.ended and not role.process.is_alive():
                _take_end(role, coordinator, arbiter)
        coordinator.poll()
        arbiter.poll()
        if ending.is_overdue():
            _kill_silent(crew.roles, coordinator)


def _kill_silent(roles: list[Role], coordinator: Coordinator) -> None:
    """Those that do not stop hold up what the others have to save; after them, those that do not save.

    Raises RunFailed if all of them are held up: whoever it is that they wait for cannot be told from here.
    """
    late = [role for role in roles if not role.ended]
    unfinished = [role for role in late if not coordinator.run_state.has_finished(role.rank)]
    if not any(coordinator.run_state.has_finished(role.rank) for role in roles):
        raise RunFailed(
            f"no replica stopped within {_ending.STOP_DEADLINE_SECONDS:g} s, and all were killed. "
            "The last checkpoint is kept. See logs/ in the run folder."
        )
    # the centre ends after the replicas: it waits for whom it was not told of, as we do
    replicas = [role for role in unfinished if role.rank < coordinator.run.replicas]
    for role in replicas or unfinished or late:
        who = coordinator.name(role.rank)
        message = f"{who} did not stop within {_ending.STOP_DEADLINE_SECONDS:g} s and is killed"
        coordinator.event("killed", message, member=role.rank)
        role.process.kill()


def _take_end(role: Role, coordinator: Coordinator, arbiter: Arbiter) -> None:
    role.ended = True
    role.process.join()
    code = role.process.exitcode
    if code == FINISHED:
        return
    said = role.last_words()
    if role.joins and not coordinator.run_state.has_entered(role.rank):
        # whatever keeps it from coming in is no reason to end those who learn
        coordinator.died(role.rank, said or ("too late to come in" if code == TOO_LATE else role.how()))
        arbiter.died(role)
        return
    if code == REFUSED:
        raise Refusal(said or f"replica {role.rank} refused to start")
    if code == FAILED:
        raise RunFailed(said or f"replica {role.rank} failed")
    coordinator.died(role.rank, "too late to come in" if code == TOO_LATE else role.how())
    arbiter.died(role)


def _settle_end(coordinator: Coordinator) -> None:
    if set(coordinator.dead) >= set(range(coordinator.run.replicas)):
        raise RunFailed("all replicas died; the last checkpoint is kept. See logs/ in the run folder.")
    coordinator.commit_final()
