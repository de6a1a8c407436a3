"""Processes of this host, one a replica: the default launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from murmurate.coordinator import Coordinator, SecondInterrupt, signals
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.arena import Arena
from murmurate.fabric.interface import Capability
from murmurate.folder import write_roles
from murmurate.launch.role import FAILED, FINISHED, REFUSED, open_board, replica
from murmurate.train import Run

CAPABILITIES = frozenset(Capability)
_POLL_SECONDS = 0.1
_STOP_DEADLINE_SECONDS = 75.0  # longer than the fabric's, which can name a culprit


@dataclass
class Role:
    """A replica's process, and the line over which it says why it could not go on."""

    rank: int
    process: ForkServerProcess
    line: Connection
    ended: bool = False


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
    context = _context()
    arena = Arena.create()
    board = open_board(arena, run.members)
    board.open()
    started_at = time.monotonic()
    (folder / "logs").mkdir(exist_ok=True)
    coordinator = Coordinator(run, folder, board, started_at, offset_seconds)
    if manifest is not None:
        coordinator.restore(manifest)
        coordinator.event("resumed", f"resumed at {manifest['env_steps']:,} env steps")
    roles: list[Role] = []
    try:
        with signals(coordinator), coordinator.console:
            for rank in range(run.members):
                part = None if checkpoint is None or parts is None else (checkpoint, parts[rank])
                roles.append(_start_role(context, run, rank, arena, folder, started_at, offset_seconds, part))
            write_roles(folder, {role.rank: role.process.pid for role in roles}, run.replicas)
            _watch(roles, coordinator)
            _settle_end(coordinator)
    except (RunFailed, SecondInterrupt) as failure:
        coordinator.failure = failure
    finally:
        for role in roles:
            if role.process.is_alive():
                role.process.kill()
            role.process.join()
        coordinator.close()
        arena.close()
    return coordinator


def _context() -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch makes its pools in the fork server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["murmurate.launch.role", "torch._dynamo"])
    # A scheduler's SIGTERM goes to every process, and with the fork server all news of the roles would be
    # lost: it inherits deaf ears. Signals of this moment reach the launcher right after it.
    # The tracker's own start would unblock them again, so it comes first.
    resource_tracker.ensure_running()
    deaf = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    try:
        ensure_running()
    except OSError as error:
        raise Refusal(
            f"no fork server can be started in {tempfile.gettempdir()} ({error}). "
            "Set TMPDIR to a short path that can be written to, such as /tmp."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _start_role(
    context: ForkServerContext,
    run: Run,
    rank: int,
    arena: Arena,
    folder: Path,
    started_at: float,
    offset_seconds: float,
    part: tuple[Path, int] | None,
) -> Role:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=replica,
        args=(run, rank, arena, theirs, folder, started_at, offset_seconds, part),
        name=f"murmurate-replica-{rank}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return Role(rank, process, ours)


def _watch(roles: list[Role], coordinator: Coordinator) -> None:
    """Until every role has ended: take in deaths as they happen, and let the coordinator work."""
    stopping_since: float | None = None
    while any(not role.ended for role in roles):
        wait([role.process.sentinel for role in roles if not role.ended], timeout=_POLL_SECONDS)
        for role in roles:
            if not role.ended and not role.process.is_alive():
                _take_end(role, coordinator)
        coordinator.poll()
        if coordinator.is_due:
            stopping_since = stopping_since or time.monotonic()
            if time.monotonic() - stopping_since > _STOP_DEADLINE_SECONDS:
                stopping_since = None
                _kill_silent(roles, coordinator)


def _kill_silent(roles: list[Role], coordinator: Coordinator) -> None:
    """Those that do not stop hold up what the others have to save; after them, those that do not save.

    Raises RunFailed if all of them are held up: whoever it is that they wait for cannot be told from here.
    """
    late = [role for role in roles if not role.ended]
    unfinished = [role for role in late if not coordinator.board.has_finished(role.rank)]
    if not any(coordinator.board.has_finished(role.rank) for role in roles):
        raise RunFailed(
            f"no replica stopped within {_STOP_DEADLINE_SECONDS:g} s, and all were killed. "
            "The last checkpoint is kept. See logs/ in the run folder."
        )
    for role in unfinished or late:
        message = f"replica {role.rank} did not stop within {_STOP_DEADLINE_SECONDS:g} s and is killed"
        coordinator.event("killed", message, member=role.rank)
        role.process.kill()


def _take_end(role: Role, coordinator: Coordinator) -> None:
    role.ended = True
    role.process.join()
    code = role.process.exitcode
    said = _last_words(role.line)
    if code == FINISHED:
        return
    if code == REFUSED:
        raise Refusal(said or f"replica {role.rank} refused to start")
    if code == FAILED:
        raise RunFailed(said or f"replica {role.rank} failed")
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    coordinator.died(role.rank, how)


def _last_words(line: Connection) -> str | None:
    """What the role sent before it ended; a pipe that was merely closed also polls as readable."""
    try:
        return str(line.recv()) if line.poll() else None
    except EOFError:
        return None


def _settle_end(coordinator: Coordinator) -> None:
    if set(coordinator.dead) >= set(range(coordinator.run.replicas)):
        raise RunFailed("all replicas died; the last checkpoint is kept. See logs/ in the run folder.")
    coordinator.commit_final()
