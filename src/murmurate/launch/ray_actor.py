"""One member's process on a Ray cluster: an actor that executes the member's part of a run, in each epoch."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from murmurate.errors import Refusal
from murmurate.fabric.processes.spawn import FAILED, REFUSED, Exit, describe
from murmurate.launch.addresses import own_address
from murmurate.launch.host_memory import MemoryOffer, Process, can_borrow
from murmurate.launch.job_spec import JobSpec, MemberHost, check_folder
from murmurate.launch.role import log_end, prepare_process, redirect_output_to_log, run_member
from murmurate.training.run import Run

_STORE_SECONDS = 60.0


def launchers_store(address: str, port: int = 0) -> TCPStore:
    """The launcher's store: a client of it; without a port its server, on any free port."""
    timeout = datetime.timedelta(seconds=_STORE_SECONDS)
    return TCPStore(address, port, is_master=not port, timeout=timeout, wait_for_workers=False)


@dataclass(frozen=True)
class WorkerInfo:
    """An actor's process, its host's name, and whether it can share the launcher's memory."""

    process: Process
    name: str
    can_borrow: bool


class WorkerActor:
    """The class of the actors of ``murmurate.launch.ray``, which calls one method at a time."""

    def describe_process(self, offer: MemoryOffer) -> WorkerInfo:
        """Describe the actor's process, once it has started. offer: of the launcher's memory."""
        return WorkerInfo(Process.this(), socket.gethostname(), can_borrow(offer))

    def run_member(self, run: Run, rank: int, spec: JobSpec, store: tuple[str, int]) -> Exit:
        """Execute the part of ``rank`` in ``run``, to its end or to the next epoch; returns how it ended (see
        ``murmurate.launch.role.run_member``).

        store: host and port of the launcher's store.
        """
        try:
            check_folder(spec)
            redirect_output_to_log(Path(spec.folder), rank)
            prepare_process(run.placement.threads)
            run = _placed(run, rank)
            host = MemberHost(
                spec, self._store(spec, store), [rank], leads=False, address=own_address(store[0])
            )
        except Refusal as refusal:
            return Exit(REFUSED, str(refusal))
        except Exception as error:
            return Exit(FAILED, f"it could not begin: {describe(error)}")
        try:
            end = run_member(run, lambda: host.worker_context(rank, run))
            log_end(Path(spec.folder), rank, end)
            return end
        finally:
            host.close()

    def _store(self, spec: JobSpec, address: tuple[str, int]) -> PrefixStore:
        return PrefixStore(f"epoch-{spec.epoch}", launchers_store(*address))


def _placed(run: Run, rank: int) -> Run:
    """``run`` with the device that the actor of ``rank`` has (see
    ``murmurate.launch.ray_cluster.bundle``)."""
    if run.device(rank).type != "cuda" or not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return run
    # an actor sees only its own GPU, which torch then calls cuda:0
    return dataclasses.replace(run, placement=dataclasses.replace(run.placement, devices=("cuda:0",)))
