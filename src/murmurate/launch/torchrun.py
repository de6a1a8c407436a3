"""The ranks that torch elastic started: one a replica, on one host or on many.

Rank 0 leads: its main thread is the coordinator (console, checkpoints, signals), and its replica, with a
centre where the strategy has one, are threads beside it. The other ranks are silent. Ranks of one host
share memory; across hosts they talk through the network fabric. Torch elastic ends all ranks when one
dies, and starts them again where ``--max-restarts`` allows: the run then goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability
from murmurate.launch import shutdown as _ending
from murmurate.launch.host_memory import Process
from murmurate.launch.job_spec import Ground, Meeting, check_folder, fresh_secret, prove
from murmurate.launch.rendezvous import Crew, Greeting, Surroundings, crew
from murmurate.launch.role import FINISHED, REFUSED, leave_unless_stopping, live, settle_arithmetic
from murmurate.training.coordinator import Coordinator, SecondInterrupt, signals
from murmurate.training.run import Run
from murmurate.training.run_folder import write_roles
from murmurate.training.worker import FINAL_REQUEST

__all__ = ["CAPABILITIES", "check", "crew", "dictated_replicas", "follow", "offered", "start"]

CAPABILITIES = frozenset(Capability)
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 30.0  # after which a rank of another host counts as dead
_LEAVE_SECONDS = 2.0


# -- before anything is changed ---------------------------------------------------------------------------


def dictated_replicas() -> int | None:
    """As many replicas as there are ranks; None outside torchrun, which ``check`` refuses."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else None


def offered() -> frozenset[Capability]:
    """What these ranks can do: those of several hosts share no memory."""
    several = Surroundings.read(os.environ).hosts > 1
    return CAPABILITIES - {Capability.SHARED_MEMORY} if several else CAPABILITIES


def check(run: Run) -> None:
    """Raise Refusal outside torchrun, and for a number of replicas that is not that of the ranks."""
    size = Surroundings.read(os.environ).size
    if run.replicas != size:
        raise Refusal(
            f"torchrun started {size} rank(s) and the run has {run.replicas} replicas: a rank is a replica. "
            f"Leave --replicas out, or start {run.replicas} ranks (--nproc-per-node times --nnodes)."
        )


# -- rank 0 -----------------------------------------------------------------------------------------------


def start(
    run: Run,
    folder: Path,
    *,
    offset_seconds: float = 0.0,
    manifest: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
    parts: dict[int, int] | None = None,
) -> Coordinator:
    """Lead the ranks through the run (see ``murmurate.launch.local.start``).

    Raises Refusal if a rank does not come, or refused before it began.
    """
    us = crew()
    shares = us.gather()
    started_at = time.monotonic()
    meeting = Meeting(
        run_id=us.around.run_id,
        epoch=us.epoch,
        members=run.members,
        leader=us.process,
        offer=us.offer if shares else None,
        secret=fresh_secret(),
        folder=str(folder.resolve()),
        proof=prove(folder),
        started_at=started_at,
        offset_seconds=offset_seconds,
        checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
        parts=None if parts is None else {str(rank): source for rank, source in parts.items()},
        compression=run.compression,
    )
    mine = [0, *range(run.replicas, run.members)]
    ground = Ground(meeting, us.store, mine, leads=True, address=us.address())
    coordinator = Coordinator(run, folder, ground.run_state, started_at, offset_seconds)
    if manifest is not None:
        coordinator.restore(manifest)
        coordinator.event("resumed", f"resumed at {manifest['env_steps']:,} env steps")
    coordinator.event("launcher", _promise(us.around))
    if meeting.idle_compression:
        coordinator.event("warning", meeting.idle_compression)
    us.tell(meeting)
    roles = [_Own(run, rank, ground) for rank in mine]
    code = 1
    try:
        with signals(coordinator), coordinator.console:
            write_roles(folder, *_whereabouts(us, mine), hosts={r: g.name for r, g in us.greetings.items()})
            for role in roles:
                role.thread.start()
            _watch(roles, us, ground, coordinator)
            coordinator.commit_final()
        code = 128 + coordinator.signal if coordinator.interrupted else 0
    except (RunFailed, SecondInterrupt) as failure:
        coordinator.failure = failure
        if coordinator.interrupted and isinstance(failure, SecondInterrupt):
            code = 128 + coordinator.signal
    finally:
        _unblock(roles, ground, coordinator)
        us.dismiss(code)
        coordinator.close()
        ground.close()
        us.close()
    return coordinator


@dataclass(eq=False)
class _Own:
    """A member that is a thread of rank 0: its replica, or the centre."""

    run: Run
    rank: int
    ground: Ground

    def __post_init__(self) -> None:
        self.outcome: tuple[int, str | None] | None = None
        self.thread = threading.Thread(target=self._live, name=f"replica-{self.rank}", daemon=True)

    def _live(self) -> None:
        settle_arithmetic(self.run.placement.threads)
        self.outcome = live(self.run, self.rank, lambda: self.ground.post(self.rank))


