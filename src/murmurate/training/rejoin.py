"""How a member that was started again comes in: with the state of a living peer, never an initial one.

The launcher requests a state transfer in the run state (``HandOver``): from a donor to a joiner. The donor
writes what it has learned between two of its steps, and the joiner, which was built meanwhile and waits,
takes it. Members with common rounds admit the joiner at one and the same round; the others when they see that
it has entered.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from murmurate.fabric.interface import Capability
from murmurate.fabric.processes.membership import Membership
from murmurate.fabric.processes.run_state import HandOver
from murmurate.replica.optimizer_state import entries
from murmurate.replicator.replicator import BoundReplica, Replicator
from murmurate.training.checkpoint import read_part, write_part

_POLL_SECONDS = 0.002
_KEPT, _EVERY = 128, 8
_QUANTILE = 0.95


class NotLetIn(Exception):
    """The run ended before this joiner was in it."""


class Admission(Protocol):
    """A fabric that lets in members that were started again (see ``ProcessFabric``)."""

    membership: Membership

    def admit(self, rank: int, incarnation: int) -> None: ...
    def place(self, partners: Sequence[int]) -> dict[str, Any]: ...
    def enter(self, place: dict[str, Any]) -> None: ...


class Doorway:
    """One member's side of letting others in, and of coming in itself."""

    def __init__(self, admission: Admission, replicator: Replicator, folder: Path) -> None:
        self.admission, self.replicator, self.folder = admission, replicator, folder
        self.membership, self.run_state = admission.membership, admission.membership.run_state
        self.rank = self.membership.rank
        self.handed = 0  # the newest hand-over seen to, packed

    def welcome(self) -> None:
        """Between two steps of members without common rounds: let in those that have entered."""
        for rank in self.membership.newcomers():
            self.admission.admit(rank, self.run_state.incarnation(rank))
            self.replicator.joined(rank)

    def attend(self, gift: Callable[[], dict[str, Any]]) -> None:
        """As ``welcome``; and give ``gift()``, if it is asked for, to one that has not entered yet.

        Raises RunFailed when the disk is full.
        """
        self.welcome()
        if self.run_state.hand_over > self.handed:
            self.handed = self.run_state.hand_over
            asked = HandOver.unpack(self.handed)
            if asked.donor == self.rank:
                self._give(asked, gift(), self.membership.living())

    def admit_together(
        self, hand_over: int, meet: Callable[[], Sequence[int]], gift: Callable[[], dict[str, Any]]
    ) -> None:
        """All members are here at one round, with the same ``hand_over``: the joiner takes part from the
        next round on. ``meet`` is a round of its own, and says who came to it."""
        if hand_over <= self.handed:
            return
        self.handed = hand_over
        asked = HandOver.unpack(hand_over)
        # whoever has passed this knows that the joiner's former incarnation took no part in it
        partners = meet()
        if asked.donor == self.rank:
            self._give(asked, gift(), partners)
        self.admission.admit(asked.joiner, asked.incarnation)
        self.replicator.joined(asked.joiner)

    def _give(self, asked: HandOver, gift: dict[str, Any], partners: Sequence[int]) -> None:
        where = _folder_of(self.folder, asked.number)
        write_part(where, self.rank, gift | {"place": self.admission.place(partners)})
        self.run_state.gave(self.rank, asked.number)

    def take(self) -> dict[str, Any]:
        """Say that this joiner is ready, and wait for what is handed to it.

        Raises NotLetIn if the run stops first. Whether it waits in vain is the launcher's to see: it asks
        another donor, or ends this process.
        """
        self.run_state.ready(self.rank)
        me = self.rank, self.run_state.incarnation(self.rank)
        while not self.run_state.stop_requested:
            self.run_state.beat(self.rank)
            asked = HandOver.unpack(self.run_state.hand_over)
            if (asked.joiner, asked.incarnation) == me and self.run_state.has_given(
                asked.donor, asked.number
            ):
                self.handed = asked.packed()
                where = _folder_of(self.folder, asked.number)
                gift = read_part(where, asked.donor)
                shutil.rmtree(where, ignore_errors=True)
                return gift
            time.sleep(_POLL_SECONDS)
        raise NotLetIn

    def enter(self, gift: dict[str, Any]) -> None:
        """What was given is loaded: take part, and show it."""
        self.admission.enter(gift["place"])
        self.replicator.entered()
        self.replicator.publish()
        self.run_state.saved(self.rank, int(gift["answered"]))
        self.run_state.enter(self.rank)


def _folder_of(folder: Path, number: int) -> Path:
    """Where the state of hand-over ``number`` lies while it is on its way."""
    return folder / "checkpoints" / f".staging-hand-over-{number}"


def adopted(replicator: Replicator, theirs: dict[str, Any]) -> dict[str, Any]:
    """A peer's ``Replicator.state()`` as this member loads it, which joins or was lent it by a checkpoint.

    What lies in memory that all share has gone on since the peer wrote, and is kept as it is; there the
    clock, too, goes on from this rank's own count in ``clocks``, which others add up.
    """
    if Capability.SHARED_MEMORY not in replicator.strategy.needs:
        return theirs
    return {name: _but_shared(bond, theirs[name]) for name, bond in replicator.bonds.items()}


def _but_shared(bond: BoundReplica, theirs: dict[str, Any]) -> dict[str, Any]:
    replica = bond.replica
    present = {
        f"{index}.{key}": value
        for index, (_, memory) in enumerate(entries(replica.optimizer))
        for key, value in memory.items()
    }
    kept = {
        "params": None,
        # moments exist before the first step only where they are shared; zeros are of a node that begins anew
        "optimizer": present if any(map(_is_used, present.values())) else theirs["replica"]["optimizer"],
        "clock": int(theirs["strategy"]["clocks"][bond.channel.rank]),
    }
    return {**theirs, "replica": {**theirs["replica"], **kept}}


def _is_used(memory: Any) -> bool:
    return bool(memory.any()) if torch.is_tensor(memory) else bool(memory)


class Pace:
    """A high quantile of this member's latest round times; one outlier, as a pause by a signal, is none."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._last: float | None = None
        self._turn = 0

    def tick(self) -> float | None:
        """At the end of each round: seconds, now and then; None in between."""
        now = time.monotonic()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now
        self._turn += 1
        if self._turn % _EVERY or len(self._times) < _EVERY - 1:
            return None
        ordered = sorted(self._times)
        return ordered[min(int(_QUANTILE * len(ordered)), len(ordered) - 1)]
