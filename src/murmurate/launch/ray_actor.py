"""One member's process on a Ray cluster: an actor that lives its part of a run, once an epoch."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from murmurate.errors import Refusal
from murmurate.launch.host_memory import Offer, Process, borrow
from murmurate.launch.job_spec import Ground, Meeting, check_folder
from murmurate.launch.rendezvous import own_address
from murmurate.launch.role import FAILED, REFUSED, keep_log, live, settle_arithmetic
from murmurate.training.run import Run

STORE_SECONDS = 60.0


@dataclass(frozen=True)
class Sitting:
    """Who sits there: a process of a named host, and whether it shares the launcher's memory."""

    process: Process
    name: str
    shares: bool


class Seat:
    """Becomes an actor in ``murmurate.launch.ray``, which asks it one thing at a time."""

    def sit(self, offer: Offer) -> Sitting:
        memory_file = borrow(offer)
        if memory_file is not None:
            memory_file.close()
        return Sitting(Process.this(), socket.gethostname(), memory_file is not None)

    def live(self, run: Run, rank: int, meeting: Meeting, store: tuple[str, int]) -> tuple[int, str | None]:
        """``rank``'s part of ``run`` to its end, or to the next epoch: see ``murmurate.launch.role.live``.

        store: host and port of the launcher's.
        """
        try:
            check_folder(meeting)
            keep_log(Path(meeting.folder), rank)
            settle_arithmetic(run.placement.threads)
            run = _placed(run, rank)
            ground = Ground(
                meeting, self._store(meeting, store), [rank], leads=False, address=own_address(store[0])
            )
        except Refusal as refusal:
            return REFUSED, str(refusal)
        except Exception as error:
            return FAILED, f"replica {rank} could not begin: {type(error).__name__}: {error}"
        try:
            return live(run, rank, lambda: ground.post(rank))
        finally:
            ground.close()

    def _store(self, meeting: Meeting, where: tuple[str, int]) -> PrefixStore:
        timeout = datetime.timedelta(seconds=STORE_SECONDS)
        client = TCPStore(*where, is_master=False, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"epoch-{meeting.epoch}", client)


def _placed(run: Run, rank: int) -> Run:
    """``run`` with the device that ``rank``'s actor has: see ``murmurate.launch.ray_cluster.bundle``."""
    if run.device(rank).type != "cuda" or not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return run
    # Ray shows an actor its own GPU alone, which torch then counts from 0
    return dataclasses.replace(run, placement=dataclasses.replace(run.placement, devices=("cuda:0",)))
