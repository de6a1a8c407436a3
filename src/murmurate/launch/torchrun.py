"""The torchrun launcher: it uses the processes (ranks) that torch elastic has started."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability
from murmurate.fabric.processes.spawn import FINISHED, REFUSED, Exit
from murmurate.launch import shutdown
from murmurate.launch.exposure import DANGER, listens_beyond_loopback
from murmurate.launch.heartbeats import EngineMember, HeartbeatMonitor
from murmurate.launch.host_memory import Process
from murmurate.launch.job_spec import JobSpec, MemberHost, check_folder, write_proof
from murmurate.launch.rendezvous import Environment, RankInfo, Rendezvous
from murmurate.launch.role import leave_unless_stopping, prepare_process, run_member
from murmurate.launch.secret import VARIABLE, user_secret
from murmurate.training.coordinator import Coordinator
from murmurate.training.data_record import without_places
from murmurate.training.interrupts import SecondInterrupt, signals
from murmurate.training.launcher import Launcher
from murmurate.training.run import Run
from murmurate.training.run_folder import plain, write_roles
from murmurate.training.worker_context import FINAL_REQUEST, Resume

_POLL_SECONDS = 0.1
_SILENT_SECONDS = 30.0  # after which a rank of another host counts as dead
_LEAVE_SECONDS = 2.0  # how long rank 0 waits, at its end, for its own members' threads


class Torchrun(Launcher):
    """The ranks that torch elastic started: each is a replica, on one host or on several.

    Rank 0 leads: its main thread is the coordinator (console, checkpoints, signals); its replica, and the
    centre of a strategy that has one, are threads beside it. Ranks of one host share memory; across
    hosts they communicate through the network fabric. Torch elastic ends all ranks when one dies, and starts
    them again where ``--max-restarts`` allows; the run then goes on from its last checkpoint.
    """

    name = "torchrun"
    sends = True
    command_prefix = "torchrun ... -m "

    def dictated_replicas(self) -> int | None:
        """As many replicas as there are ranks; None in a process without ranks, which ``check`` refuses."""
        size = os.environ.get("WORLD_SIZE", "")
        return int(size) if size.isdecimal() else None

    def capabilities(self, run: Run) -> frozenset[Capability]:
        """All, but no shared memory if the ranks are on several hosts."""
        several_hosts = Environment.read(os.environ).hosts > 1
        return self.offers - {Capability.SHARED_MEMORY} if several_hosts else self.offers

    def check(self, run: Run) -> None:
        """Also raises Refusal in a process without ranks, and if there are not as many replicas as ranks."""
        size = Environment.read(os.environ).size
        if run.replicas != size:
            raise Refusal(
                f"torchrun started {size} rank(s) and the run has {run.replicas} replicas: a rank is a "
                f"replica. Start {run.replicas} ranks (--nproc-per-node times --nnodes); a new run takes "
                "their number without --replicas."
            )
        super().check(run)

    def adopt(self) -> ElasticRanks:
        return elastic_ranks()

    def start(self, run: Run, folder: Path, resume: Resume | None) -> Coordinator:
        """Also raises Refusal if a rank does not register, or has another secret."""
        elastic = elastic_ranks()
        elastic.gather()
        started_at = time.monotonic()
        spec = JobSpec(
            run_id=elastic.run_id,
            epoch=elastic.epoch,
            members=run.members,
            offer=elastic.offer,
            folder=str(folder.resolve()),
            proof=write_proof(folder),
            started_at=started_at,
            resume=resume,
            compression=run.compression,
        )
        own_ranks = [0, *range(run.replicas, run.members)]
        host = MemberHost(spec, elastic.store, own_ranks, leads=True, address=elastic.address())
        coordinator = Coordinator(run, folder, host.run_state, started_at, resume)
        coordinator.event("launcher", _on_death(elastic.environment))
        if danger := _danger(elastic.environment):
            coordinator.event("warning", danger)
        if spec.compression_warning:
            coordinator.event("warning", spec.compression_warning)
        elastic.announce(spec)
        roles = [_OwnRole(run, rank, host) for rank in own_ranks]
        code = 1
        try:
            with signals(coordinator), coordinator.console:
                _write_roles(folder, elastic, own_ranks)
                for role in roles:
                    role.thread.start()
                _watch(roles, elastic, host, coordinator)
                coordinator.commit_final()
            code = 128 + coordinator.signal if coordinator.interrupted else 0
        except (RunFailed, SecondInterrupt) as failure:
            coordinator.failure = failure
            if coordinator.interrupted and isinstance(failure, SecondInterrupt):
                code = 128 + coordinator.signal
        finally:
            _unblock(roles, host)
            elastic.dismiss(code)
            coordinator.close()
            host.close()
            elastic.close()
        elastic.end()  # not after a Refusal, which ``refuse`` announces in the same epoch
        return coordinator


# -- rank 0 -----------------------------------------------------------------------------------------------


class _OwnRole:
    """A member that is a thread of rank 0's process: its replica, or the centre."""

    def __init__(self, run: Run, rank: int, host: MemberHost) -> None:
        self.run, self.rank, self.host = run, rank, host
        self.exit: Exit | None = None
        self.thread = threading.Thread(target=self._run, name=f"replica-{rank}", daemon=True)

    def _run(self) -> None:
        prepare_process(self.run.placement.threads)
        self.exit = run_member(self.run, lambda: self.host.worker_context(self.rank, self.run))


