"""A user's own script on a Ray cluster: each member is an actor, which runs ``main``."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from murmurate.errors import Refusal
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import DIED, FAILED, FINISHED, REFUSED, Died, Exit, describe
from murmurate.launch.addresses import own_address
from murmurate.launch.host_memory import lend
from murmurate.launch.job_spec import JobSpec, MemberHost
from murmurate.launch.ray_actor import WorkerActor, WorkerInfo, launchers_store
from murmurate.launch.ray_cluster import cluster, first_line, place, resources, start_actor
from murmurate.launch.script_launcher import Devices, ScriptLauncher
from murmurate.launch.script_member import ScriptSettings, WholeLines

_POLL_SECONDS = 0.1
_BEGIN_SECONDS = 120.0  # how long an actor's process may take to import all that it needs


class RayScripts(ScriptLauncher):
    """Actors of the cluster at RAY_ADDRESS, or of a Ray that is started on this host."""

    name = "ray"

    def devices(self, named: Devices) -> Devices:
        """Raises Refusal for "auto", and for replicas of several devices."""
        if not named:
            raise Refusal(
                "devices='auto' takes this host's GPUs, and Ray's hosts may have others. Name as many as the "
                "replicas are to have, devices=('cuda:0', 'cuda:1'), or leave devices out for the CPU."
            )
        several = next((names for names in named if len(names) > 1), None)
        if several is not None:
            raise Refusal(
                f"devices names {len(several)} devices for one replica, and under Ray a replica has one. "
                "Name one for each, or use launcher='local'."
            )
        return named

    def threads(self, members: int) -> int:
        return 1  # cores of the cluster, which are asked for

    def run(self, settings: ScriptSettings) -> list[Any]:
        """Also raises MissingExtra where Ray is not installed; Refusal if there is no such cluster or no room
        in it, and for a ``main`` that other processes cannot import."""
        settings.pickled()  # raises Refusal if they cannot be sent to another process
        with cluster(settings.members * settings.threads) as ray:
            job = _Job(ray, settings)
            try:
                job.begin()
                return settings.results(job.results())
            finally:
                job.close()


class ScriptActor(WorkerActor):
    """The class of a Ray actor: ``describe_process`` is called first, then ``run_script``."""

    def run_script(self, settings: ScriptSettings, rank: int, spec: JobSpec, store: tuple[str, int]) -> Exit:
        """Run the member ``rank`` to its end. store: host and port of the driver's store."""
        is_centre = rank == settings.centre_rank
        if is_centre:  # it has no GPU
            settings = dataclasses.replace(settings, devices=(("cpu",),))
        elif settings.devices[rank % len(settings.devices)] != ("cpu",) and os.environ.get(
            "CUDA_VISIBLE_DEVICES"
        ):
            # an actor sees only its own GPU, which torch then calls cuda:0
            settings = dataclasses.replace(settings, devices=(("cuda:0",),))
        try:
            members_store = self._store(spec, store)
            host = MemberHost(spec, members_store, [rank], leads=False, address=own_address(store[0]))
        except Refusal as refusal:
            return Exit(REFUSED, str(refusal))
        except Exception as error:
            return Exit.failed(error)
        out = _Lines(members_store.clone(), settings, rank)  # type: ignore[attr-defined]
        try:
            end = settings.run_to_exit(host.fabric(rank, settings.deadline_seconds), out)
            if end.how == FINISHED:
                host.run_state.mark_finished(rank)
        except BaseException as error:
            return Exit.failed(error)
        finally:
            host.close()
        return end


