"""All four protocols on threads that pass one scheduler: repeatable asynchrony, virtual time, faults.

For unit tests, for laws under hundreds of schedules, and for clusters larger than the machine. What
happens is a function of the schedule seed alone: bit for bit the same in every run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Fabric, FabricError, checked_group
from murmurate.fabric.simulated.channel import Shared, SimulatedChannel
from murmurate.fabric.simulated.collectives import SimulatedCollectives
from murmurate.fabric.simulated.coroutines import Kind
from murmurate.fabric.simulated.latency import Network
from murmurate.fabric.simulated.mailbox import Faults, SimulatedMailbox
from murmurate.fabric.simulated.network_model import Event, Latency, Links, Partition, World
from murmurate.fabric.simulated.register import SimulatedRegister
from murmurate.fabric.simulated.scheduler import Crashed, Scheduler, Stopped

__all__ = [
    "Crashed",
    "Event",
    "Faults",
    "Latency",
    "Member",
    "Network",
    "Partition",
    "SimulatedFabric",
    "Stopped",
    "run_members",
]

T = TypeVar("T")


@dataclass(eq=False)
class SimulatedFabric:
    """``size`` members in one process; ``seed`` picks the schedule, the delays and the faults.

    All seconds are virtual. ``crashes`` ends a rank instead of its k-th fabric call (from 1 up),
    ``crash_seconds`` at a time; ``absent`` ranks are dead until ``revive``. ``call_seconds`` is what every
    fabric call adds to everybody's clock, or with ``own_clocks`` to the caller's (see ``Scheduler``), so that
    polling makes time pass. ``keep_log=False`` saves memory in long runs. ``contexts`` are greenlets, or
    threads (of which one runs at a time) where collectives are called inside a backward pass.

    Without a ``network`` the ``latency`` is all that messages take; collectives take no time then. Shared
    memory never does. Partitions hold collectives up. The network's loss is that of the register and of
    collectives; ``mail_faults`` are the mail's. Raises ``ValueError`` for a size below 1, for ranks that are
    not members, and for own clocks that calls do not move on.
    """

    size: int
    seed: int
    latency: Latency = field(default=0.0, kw_only=True)
    crashes: Mapping[int, int] = field(default_factory=dict, kw_only=True)
    crash_seconds: Mapping[int, float] = field(default_factory=dict, kw_only=True)
    partitions: Sequence[Partition] = field(default=(), kw_only=True)
    mail_faults: Faults = field(default_factory=Faults, kw_only=True)
    mail_capacity: int = field(default=64, kw_only=True)
    mail_deadline_seconds: float = field(default=1.0, kw_only=True)
    collective_deadline_seconds: float = field(default=math.inf, kw_only=True)
    call_seconds: float = field(default=1e-6, kw_only=True)
    capabilities: frozenset[Capability] = field(default=frozenset(Capability), kw_only=True)
    keep_log: bool = field(default=True, kw_only=True)
    network: Network | None = field(default=None, kw_only=True)
    absent: Collection[int] = field(default=(), kw_only=True)
    own_clocks: bool = field(default=False, kw_only=True)
    contexts: Kind = field(default="greenlets", kw_only=True)

    def __post_init__(self) -> None:
        cut = {rank for partition in self.partitions for rank in partition.ranks}
        named = {*self.crashes, *self.crash_seconds, *self.absent} | cut
        if self.size < 1 or not named <= set(range(self.size)):
            raise ValueError(f"Ranks {sorted(named)} of {self.size} members: need size >= 1, ranks below it.")
        if self.own_clocks and not self.call_seconds > 0:
            raise ValueError("With own clocks a call must take time: give call_seconds above 0.")
        schedule, links = (np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(2))
        self._scheduler = Scheduler(
            self.size,
            schedule,
            self.call_seconds,
            self.crashes,
            self.crash_seconds,
            self._on_crash,
            self.absent,
            self.own_clocks,
            self.contexts,
        )
        around = Links(self.size, links, self.latency, list(self.partitions), self.network)
        self._world = World(self.size, self._scheduler, around, [] if self.keep_log else None)
        self._channels: dict[tuple[str, tuple[int, ...]], Shared] = {}

    @property
    def log(self) -> list[Event]:
        """All that happened so far, in order; empty with ``keep_log=False``."""
        return self._world.log or []

    @property
    def virtual_seconds(self) -> float:
        return self._scheduler.now

    def member(self, rank: int) -> Member:
        """What rank ``rank`` has of this fabric; to be used inside ``run`` only."""
        if not 0 <= rank < self.size:
            raise ValueError(f"There is no rank {rank} among {self.size}: use 0..{self.size - 1}.")
        return Member(self, rank)

    def run(self, functions: Sequence[Callable[[Member], T]]) -> list[T | Crashed]:
        """Run ``functions[rank]`` as rank ``rank``, all to their end; the result of each by rank.

        A rank that was told to crash gives its ``Crashed``. Raises the first other error of a function
        after stopping the rest, and ``FabricError`` saying who waits for what when nobody can go on.
        """
        if len(functions) != self.size:
            raise ValueError(f"{len(functions)} functions for {self.size} members: give one each.")
        members = [self.member(rank) for rank in range(self.size)]
        roles = [functools.partial(f, member) for f, member in zip(functions, members, strict=True)]
        return self._scheduler.run(roles)

    # -- what happens to members, from outside or from within any of them ---------------------------

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Have ``act`` called at a virtual time, if anybody still runs then. It makes no fabric call."""
        self._scheduler.at(seconds, act)

    def crash(self, rank: int) -> None:
        """End ``rank`` as SIGKILL would, unless it has ended."""
        self._scheduler.kill(rank)

    def pause(self, rank: int, seconds: float) -> None:
        """Have ``rank`` do nothing for so long, from its next wait or work on, as SIGSTOP would."""
        self._scheduler.owe(rank, seconds)

    def cut(self, partition: Partition) -> None:
        """Add a partition."""
        self._world.links.partitions.append(partition)

    def revive(self, rank: int, role: Callable[[Member], Any], like: int) -> None:
        """A dead or absent rank begins anew, alone (see ``SimulatedChannel``) until ``Member.join``.

        Collectives count it from now on, and its next is the one that ``like`` calls next: under strategies
        that have some, this is to be called while all living are between the same two.
        Raises ``ValueError`` if it lives.
        """
        member = self.member(rank)
        self._scheduler.revive(rank, functools.partial(role, member))
        member.alone = True
        self._world.record(rank, "return")
        for shared in self._channels.values():
            shared.mailbox.on_return(rank)
            shared.collectives.on_return(rank, like)

    @property
    def living(self) -> Sequence[int]:
        return self._scheduler.living()

    def _open(self, name: str, shape: torch.Size, group: tuple[int, ...]) -> Shared:
        # what waits on a channel waits under its name
        label = name if len(group) == self.size else f"{name} of {list(group)}"
        mailbox = SimulatedMailbox(
            self._world, label, self.mail_faults, self.mail_capacity, self.mail_deadline_seconds
        )
        collectives = SimulatedCollectives(self._world, label, self.collective_deadline_seconds, group)
        return Shared(
            label, shape, group, mailbox, collectives, {rank: SimulatedRegister(rank) for rank in group}
        )

    def _on_crash(self, rank: int) -> None:
        self._world.record(rank, "crash")
        for shared in self._channels.values():
            shared.mailbox.on_crash(rank)