def _watch(roles: list[_OwnRole], elastic: ElasticRanks, host: MemberHost, coordinator: Coordinator) -> None:
    """Poll members and coordinator until every member has saved its part of the last checkpoint. Raises
    RunFailed, or Refusal, if a member ends before; RunFailed if one is silent, or stops too late.
    """
    run_state = host.run_state
    ending = shutdown.Shutdown(coordinator)
    heartbeats = HeartbeatMonitor(coordinator, replaceable=False)
    while not run_state.saved_by_all(FINAL_REQUEST):
        time.sleep(_POLL_SECONDS)
        for role in roles:
            if role.exit is not None:
                _raise_failure(role.rank, role.exit, coordinator)
        _raise_ends(elastic, host, coordinator)
        members = [EngineMember(role.rank, elastic.process) for role in roles]
        members += [EngineMember(rank, peer.process) for rank, peer in elastic.others.items()]
        unsaved = [member for member in members if not run_state.has_saved(member.rank, FINAL_REQUEST)]
        for silent in heartbeats.poll(unsaved):
            raise coordinator.failed(silent.rank, f"silent. {_on_death(elastic.environment)}")
        coordinator.poll()
        if ending.is_overdue():
            late = [rank for rank in range(run_state.size) if not run_state.has_saved(rank, FINAL_REQUEST)]
            raise RunFailed(
                f"rank(s) {late} did not stop within {shutdown.allowed_seconds(coordinator):.0f} s."
            )


def _raise_ends(elastic: ElasticRanks, host: MemberHost, coordinator: Coordinator) -> None:
    """Raise Refusal or RunFailed if another rank has ended before it saved its last part."""
    for rank, peer in elastic.others.items():
        gone = host.is_gone(rank, peer.process, _SILENT_SECONDS)
        elsewhere = peer.process.host != elastic.process.host
        if not (gone or elsewhere) or host.run_state.has_saved(rank, FINAL_REQUEST):
            continue
        # on another host, only silence tells that a process has ended, long after its report
        _raise_failure(rank, elastic.reported(rank), coordinator, f"on {peer.name}: " * elsewhere)
        if gone:
            _raise_death(rank, peer, elastic.environment, coordinator)


def _raise_failure(rank: int, end: Exit | None, coordinator: Coordinator, where: str = "") -> None:
    """Raise Refusal or RunFailed if ``rank`` has reported an end other than that of its work. where: its
    host, in words, if that is another: a Refusal speaks of "this host"."""
    if end is None or end.how == FINISHED:
        return
    if end.how == REFUSED:
        raise Refusal(where + end.error)
    raise coordinator.failed(rank, end.error)


def _raise_death(rank: int, peer: RankInfo, environment: Environment, coordinator: Coordinator) -> None:
    coordinator.dead.append(rank)
    where = f"process {peer.process.pid} on {peer.name}"
    coordinator.event("died", f"replica {rank} died ({where}); all ranks end", member=rank)
    raise RunFailed(f"replica {rank} died, and under torchrun that ends all ranks. {_on_death(environment)}")


def _on_death(environment: Environment) -> str:
    """What a death will lead to, in words; it is reported before the first update."""
    if not environment.restarts_allowed:
        return (
            "A death ends the run; murmurate resume goes on from its last checkpoint. With torchrun "
            "--max-restarts N, torch elastic starts all ranks again from there."
        )
    return (
        f"A death ends all ranks; torch elastic starts them again from the last checkpoint, "
        f"at most {environment.restarts_allowed} time(s)."
    )


def _danger(environment: Environment) -> str:
    """What strangers can do to a run whose store other hosts can reach, in words; empty if none can."""
    where = listens_beyond_loopback(lambda socket: socket.laddr.port == environment.port)
    if not where:
        return ""
    unprotected = f" {VARIABLE} is not set: anyone who reaches it can also stop this run or take part in it."
    return f"the store of torchrun listens on {where}: {DANGER}." + unprotected * (not user_secret())