def _watch(roles: list[_Own], us: Crew, ground: Ground, coordinator: Coordinator) -> None:
    """Until every member has saved its last part. Raises RunFailed for one that ended before, Refusal."""
    run_state = ground.run_state
    ending = _ending.Ending(coordinator)
    while not run_state.saved_by_all(FINAL_REQUEST):
        time.sleep(_POLL_SECONDS)
        for role in roles:
            if role.outcome is not None:
                _take(role.outcome)
        for rank, greeting in us.greetings.items():
            if ground.is_gone(rank, greeting.process, _SILENT_SECONDS) and not run_state.has_saved(
                rank, FINAL_REQUEST
            ):
                _mourn(rank, us, greeting, coordinator)
        coordinator.poll()
        if ending.is_overdue():
            late = [rank for rank in range(run_state.size) if not run_state.has_saved(rank, FINAL_REQUEST)]
            raise RunFailed(
                f"rank(s) {late} did not stop within {_ending.STOP_DEADLINE_SECONDS:g} s. "
                "The last checkpoint is kept."
            )


def _take(outcome: tuple[int, str | None]) -> None:
    code, words = outcome
    if code == REFUSED:
        raise Refusal(str(words))
    if code != FINISHED:
        raise RunFailed(str(words))


def _mourn(rank: int, us: Crew, greeting: Greeting, coordinator: Coordinator) -> None:
    """Raise what has become of ``rank``: its own words, or that it died."""
    said = us.said(rank)
    if said is not None:
        code, _, words = said.partition(" ")
        _take((int(code), words))
    coordinator.dead.append(rank)
    where = f"process {greeting.process.pid} on {greeting.name}"
    coordinator.event("died", f"replica {rank} died ({where}); all ranks end", member=rank)
    raise RunFailed(f"replica {rank} died, and under torchrun that ends all ranks. {_promise(us.around)}")


def _promise(around: Surroundings) -> str:
    """What a death will mean here; said before the first update."""
    if not around.restarts_allowed:
        return (
            "A death ends the run; its last checkpoint is kept for murmurate resume. With torchrun "
            "--max-restarts N, torch elastic starts all ranks again from there."
        )
    return (
        f"A death ends all ranks; torch elastic starts them again from the last checkpoint, "
        f"at most {around.restarts_allowed} time(s)."
    )


def _unblock(roles: list[_Own], ground: Ground, coordinator: Coordinator) -> None:
    """Let the own threads leave whatever they wait for, so that the process can end."""
    if all(role.outcome is not None for role in roles):
        return
    ground.run_state.request_stop()
    for rank in range(ground.run_state.size):
        if rank not in [role.rank for role in roles]:
            ground.run_state.mark_dead(rank)
    until = time.monotonic() + _LEAVE_SECONDS
    for role in roles:
        if role.thread.is_alive():
            role.thread.join(max(0.0, until - time.monotonic()))


def _whereabouts(us: Crew, mine: list[int]) -> tuple[dict[int, int | None], int]:
    pids: dict[int, int | None] = {rank: greeting.process.pid for rank, greeting in us.greetings.items()}
    pids |= dict.fromkeys(mine)
    return dict(sorted(pids.items())), us.around.size


# -- all other ranks --------------------------------------------------------------------------------------


def follow(read: Callable[[Path], Run]) -> int:
    """Be a silent rank: the Run that ``read`` finds in the leader's folder, to its end; the exit code.

    Raises Refusal if the leader refused, or its folder cannot be seen from here.
    """
    us = crew()
    meeting = us.follow()
    rank = us.around.rank
    try:
        check_folder(meeting)
        run = read(Path(meeting.folder))
        ground = Ground(meeting, us.store, [rank], leads=False, address=us.address())
    except Refusal as refusal:
        us.say(f"{REFUSED} {refusal}")
        raise
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: leave_unless_stopping(ground.run_state))
    settle_arithmetic(run.placement.threads)
    over = threading.Event()
    threading.Thread(target=_leave_with, args=(meeting.leader, ground, over), daemon=True).start()
    code, words = live(run, rank, lambda: ground.post(rank))
    over.set()
    if code != FINISHED:
        us.say(f"{code} {words}")
        if code == REFUSED:
            raise Refusal(str(words))
        raise RunFailed(str(words))
    ground.flush()
    # the others may learn on for hours yet; whether they will ever end is for rank 0 to say
    answer = us.dismissed(lambda: ground.is_gone(0, meeting.leader, _SILENT_SECONDS))
    ground.close()
    if answer is None:
        raise RunFailed("rank 0 is gone before it could save the last checkpoint; the one before is kept")
    return answer


def _leave_with(leader: Process, ground: Ground, over: threading.Event) -> None:
    """Do not learn on for nobody: without rank 0 no checkpoint is ever committed."""
    parent = os.getppid()
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    while not over.wait(_POLL_SECONDS):
        orphaned = elastic and os.getppid() != parent
        if orphaned or ground.is_gone(0, leader, _SILENT_SECONDS):
            print("murmurate: rank 0 is gone; the last checkpoint is kept", file=sys.stderr, flush=True)
            os._exit(1)
