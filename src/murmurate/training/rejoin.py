"""State transfer: a restarted member joins with the state of a living peer.

The launcher requests a transfer from a donor to a joiner in the run state (``TransferRequest``). The donor
writes its state between two of its steps; the joiner, already constructed, waits for it and loads it. Members
with common rounds all admit the joiner at the same round; other members admit it when they see that it has
entered.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from murmurate.fabric.interface import Capability
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import TransferRequest, sending_heartbeats
from murmurate.replica.optimizer_state import entries
from murmurate.replicator.replicator import BoundReplica, Replicator
from murmurate.training.checkpoint import read_part, write_part

_POLL_SECONDS = 0.002
# number of round times kept, rounds between two results, and the quantile that is the result
_KEPT_TIMES, _ROUNDS_PER_RESULT, _QUANTILE = 128, 8, 0.95


class JoinCancelled(Exception):
    """The run ended before this member had joined."""


class StateTransfer:
    """One member's part in state transfers: admits joiners, sends its state to them, or joins itself."""

    def __init__(self, admission: ProcessFabric, replicator: Replicator, folder: Path) -> None:
        self.admission, self.replicator, self.folder = admission, replicator, folder
        self.membership, self.run_state = admission.membership, admission.membership.run_state
        self.rank = self.membership.rank
        self.served = 0  # the newest request already served, packed

    def admit_joined(self) -> None:
        """Called by members without common rounds between two steps: admit the members that have entered."""
        for rank, incarnation in self.membership.newcomers():
            self.admission.admit(rank, incarnation)
            self.replicator.joined(rank)

    def serve_request(self, read_state: Callable[[], dict[str, Any]]) -> None:
        """Do ``admit_joined``; then, if this member is the donor of a new request, send ``read_state()`` to
        the joiner.

        Raises RunFailed if the state cannot be written, as on a full disk.
        """
        self.admit_joined()
        if self.run_state.transfer_request > self.served:
            self.served = self.run_state.transfer_request
            request = TransferRequest.unpack(self.served)
            if request.donor == self.rank:
                self._send(request, read_state(), self.membership.living())

    def admit_together(
        self, packed: int, barrier: Callable[[], Sequence[int]], read_state: Callable[[], dict[str, Any]]
    ) -> None:
        """Called by all members between the same two rounds, with the same packed request: the joiner takes
        part from the next round on. ``barrier`` makes one more round; it returns the ranks that took part.

        Raises RunFailed, as ``serve_request`` does.
        """
        if packed <= self.served:
            return
        self.served = packed
        request = TransferRequest.unpack(packed)
        # after this barrier the joiner's previous incarnation cannot take part in any round
        partners = barrier()
        if request.donor == self.rank:
            self._send(request, read_state(), partners)
        self.admission.admit(request.joiner, request.incarnation)
        self.replicator.joined(request.joiner)

    def _send(self, request: TransferRequest, transferred: dict[str, Any], partners: Sequence[int]) -> None:
        folder = _folder_of(self.folder, request.number)
        with sending_heartbeats(self.run_state, self.rank):
            write_part(folder, self.rank, transferred | {"position": self.admission.joining_state(partners)})
        self.run_state.mark_transferred(self.rank, request.number)

    def receive(self) -> dict[str, Any]:
        """Report that this joiner is ready, and wait for the state of a donor.

        Raises JoinCancelled if the run stops first, Refusal if the state cannot be read. There is no deadline
        here: the launcher asks another donor, or ends this process.
        """
        self.run_state.mark_ready(self.rank)
        this_joiner = self.rank, self.run_state.incarnation(self.rank)
        while not self.run_state.stop_requested:
            self.run_state.heartbeat(self.rank)
            request = TransferRequest.unpack(self.run_state.transfer_request)
            if (request.joiner, request.incarnation) == this_joiner and self.run_state.has_transferred(
                request.donor, request.number
            ):
                self.served = request.packed()
                folder = _folder_of(self.folder, request.number)
                transferred = read_part(folder, request.donor)
                shutil.rmtree(folder, ignore_errors=True)
                return transferred
            time.sleep(_POLL_SECONDS)
        raise JoinCancelled

    def complete(self, transferred: dict[str, Any]) -> None:
        """Called after the transferred state is loaded: take part from now on, and publish the parameters."""
        self.admission.enter(transferred["position"])
        self.replicator.rejoined()
        self.replicator.publish()
        self.run_state.mark_saved(self.rank, int(transferred["answered"]))
        self.run_state.enter(self.rank)


def _folder_of(folder: Path, number: int) -> Path:
    """The folder through which transfer ``number`` passes the state."""
    return folder / "checkpoints" / f".staging-transfer-{number}"


def state_to_load(replicator: Replicator, peer_state: dict[str, Any]) -> dict[str, Any]:
    """A peer's ``Replicator.state()``, changed to what this member must load when it joins, or resumes from
    a peer's part.

    Under a strategy with shared memory, what is shared is kept, as it has changed since the peer wrote its
    state. The clock is then this rank's entry of the strategy's ``clocks``, the updates of each rank.
    """
    if Capability.SHARED_MEMORY not in replicator.strategy.needs:
        return peer_state
    return {name: _keep_shared(bound, peer_state[name]) for name, bound in replicator.bound_replicas.items()}


def _keep_shared(bound: BoundReplica, peer_state: dict[str, Any]) -> dict[str, Any]:
    replica = bound.replica
    shared_state = {
        f"{index}.{key}": value
        for index, (_, state) in enumerate(entries(replica.optimizer))
        for key, value in state.items()
    }
    kept_state = {
        "params": None,
        # before the first step there are moments only if they are shared; if all members of their node were
        # restarted, all are zero, and the peer's are taken
        "optimizer": shared_state
        if any(map(_is_set, shared_state.values()))
        else peer_state["replica"]["optimizer"],
        "clock": int(peer_state["strategy"]["clocks"][bound.channel.rank]),
    }
    return {**peer_state, "replica": {**peer_state["replica"], **kept_state}}


def _is_set(value: Any) -> bool:
    return bool(value.any()) if torch.is_tensor(value) else bool(value)


class Pace:
    """A high quantile of this member's latest round times. Among more than 20, a single outlier (a process
    stopped for a while) does not raise it."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._last_tick: float | None = None
        self._rounds = 0

    def tick(self) -> float | None:
        """Call it at the end of each round: returns the quantile in seconds after every
        ``_ROUNDS_PER_RESULT`` rounds, else None."""
        now = time.monotonic()
        if self._last_tick is not None:
            self._times.append(now - self._last_tick)
        self._last_tick = now
        self._rounds += 1
        if self._rounds % _ROUNDS_PER_RESULT:
            return None
        return sorted(self._times)[int(_QUANTILE * len(self._times))]
