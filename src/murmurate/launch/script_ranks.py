"""A user's own script that torchrun started: each of its ranks is one member.

All ranks run the script, and call ``murmurate.run``. The main thread of each runs ``main`` as its member; a
thread beside it watches the other ranks. Rank 0 leads: it lends its memory to the others, marks dead members,
and starts the process of a centre if the strategy has one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability
from murmurate.fabric.processes.spawn import (
    DIED,
    FAILED,
    FINISHED,
    LEFT,
    REFUSED,
    Died,
    Exit,
    Worker,
    WorkerProcesses,
    exit_now,
    take_signals,
)
from murmurate.launch.job_spec import JobSpec, MemberHost
from murmurate.launch.rendezvous import Environment, Rendezvous
from murmurate.launch.script_arguments import default_threads, gpus_here, refuse_missing_gpus
from murmurate.launch.script_launcher import Devices, ScriptLauncher
from murmurate.launch.script_member import ScriptSettings, failure, stdout_of
from murmurate.replicator.stopping import StopSignals

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 30.0  # after which a rank of another host counts as dead
_LEAVE_SECONDS = 60.0  # how long rank 0 waits for the others to read all results


def torchrun_environment() -> Environment | None:
    """What torchrun tells this process about its ranks; None if torchrun did not start this process."""
    return Environment.read(os.environ) if all(name in os.environ for name in _VARIABLES) else None


class TorchrunScripts(ScriptLauncher):
    """The ranks that torchrun started, each of them a member."""

    name = "torchrun"

    def __init__(self, environment: Environment | None) -> None:
        """Raises Refusal in a process that torchrun did not start."""
        if environment is None:
            raise Refusal(
                "launcher='torchrun' takes its ranks from torchrun, which did not start this script. Run: "
                "torchrun --nproc-per-node 2 script.py; or leave launcher out."
            )
        self._environment = environment
        if environment.hosts > 1:
            self.offers = frozenset(Capability) - {Capability.SHARED_MEMORY}
            self.place = f"a group of {environment.hosts} hosts"

    def replicas(self, given: int | None, grid: tuple[int, int]) -> int:
        """As many as the ranks form. Raises Refusal if that is not ``given``."""
        parts, size = math.prod(grid), self._environment.size
        member = "replica" if parts == 1 else f"part of a replica of {parts} parts"
        if size % parts or (given is not None and given * parts != size):
            wanted = "whole replicas" if given is None else f"replicas={given}"
            needed = parts if given is None else given * parts
            start = "Start" if size % parts else "Leave replicas out, or start"
            raise Refusal(
                f"torchrun started {size} rank(s), each of them a {member}: they do not make {wanted}. "
                f"{start} {needed} rank(s) (--nproc-per-node times --nnodes)."
            )
        return size // parts

    def devices(self, named: Devices) -> Devices:
        """By default the GPU of this rank's number on its host."""
        rank, devices = self._environment.rank, named
        if not named:
            here = gpus_here()
            devices = (here[int(os.environ.get("LOCAL_RANK", rank)) % len(here)],)
        refuse_missing_gpus([devices[rank % len(devices)]])  # the others are other ranks'
        return devices

    def threads(self, members: int) -> int:
        return default_threads(math.ceil(members / self._environment.hosts))

    def run(self, settings: ScriptSettings) -> list[Any]:
        return run_rank(settings)


@functools.cache
def _rendezvous() -> Rendezvous:
    """The rendezvous of this process. It is kept for later calls of ``run``, and because rank 0's may be the
    server of the store that all ranks use."""
    environment = torchrun_environment()
    assert environment is not None
    return Rendezvous(environment)


def run_rank(settings: ScriptSettings) -> list[Any]:
    """Run ``main`` as the member of this rank; returns the results of all replicas, once all have ended.

    Raises RunFailed if a member fails or rank 0 is gone, Refusal if this rank's settings are not rank 0's,
    and SystemExit at the end if a signal has come that ``stopping`` noted, or told this rank of.
    """
    rendezvous, signals = _rendezvous(), StopSignals()
    rank = rendezvous.environment.rank
    with contextlib.ExitStack() as restored, _Members(settings, rendezvous) as members:
        restored.callback(signals.end)
        own_end = _run_member(settings, members, rank, signals)
        rendezvous.share(f"result/{rank}", _packed(own_end.result))
        rendezvous.report(Exit(own_end.how, own_end.error, own_end.trace))
        members.host.run_state.mark_finished(rank)
        members.host.flush()
        results = members.until_all_have_ended()
    results[rank] = settings.result_of(rank, own_end)
    of_replicas = settings.results(results)
    # one of this rank may have come after ``main`` last asked
    if number := signals.acted_on or signals.number:
        raise SystemExit(128 + number)  # with exit code 0 an engine would take the job for complete
    return of_replicas


