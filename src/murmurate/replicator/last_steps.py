"""Which replicas of a script have ended, after how many steps; warns of one that ends before the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from murmurate.fabric.interface import Capability, Channel, Fabric, FabricError
from murmurate.strategies.reply import require_centre


class LastSteps:
    """Each member publishes its number of steps when it has ended. All make this object at one point of the
    script.

    replicas: their number, without a centre. common_rounds: whether the replicas wait for one another.
    Without a register on ``fabric`` nothing is known of the others.
    """

    def __init__(self, fabric: Fabric, replicas: int, common_rounds: bool) -> None:
        self._fabric, self._replicas, self._common_rounds = fabric, replicas, common_rounds
        self.channel: Channel | None = None
        if Capability.REGISTER in fabric.capabilities:
            self.channel = fabric.channel("ends", torch.zeros(1, dtype=torch.float64))
        self._steps = 0
        self._told: set[int] = set()

    def publish(self) -> None:
        """Publish that this member has ended; warn if others ended after another number of steps."""
        if self.channel is not None:
            self.channel.publish(torch.tensor([self._steps], dtype=torch.float64))
            self._compare(self.channel)

    def _compare(self, channel: Channel) -> None:
        """Warn of another number of steps, unless a lower rank that ended after the same number may warn."""
        rank = self._fabric.rank
        if not self._common_rounds or rank >= self._replicas:
            return
        ended = self.ended(set(range(self._replicas)) - self._told - {rank})
        steps = {r: int(channel.peek(r)[0]) for r in ended}
        differing = {r: n for r, n in steps.items() if n != self._steps}
        if differing and not any(r < rank for r in steps.keys() - differing.keys()):
            other, made = min(differing.items())
            warnings.warn(
                f"replica {rank} made {self._steps} steps, and replica {other} made {made}: after the step "
                "that one of them left out, they exchanged updates from different batches. Call step() "
                "equally often on all replicas.",
                stacklevel=5,
            )

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that have published their end."""
        return [] if self.channel is None else [r for r in ranks if self.channel.version(r) > 0]

    def all_ended(self) -> bool:
        """Whether all other members have ended or are lost."""
        channel = self.channel
        return channel is None or all(channel.version(r) > 0 or channel.has_lost(r) for r in self._others())

    def wait(self, deadline_seconds: float) -> bool:
        """Wait for the others' ends; False if a living member did not end in time."""
        others = self._others()
        return self.channel is None or self.channel.wait_newer(others, [0] * len(others), deadline_seconds)

    def require_register(self) -> None:
        """Raise FabricError if nothing is known of the others."""
        if self.channel is None:
            raise FabricError("a centre needs a register, to learn that the others have ended")

    def warn_if_stepped(self, message: str) -> None:
        """At a centre, when all have ended: warn of ``message``, unless it is empty or no replica stepped."""
        channel = self.channel
        ended = self.ended(range(self._replicas)) if message else []
        if channel is not None and any(channel.peek(rank)[0].any() for rank in ended):
            warnings.warn(message, stacklevel=5)

    def require_centre(self) -> None:
        """Raise FabricError if the centre, which is the last rank, was lost before it ended."""
        if self.channel is not None and not self.ended([self._replicas]):
            require_centre(self.channel, "the updates that it had not applied yet")

    def step(self) -> None:
        """After a step: warn of replicas that returned after fewer steps, as their batches are missing from
        the others' rounds. One of the others warns, once for each."""
        self._steps += 1
        living = self._fabric.living() if self._common_rounds else ()
        if self.channel is None or len(living) in (0, self._replicas):
            return
        gone = self.ended(set(range(self._replicas)) - self._told - set(living))
        steps = {r: n for r in gone if (n := int(self.channel.peek(r)[0])) < self._steps}
        self._told |= steps.keys()
        if steps and self._fabric.rank == min(living):
            early = " and ".join(f"replica {r} after {n} steps" for r, n in steps.items())
            warnings.warn(
                f"{early} returned from main, and the others go on without its batches. Loop over "
                "replicator.inputs(...), under which all replicas end together.",
                stacklevel=6,
            )

    def _others(self) -> list[int]:
        return [r for r in range(self._fabric.size) if r != self._fabric.rank]