class _Job:
    """All members of a script, in the driver (the process that called ``murmurate.run``)."""

    def __init__(self, ray: Any, settings: ScriptSettings) -> None:
        self.ray, self.settings = ray, settings
        self.address = str(ray.util.get_node_ip_address())
        self.store = launchers_store(self.address)
        replica_devices = [
            torch.device(settings.devices[rank % len(settings.devices)][0])
            for rank in range(settings.replicas * settings.parts)  # parts: members that share a replica
        ]
        devices = replica_devices + [torch.device("cpu")] * settings.strategy.centre  # 0 or 1 centre
        self.bundles = [resources(device, replica_devices, settings.threads) for device in devices]
        self.group = place(ray, self.bundles, use_fewer="replicas or threads")
        self.actors: list[Any] = []
        self.host: MemberHost | None = None
        self.memory_file = SharedMemoryFile.create()

    def begin(self) -> None:
        """Start all actors, and ``main`` in each. Raises Refusal if Ray cannot start them in time."""
        ray, settings = self.ray, self.settings
        offer = lend(self.memory_file)
        self.actors = [
            start_actor(ray, ScriptActor, self.group, rank, bundle, settings.threads)
            for rank, bundle in enumerate(self.bundles)
        ]
        references = [actor.describe_process.remote(offer) for actor in self.actors]
        try:
            infos: list[WorkerInfo] = ray.get(references, timeout=_BEGIN_SECONDS)
        except ray.exceptions.RayError as error:
            raise Refusal(
                f"Ray could not start the members ({first_line(error)}). murmurate must be installed on "
                "every node, in the same version."
            ) from error
        spec = JobSpec(
            run_id=secrets.token_hex(8),
            epoch=1,
            members=settings.members,
            offer=offer if offer.descriptor >= 0 and all(info.can_borrow for info in infos) else None,
            started_at=time.monotonic(),
        )
        self.members_store = PrefixStore(f"epoch-{spec.epoch}", self.store)
        self.host = MemberHost(spec, self.members_store, [], leads=True, address=self.address)
        store_address = (self.address, self.store.port)
        self.awaited = {
            actor.run_script.remote(settings, rank, spec, store_address): rank
            for rank, actor in enumerate(self.actors)
        }

    def results(self) -> dict[int, Any]:
        """Collect results as they arrive, by rank. If a member dies, the others go on without it. If only the
        centre is left for longer than the deadline, it is killed.

        Raises Refusal or RunFailed when the first member is refused or fails.
        """
        assert self.host is not None
        settings = self.settings
        printer = _Printer(self.members_store, settings.members)
        results: dict[int, Any] = {}
        alone_since: float | None = None
        while self.awaited:
            ended, _ = self.ray.wait(list(self.awaited), num_returns=1, timeout=_POLL_SECONDS)
            printer.print_new()
            for reference in ended:
                rank = self.awaited.pop(reference)
                results[rank] = settings.result_of(rank, self._end(reference))
                # in common rounds the others would wait for a member that has finished, too
                if isinstance(results[rank], Died) or settings.strategy.common_rounds:
                    self.host.run_state.mark_dead(rank)
            only_centre = list(self.awaited.values()) == [settings.centre_rank]
            alone_since = (alone_since or time.monotonic()) if only_centre else None
            if alone_since and time.monotonic() - alone_since > settings.deadline_seconds:
                self.ray.kill(self.actors[-1])
        printer.print_new()
        return results

    def _end(self, reference: Any) -> Exit:
        try:
            end: Exit = self.ray.get(reference)
            return end
        except self.ray.exceptions.RayActorError as error:
            return Exit(DIED, first_line(error))
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # of an error in the actor, outside of ``main``
            reason = first_line(error) if cause is None else describe(cause)
            return Exit(
                FAILED,
                f"its script cannot be imported there, or its result not be sent back ({reason}). Every node "
                "needs the script's files; return tensors and plain values.",
            )

    def close(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
        self.ray.util.remove_placement_group(self.group)
        if self.host is not None:
            self.host.close()
        self.memory_file.close()


class _Lines(WholeLines):
    """A stream that sends what a member prints to the driver, in whole lines, through the driver's store;
    what is not to be shown is dropped."""

    def __init__(self, store: Store, settings: ScriptSettings, rank: int) -> None:
        super().__init__()
        self._store, self._rank, self._pid = store, rank, os.getpid()
        self._is_shown = settings.output == "all" or rank == 0
        self._mark = f"[{rank}] " if settings.output == "all" else ""

    def pass_on(self, lines: Sequence[str]) -> None:
        if os.getpid() != self._pid:  # a fork, such as a worker of a DataLoader, needs its own connection
            self._store, self._pid = self._store.clone(), os.getpid()  # type: ignore[attr-defined]
        for line in lines if self._is_shown else ():
            number = self._store.add(f"said/{self._rank}", 1) - 1
            self._store.set(f"said/{self._rank}/{number}", self._mark + line)


class _Printer:
    """Prints the lines of all members in the driver."""

    def __init__(self, store: Store, members: int) -> None:
        self._store, self._next = store, [0] * members

    def print_new(self) -> None:
        for rank, number in enumerate(self._next):
            while self._store.check([f"said/{rank}/{number}"]):
                print(self._store.get(f"said/{rank}/{number}").decode(), flush=True)
                self._store.delete_key(f"said/{rank}/{number}")
                number += 1
            self._next[rank] = number