def _run_member(settings: ScriptSettings, members: _Members, rank: int, signals: StopSignals) -> Exit:
    """Run ``main``; returns how it ended. An error of ``main`` is raised as RunFailed, once the other ranks
    have been told of it."""
    threads = torch.get_num_threads()
    stopped = threading.Event()
    watch = threading.Thread(target=members.watch, args=(stopped,), name="ranks", daemon=True)
    watch.start()
    try:
        fabric = members.host.fabric(rank, settings.deadline_seconds)
        end = settings.run_to_exit(fabric, stdout_of(settings.output, rank), signals)
    except BaseException as error:
        end = Exit.failed(error)
        members.failed(end)
        if not isinstance(error, Exception):
            raise
        raise RunFailed(f"{settings.name_of(rank)} failed: {end.error}") from error
    finally:
        stopped.set()
        watch.join()
        torch.set_num_threads(threads)
    if end.how == REFUSED:
        members.failed(end)
        raise Refusal(end.error)
    return end


class _Members:
    """All members of the script, from the view of one rank. A context manager."""

    def __init__(self, settings: ScriptSettings, rendezvous: Rendezvous) -> None:
        self.settings, self.rendezvous = settings, rendezvous
        self.rank, self.leads = rendezvous.environment.rank, rendezvous.leads
        self.ended: dict[int, Exit] = {}  # on rank 0: how each other member ended
        self.centre: WorkerProcesses | None = None
        self._suspended_polls = 0  # at how many successive polls the centre was suspended

    def __enter__(self) -> _Members:
        rendezvous, settings = self.rendezvous, self.settings
        fingerprint = _fingerprint(settings)
        rendezvous.begin()
        if not self.leads:
            try:
                self._join(fingerprint)
            except Refusal as refusal:
                rendezvous.report(Exit(REFUSED, str(refusal)))
                raise
            return self
        if settings.strategy.centre:
            settings.pickled()  # raises Refusal if they cannot be sent to the centre's process
        rendezvous.gather()
        self.spec = JobSpec(
            run_id=rendezvous.run_id,
            epoch=rendezvous.epoch,
            members=settings.members,
            offer=rendezvous.offer,
            proof=fingerprint,
            started_at=time.monotonic(),
        )
        self.host = MemberHost(
            self.spec, rendezvous.store, [self.rank], leads=True, address=rendezvous.address()
        )
        rendezvous.announce(self.spec)
        if settings.strategy.centre:
            self.centre = WorkerProcesses(1)
            self.centre.start(0, functools.partial(_run_centre, settings, self.spec, rendezvous.address()))
        return self

    def __exit__(self, *error: object) -> None:
        if self.centre is not None:
            self.centre.close()
        self.host.run_state.detach()
        self.host.close()
        self.rendezvous.close()

    def _join(self, fingerprint: str) -> None:
        """Become a member of rank 0's job. Raises Refusal."""
        self.spec = self.rendezvous.join()
        if self.spec.proof != fingerprint:
            raise Refusal(
                "this rank calls murmurate.run with other settings (strategy, parts, seed, workers or "
                "collectives) than rank 0: give all ranks the same."
            )
        address = self.rendezvous.address()
        self.host = MemberHost(self.spec, self.rendezvous.store, [self.rank], leads=False, address=address)

    # -- while main runs

    def watch(self, stopped: threading.Event) -> None:
        """End this process if another member has failed, or rank 0 is gone; ``main`` itself, which may be
        waiting or computing, could not notice."""
        while not stopped.wait(_POLL_SECONDS):
            try:
                problem = self.poll()
            except Exception:
                problem = traceback.format_exc()
            if problem is None or stopped.is_set():
                continue
            text = (
                f"murmurate: {problem}" if self.leads else f"murmurate: rank {self.rank} ends, as {problem}"
            )
            print(text, file=sys.stderr, flush=True)
            if self.leads:
                self.rendezvous.dismiss(1)
            if self.centre is not None:
                self.centre.close()
            exit_now(1)

    def failed(self, end: Exit) -> None:
        """Tell the others that this process's member ended as ``end`` says."""
        self.rendezvous.report(Exit(end.how, end.error, end.trace))
        if self.leads:
            self.rendezvous.dismiss(1, 0.0)

    def poll(self) -> str | None:
        """Record which other members have ended, and how; returns the reason to end this process, or None."""
        if not self.leads:
            code = self.rendezvous.dismissal_code()
            if code is not None:
                return None if code == 0 else "another member has failed; see the output of its rank"
            return "rank 0 is gone" if self.host.is_gone(0, self.spec.leader, _SILENT_SECONDS) else None
        for rank, peer in self.rendezvous.others.items():
            if rank in self.ended:
                continue
            gone = self.host.is_gone(rank, peer.process, _SILENT_SECONDS)
            end = self.rendezvous.reported(rank)
            if end is None and gone:
                end = Exit(DIED, f"process {peer.process.pid} on {peer.name}")
            if end is not None:
                self._handle_end(rank, end)
        if self.centre is not None:
            self._end_suspended(self.centre)
            for worker in self.centre.wait(0.0):
                assert worker.exit is not None
                self._handle_end(self.settings.members - 1, worker.exit)
        failed = [(r, e) for r, e in self.ended.items() if e.how in (FAILED, REFUSED)]
        return next((failure(self.settings.name_of(r), e) for r, e in failed), None)

    def _end_suspended(self, centre: WorkerProcesses) -> None:
        suspended = [worker for worker in centre.alive if worker.is_stopped]
        self._suspended_polls = self._suspended_polls + 1 if suspended else 0
        if self._suspended_polls * _POLL_SECONDS > self.settings.deadline_seconds:
            for worker in suspended:
                worker.kill("it was suspended")

    def _handle_end(self, rank: int, end: Exit) -> None:
        self.ended[rank] = end
        if end.how in (DIED, LEFT):
            self.settings.result_of(rank, end)  # only to print how the member ended
        if end.how != FINISHED or self.settings.strategy.common_rounds:
            self.host.run_state.mark_dead(rank)  # the others go on without it

    # -- once main has ended

    def until_all_have_ended(self) -> dict[int, Any]:
        """The results of all other members, by rank. Raises RunFailed if one failed, or rank 0 is gone."""
        if self.leads and self.settings.strategy.common_rounds:
            self.host.run_state.mark_dead(self.rank)
        alone_since: float | None = None
        while (problem := self.poll()) is None:
            if self.leads and len(self.ended) == self.settings.members - 1:
                break
            if not self.leads and self.rendezvous.dismissal_code() is not None:
                break
            left = set(range(self.settings.members)) - {self.rank, *self.ended}
            only_centre = self.leads and self.centre and left == {self.settings.members - 1}
            alone_since = (alone_since or time.monotonic()) if only_centre else None
            if alone_since and time.monotonic() - alone_since > self.settings.deadline_seconds:
                self._handle_end(self.settings.members - 1, Exit(DIED, "it outlived all replicas"))
            time.sleep(_POLL_SECONDS)
        if problem is None and self.leads and self.centre is not None:
            end = self.ended[self.settings.members - 1]
            problem = self.settings.lost_centre() if end.how in (DIED, LEFT) else None
        if problem is not None:
            if self.leads:
                self.rendezvous.dismiss(1)
            raise RunFailed(problem)
        return self._collect()

    def _collect(self) -> dict[int, Any]:
        if self.leads:
            self.rendezvous.dismiss(0, 0.0)
        results: dict[int, Any] = {}
        for rank in range(self.rendezvous.environment.size):
            end = self.ended.get(rank)
            if rank != self.rank:
                packed = None if end and end.how == DIED else self.rendezvous.shared(f"result/{rank}")
                results[rank] = Died(rank, None) if packed is None else _unpacked(packed)
        if self.leads:
            self.rendezvous.dismiss(0, _LEAVE_SECONDS)
        else:
            self.rendezvous.confirm_dismissal()
        return results


