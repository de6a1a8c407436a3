"""The ray launcher: workers on a Ray cluster, through all epochs of a run."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import FINISHED, LEFT, REFUSED
from murmurate.launch import shutdown
from murmurate.launch.heartbeats import EngineMember, HeartbeatMonitor
from murmurate.launch.host_memory import lend
from murmurate.launch.job_spec import JobSpec, MemberHost, write_proof
from murmurate.launch.ray_actor import WorkerActor, WorkerInfo, launchers_store
from murmurate.launch.ray_cluster import bundle, cluster, first_line, import_ray, place, start_actor
from murmurate.training import checkpoint
from murmurate.training.coordinator import Coordinator
from murmurate.training.interrupts import SecondInterrupt, signals
from murmurate.training.launcher import Launcher
from murmurate.training.run import Run
from murmurate.training.run_folder import write_roles
from murmurate.training.worker_context import FINAL_REQUEST, Resume, parts_to_resume

_POLL_SECONDS = 0.1
_BEGIN_SECONDS = 120.0  # how long an actor's process may take to import all that it needs
_RESTARTS = 3  # of one replica; a replica that fails after each of them is given up


class Ray(Launcher):
    """Roles as actors of a Ray cluster, each with its share of cores and GPUs; the dead are replaced.

    A role is a member's part of the run. Ray starts the actors, places them and reports their ends; every
    vector goes through the fabric. This process is the coordinator. When a replica dies the others go on, as
    under the local launcher, while Ray starts an actor in its place. Once that is ready, all members save at
    the end of a step and begin a new *epoch* from there, in which the new actor has the parameters and
    optimizer moments of a living peer.
    """

    name = "ray"
    sends = True

    def check(self, run: Run) -> None:
        """Also raises MissingExtra where Ray is not installed."""
        import_ray()
        super().check(run)

    def start(self, run: Run, folder: Path, resume: Resume | None) -> Coordinator:
        """Use the cluster at RAY_ADDRESS, or a Ray of this host alone that ends with the run.

        Also raises Refusal if there is no such cluster, or no room in it.
        """
        with cluster(run.members * run.placement.threads) as ray:
            job = RayJob(ray, run, folder, resume)
            try:
                job.begin()
                with signals(job.coordinator), job.coordinator.console:
                    while True:
                        job.watch()
                        if not job.begin_next_epoch():
                            break
            except (RunFailed, SecondInterrupt) as failure:
                job.coordinator.failure = failure
            finally:
                job.close()
            return job.coordinator


class RayJob:
    """The members of a run on a cluster, through all epochs."""

    coordinator: Coordinator
    host: MemberHost

    def __init__(self, ray: Any, run: Run, folder: Path, resume: Resume | None) -> None:
        self.ray, self.run, self.folder = ray, run, folder
        self.started_at = time.monotonic()
        self.begun_from, self.resume = resume, resume  # from what the run, and its newest epoch, has resumed
        self.address = str(ray.util.get_node_ip_address())
        self.store = launchers_store(self.address)
        self.proof = write_proof(folder)
        self.epoch = 0
        self.memory_file: SharedMemoryFile | None = None
        bundles = [bundle(run, rank) for rank in range(run.members)]
        self.group = place(ray, bundles, use_fewer="--replicas or --placement.threads")
        self.restarts: Counter[int] = Counter()
        self.actors: dict[int, Any] = {}
        self.workers: dict[int, WorkerInfo] = {}
        self.awaited: dict[Any, int] = {}  # Ray's reference to the ``Exit`` of a running actor -> its rank
        # rank -> (actor, reference to its ``WorkerInfo``)
        self.replacements: dict[int, tuple[Any, Any]] = {}
        self.new_epoch_requested = False

    # -- an epoch

    def begin(self) -> None:
        """Start all actors and the first epoch. Raises Refusal."""
        self._lend()
        waiting = {rank: self._actor(rank) for rank in range(self.run.members)}
        for rank, (actor, info) in waiting.items():
            try:
                self.actors[rank], self.workers[rank] = actor, self.ray.get(info, timeout=_BEGIN_SECONDS)
            except self.ray.exceptions.RayError as error:
                raise Refusal(
                    f"Ray could not start replica {rank} ({first_line(error)}). murmurate must be installed "
                    "on every node, in the same version."
                ) from error
        self.started_at = time.monotonic()
        self._open_epoch()
        self.coordinator = Coordinator(
            self.run, self.folder, self.host.run_state, self.started_at, self.begun_from
        )
        if self.spec.compression_warning:
            self.coordinator.event("warning", self.spec.compression_warning)
        self._start_members()

    def begin_next_epoch(self) -> bool:
        """Called after all members have ended. If that was for a new epoch, begin it and return True."""
        coordinator, replicas = self.coordinator, range(self.run.replicas)
        have_saved = any(coordinator.run_state.has_saved(rank, FINAL_REQUEST) for rank in replicas)
        if set(coordinator.dead) >= set(replicas) and not have_saved:
            raise RunFailed(shutdown.ALL_DIED)
        goes_on = self.new_epoch_requested and not self._is_over()
        if not coordinator.commit_final(goes_on) or not goes_on or self._is_over():
            return False
        last = coordinator.checkpoints / "last"
        parts = parts_to_resume(checkpoint.parts(last), self.run.replicas)
        manifest = checkpoint.read_manifest(last)
        self.resume = Resume(last.resolve(), parts, manifest, coordinator.seconds_before)
        for rank, (actor, info) in list(self.replacements.items()):
            if self._is_ready(rank):
                self.actors[rank], self.workers[rank] = actor, self.ray.get(info)
                del self.replacements[rank]
                coordinator.dead.remove(rank)
                message = f"replica {rank} is back with what replica {parts[rank]} had learned"
                coordinator.event("joined", message, member=rank)
        self.new_epoch_requested = False
        self._lend()
        self._open_epoch()
        coordinator.run_state = self.host.run_state
        if coordinator.stopped_because:  # by a signal, just now
            self.host.run_state.request_stop()
        self._start_members()
        return True

    def _is_over(self) -> bool:
        """Whether the whole run, and not only this epoch, has ended or was stopped."""
        coordinator, run_state, run = self.coordinator, self.coordinator.run_state, self.run
        if coordinator.interrupted or coordinator.stopped_because:
            return True
        living = [rank for rank in run_state.living() if rank < run.replicas]
        if run.env_steps is not None and run_state.total_env_steps() >= run.env_steps:
            return True
        return run.updates is not None and all(run_state.clock(r) >= run.updates for r in living)

    def _lend(self) -> None:
        """For the next epoch, offer a new memory file to the members, which may have taken different regions
        of the last one."""
        if self.memory_file is not None:
            self.host.close()
            self.memory_file.close()
        self.memory_file = SharedMemoryFile.create()
        self.offer = lend(self.memory_file)
        self.epoch += 1
        # actors that are still starting can no longer open the last one
        for rank, (actor, _) in self.replacements.items():
            self.replacements[rank] = actor, actor.describe_process.remote(self.offer)

    def _open_epoch(self) -> None:
        """Open the epoch's run state, in which the members that have an actor are alive, with the counts from
        which they go on."""
        all_share = self.offer.descriptor >= 0 and all(w.can_borrow for w in self.workers.values())
        self.spec = JobSpec(
            run_id=self.proof,
            epoch=self.epoch,
            members=self.run.members,
            offer=self.offer if all_share else None,
            folder=str(self.folder.resolve()),
            proof=self.proof,
            started_at=self.started_at,
            elapsed_seconds=time.monotonic() - self.started_at,
            resume=self.resume,
            compression=self.run.compression,
        )
        store = PrefixStore(f"epoch-{self.epoch}", self.store)
        without_actor = [rank for rank in range(self.run.members) if rank not in self.actors]
        self.host = MemberHost(self.spec, store, without_actor, leads=True, address=self.address)
        for rank in range(self.run.members):
            if rank not in self.actors:
                self.host.run_state.mark_dead(rank)

    def _start_members(self) -> None:
        pids: dict[int, int | None] = {rank: w.process.pid for rank, w in sorted(self.workers.items())}
        write_roles(self.folder, pids, self.run.replicas, {r: w.name for r, w in self.workers.items()})
        store_address = (self.address, self.store.port)
        for rank, actor in self.actors.items():
            self.awaited[actor.run_member.remote(self.run, rank, self.spec, store_address)] = rank

    # -- watching

    def watch(self) -> None:
        """Handle ends and replacements, and let the coordinator work, until every member has ended."""
        ending, heartbeats = shutdown.Shutdown(self.coordinator), HeartbeatMonitor(self.coordinator)
        while self.awaited:
            ended, _ = self.ray.wait(list(self.awaited), num_returns=len(self.awaited), timeout=_POLL_SECONDS)
            for reference in ended:
                self._handle_end(self.awaited.pop(reference), reference)
            self.coordinator.poll()
            running = [EngineMember(rank, self.workers[rank].process) for rank in self.awaited.values()]
            for silent in heartbeats.poll(running):
                self.ray.kill(self.actors[silent.rank])
            if not self.coordinator.should_end:
                self._poll_replacements()
            if ending.is_overdue():
                for rank in shutdown.members_to_kill(self.coordinator, sorted(self.awaited.values())):
                    self.ray.kill(self.actors[rank])

    def _handle_end(self, rank: int, reference: Any) -> None:
        try:
            end = self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            self._died(rank, first_line(error))
            return
        except self.ray.exceptions.RayError as error:
            raise self.coordinator.failed(rank, first_line(error)) from error
        if end.how == REFUSED:
            worker = self.workers[rank]
            elsewhere = worker.process.host != self.spec.leader.host
            raise Refusal(f"on {worker.name}: " * elsewhere + end.error)  # which speaks of "this host"
        if end.how == LEFT:  # as another part of its replica was lost
            self.ray.kill(self.actors[rank])
            self._died(rank, end.error)
        elif end.how != FINISHED:
            raise self.coordinator.failed(rank, end.error)

    def _died(self, rank: int, how: str) -> None:
        del self.actors[rank], self.workers[rank]
        self.coordinator.died(rank, how)
        self._replace(rank)

    def _replace(self, rank: int) -> None:
        """Request another actor for ``rank`` from Ray; not for a centre, whose state no peer has."""
        if rank >= self.run.replicas or self.restarts[rank] >= _RESTARTS or self._is_over():
            return
        self.restarts[rank] += 1
        self.replacements[rank] = self._actor(rank)

    def _poll_replacements(self) -> None:
        """Once a replacement is ready, all members save, and a new epoch begins with it."""
        for rank, (_, info) in list(self.replacements.items()):
            if not self.ray.wait([info], timeout=0)[0]:
                continue
            if self._is_ready(rank):
                self.new_epoch_requested = True
            else:
                del self.replacements[rank]
                self._replace(rank)
        if self.new_epoch_requested:
            self.host.run_state.request_stop()

    def _is_ready(self, rank: int) -> bool:
        try:
            self.ray.get(self.replacements[rank][1], timeout=0)
        except self.ray.exceptions.RayError:
            return False
        return True

    # -- actors

    def _actor(self, rank: int) -> tuple[Any, Any]:
        """Start an actor for ``rank``; returns (actor, reference to its ``WorkerInfo``)."""
        actor = start_actor(self.ray, WorkerActor, self.group, rank, bundle(self.run, rank), threads=1)
        return actor, actor.describe_process.remote(self.offer)

    def close(self) -> None:
        for actor in [*self.actors.values(), *(actor for actor, _ in self.replacements.values())]:
            self.ray.kill(actor)
        self.ray.util.remove_placement_group(self.group)
        if hasattr(self, "coordinator"):
            self.coordinator.close()
        if hasattr(self, "host"):
            self.host.close()
        if self.memory_file is not None:
            self.memory_file.close()