class Member:
    """A ``Fabric`` that can also let virtual time pass and write into the log."""

    def __init__(self, fabric: SimulatedFabric, rank: int) -> None:
        self._fabric, self._rank = fabric, rank
        self.alone = False
        self.exchanging_seconds = 0.0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._fabric.size

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self._fabric.capabilities

    def living(self) -> Sequence[int]:
        self._fabric._scheduler.turn(self._rank)
        return self._fabric._scheduler.living()

    @property
    def now(self) -> float:
        """The virtual time; no fabric call."""
        return self._fabric.virtual_seconds

    def join(self) -> None:
        """End of being alone: collectives are with all from now on."""
        self.alone = False

    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> SimulatedChannel:
        fabric, group = self._fabric, checked_group(members, self._rank, self.size)
        if (name, group) not in fabric._channels:
            fabric._channels[name, group] = fabric._open(name, like.shape, group)
        shared = fabric._channels[name, group]
        if shared.shape != like.shape:
            raise FabricError(
                f"Rank {self.rank} wants channel '{name}' for {list(like.shape)}, others have it for "
                f"{list(shared.shape)}: give all members the same model."
            )
        return SimulatedChannel(
            self, fabric._world, shared, fabric.capabilities, fabric.collective_deadline_seconds
        )

    def compute(self, seconds: float) -> None:
        """Be busy for ``seconds`` of virtual time, in which the others go on. Counts as a fabric call."""
        scheduler = self._fabric._scheduler
        scheduler.turn(self._rank)
        scheduler.sleep(self._rank, seconds)

    def note(self, kind: str, value: Any = None) -> None:
        """Put an event of one's own (an update, a mix) into the log, in order; no fabric call."""
        self._fabric._world.record(self._rank, kind, detail=value)


def run_members(
    size: int, functions: Sequence[Callable[[Fabric], Any]], deadline_seconds: float = 60.0
) -> list[Any]:
    """Run one function a member on a fabric without delays or faults; their results, by rank."""
    fabric = SimulatedFabric(
        size, seed=0, mail_deadline_seconds=deadline_seconds, collective_deadline_seconds=deadline_seconds
    )
    return fabric.run(functions)