def _run_centre(settings: ScriptSettings, spec: JobSpec, address: str, worker: Worker) -> Exit:
    """The function of the process that runs a centre, which rank 0 starts."""
    # torch elastic signals all processes of a rank; replicas that stop by themselves need the centre until
    # they have, and it ends with rank 0
    take_signals(signal.SIG_IGN)
    environment = torchrun_environment()
    assert environment is not None
    rank = settings.members - 1
    store = Rendezvous.client(environment, spec.run_id, spec.epoch)
    host = MemberHost(spec, store, [rank], leads=False, address=address)
    # after the report: the ranks, for which its fabric waits, close only once rank 0 knows that it has ended
    worker.afterwards.callback(host.close)
    end = settings.run_to_exit(host.fabric(rank, settings.deadline_seconds), stdout_of("main", rank))
    if end.how == FINISHED:
        host.run_state.mark_finished(rank)
        host.flush()
    return Exit(end.how, end.error, end.trace)


def _fingerprint(settings: ScriptSettings) -> str:
    """A digest of the settings that must be the same on all ranks."""
    common = (settings.strategy.name, settings.strategy, settings.grid, settings.seed, settings.workers)
    return hashlib.blake2b(repr((common, settings.collectives)).encode(), digest_size=16).hexdigest()


def _packed(result: Any) -> bytes:
    """Tensors and plain values in a form that can be read without executing code; empty for other results."""
    content = io.BytesIO()
    try:
        torch.save(result, content)
        _unpacked(content.getvalue())
    except Exception:
        return b""
    return content.getvalue()


def _unpacked(packed: bytes) -> Any:
    # without general unpickling, which executes code: a stranger may have written what is in a store
    # on the CPU, as this host may lack the GPU that a tensor was on
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True) if packed else None