def _unblock(roles: list[_OwnRole], host: MemberHost) -> None:
    """If members' threads in this process still run, let their waits end, so that the process can end."""
    if all(role.exit is not None for role in roles):
        return
    host.run_state.request_stop()
    for rank in range(host.run_state.size):
        if rank not in [role.rank for role in roles]:
            host.run_state.mark_dead(rank)
    until = time.monotonic() + _LEAVE_SECONDS
    for role in roles:
        if role.thread.is_alive():
            role.thread.join(max(0.0, until - time.monotonic()))


def _write_roles(folder: Path, elastic: ElasticRanks, own_ranks: list[int]) -> None:
    pids: dict[int, int | None] = {rank: peer.process.pid for rank, peer in elastic.others.items()}
    pids |= dict.fromkeys(own_ranks)
    names = {rank: peer.name for rank, peer in elastic.others.items()}
    write_roles(folder, dict(sorted(pids.items())), elastic.environment.size, hosts=names)


# -- all other ranks --------------------------------------------------------------------------------------


class ElasticRanks(Rendezvous):
    """This process among torch elastic's ranks (see ``murmurate.training.launcher.Ranks``)."""

    def finished(self, folder: Path) -> None:
        self.gather()
        members, path = self.environment.size, str(folder.resolve())
        self.announce(
            JobSpec(self.run_id, self.epoch, members, None, time.monotonic(), folder=path, finished=True)
        )
        self.dismiss(0)
        self.close()
        self.end()

    def follow(self, own: Run, read: Callable[[Path], Run]) -> tuple[Path, int]:
        try:
            return self._follow(own, read)
        finally:
            self.end()

    def _follow(self, own: Run, read: Callable[[Path], Run]) -> tuple[Path, int]:
        rank = self.environment.rank
        try:
            spec = self.join()
            if spec.finished:
                self.confirm_dismissal()
                return Path(spec.folder), 0
            check_folder(spec)
            run = read(Path(spec.folder))
            _refuse_other_options(own, run)
            host = MemberHost(spec, self.store, [rank], leads=False, address=self.address())
        except Refusal as refusal:
            self.report(Exit(REFUSED, str(refusal)))
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only rank 0 handles Ctrl-C
        signal.signal(signal.SIGTERM, lambda *_: leave_unless_stopping(host.run_state))
        prepare_process(run.placement.threads)
        member_ended = threading.Event()
        threading.Thread(
            target=_exit_with_leader, args=(spec.leader, host, member_ended), daemon=True
        ).start()
        end = run_member(run, lambda: host.worker_context(rank, run))
        member_ended.set()
        if end.how != FINISHED:
            self.report(end)
            raise (Refusal if end.how == REFUSED else RunFailed)(end.error)
        host.flush()
        # the other ranks may go on for hours; rank 0 announces when all have ended
        code = self.await_dismissal(lambda: host.is_gone(0, spec.leader, _SILENT_SECONDS))
        host.close()
        if code is None:
            raise RunFailed("rank 0 is gone before it could save the last checkpoint")
        return Path(spec.folder), code


def _refuse_other_options(own: Run, leaders: Run) -> None:
    """Raise Refusal if this rank was asked for another Run than the leader's; ``auto`` is whatever the leader
    took it for."""
    differing = list(_differing(plain(without_places(own)), plain(without_places(leaders))))
    if differing:
        raise Refusal(
            f"this rank was started with other options than rank 0 ({', '.join(differing[:5])}): give every "
            "host the same command."
        )


def _differing(own: dict[str, Any], leaders: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in own.items():
        theirs = leaders.get(name)
        if isinstance(value, dict) and isinstance(theirs, dict):
            yield from _differing(value, theirs, f"{prefix}{name}.")
        elif value not in (theirs, "auto"):
            yield prefix + name


@functools.cache
def elastic_ranks() -> ElasticRanks:
    """This process among the ranks. Raises Refusal without a rank, and if the store cannot be used."""
    return ElasticRanks(Environment.read(os.environ))


def _exit_with_leader(leader: Process, host: MemberHost, member_ended: threading.Event) -> None:
    """End this process when rank 0 is gone, as no checkpoint would be committed any more."""
    parent = os.getppid()
    is_elastic = "TORCHELASTIC_RUN_ID" in os.environ
    while not member_ended.wait(_POLL_SECONDS):
        orphaned = is_elastic and os.getppid() != parent
        if orphaned or host.is_gone(0, leader, _SILENT_SECONDS):
            print("murmurate: rank 0 is gone, so this rank ends", file=sys.stderr, flush=True)
            os._exit(1)
