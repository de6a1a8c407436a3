"""The simulated fabric: all members in one process, with repeatable asynchrony, virtual time and faults.

It serves unit tests, tests of invariants under hundreds of schedules, and simulations of clusters larger than
the machine. The schedule's seed alone determines a run, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from murmurate.fabric.interface import Capability, Fabric, FabricError, checked_group, checked_rank
from murmurate.fabric.simulated.channel import ChannelState, SimulatedChannel
from murmurate.fabric.simulated.collectives import SimulatedCollectives
from murmurate.fabric.simulated.coroutines import CoroutineKind
from murmurate.fabric.simulated.latency import Network
from murmurate.fabric.simulated.mailbox import MailFaults, SimulatedMailbox
from murmurate.fabric.simulated.network_model import Event, FabricState, Latency, Links, Partition
from murmurate.fabric.simulated.register import SimulatedRegister
from murmurate.fabric.simulated.scheduler import Crashed, Scheduler, Stopped

__all__ = [
    "Crashed",
    "Event",
    "Latency",
    "MailFaults",
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
    """``size`` members in one process; ``seed`` determines the schedule, the delays and the faults.

    All seconds are virtual. ``crashes`` gives, by rank, the fabric call (from 1 up) at which the rank dies;
    ``crash_seconds`` the time. ``absent`` ranks are dead until ``revive``. Every fabric call adds
    ``call_seconds`` to the clock of all members, or with ``own_clocks`` to the caller's (see ``Scheduler``),
    so that polling makes time pass. ``keep_log=False`` saves memory in long runs. ``coroutines`` are
    greenlets; or threads, of which one runs at a time, if collectives are called inside a backward pass.

    ``mail_capacity`` is the most unread messages of one sender under one tag, ``mail_deadline_seconds`` the
    deadline of a send that gives none, ``collective_deadline_seconds`` that of collectives and of shared
    memory. ``capabilities``: the protocols that channels offer.

    Without a ``network``, messages take the ``latency`` alone, and collectives take no time. With one, a
    gather takes as long as a mean; a broadcast takes no time. Shared memory takes no time in either case.
    ``wait_newer`` does not wait for a member that ``has_finished``, though its last vector may still come.
    Partitions delay collectives. The network's loss applies to the register and to collectives,
    ``mail_faults`` to mail. Raises ``ValueError`` for a size below 1, for ranks that are not members, and for
    ``own_clocks`` with ``call_seconds`` of 0.
    """

    size: int
    seed: int
    _: KW_ONLY
    latency: Latency = 0.0
    crashes: Mapping[int, int] = field(default_factory=dict)
    crash_seconds: Mapping[int, float] = field(default_factory=dict)
    partitions: Sequence[Partition] = ()
    mail_faults: MailFaults = field(default_factory=MailFaults)
    mail_capacity: int = 64
    mail_deadline_seconds: float = 1.0
    collective_deadline_seconds: float = math.inf
    call_seconds: float = 1e-6
    capabilities: frozenset[Capability] = frozenset(Capability)
    keep_log: bool = True
    network: Network | None = None
    absent: Collection[int] = ()
    own_clocks: bool = False
    coroutines: CoroutineKind = "greenlets"
    has_finished: Callable[[int], bool] = lambda rank: False

    def __post_init__(self) -> None:
        cut = {rank for partition in self.partitions for rank in partition.ranks}
        self._check_ranks({*self.crashes, *self.crash_seconds, *self.absent} | cut)
        if self.own_clocks and not self.call_seconds > 0:
            raise ValueError("With own clocks a call must take time: give call_seconds above 0.")
        seeds = np.random.SeedSequence(self.seed).spawn(2)
        schedule_generator, link_generator = (np.random.default_rng(s) for s in seeds)
        self._scheduler = Scheduler(
            self.size,
            schedule_generator,
            self.call_seconds,
            self.crashes,
            self.crash_seconds,
            self._on_crash,
            self.absent,
            self.own_clocks,
            self.coroutines,
        )
        links = Links(self.size, link_generator, self.latency, list(self.partitions), self.network)
        self._state = FabricState(
            self.size, self._scheduler, links, [] if self.keep_log else None, self.has_finished
        )
        self._channels: dict[tuple[str, tuple[int, ...]], ChannelState] = {}

    @property
    def log(self) -> list[Event]:
        """All events so far, in order; empty with ``keep_log=False``."""
        return self._state.log or []

    @property
    def virtual_seconds(self) -> float:
        return self._scheduler.now

    def member(self, rank: int) -> Member:
        """The fabric of one rank, which may be used only inside ``run``."""
        return Member(self, checked_rank(rank, self.size))

    def run(self, functions: Sequence[Callable[[Member], T]]) -> list[T | Crashed]:
        """Run ``functions[rank]`` as rank ``rank``, all to their end; returns their results by rank.

        The result of a rank that crashed is its ``Crashed``. The function of an absent rank is not called;
        its result is that of the role given to ``revive``, or None. Any other error of a function stops the
        rest, and is raised here; so is ``FabricError`` at a deadlock, with what each member waits for. Raises
        ``ValueError`` if there is not one function for each rank.
        """
        if len(functions) != self.size:
            raise ValueError(f"{len(functions)} functions for {self.size} members: give one each.")
        members = [self.member(rank) for rank in range(self.size)]
        roles = [functools.partial(f, member) for f, member in zip(functions, members, strict=True)]
        return self._scheduler.run(roles)

    # -- events, caused from outside or by any member -----------------------------------------------

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` at a virtual time, if any member still runs then.

        ``act`` must not call a ``Member`` or a channel; it may cause the events of this section.
        """
        self._scheduler.at(seconds, act)

    def crash(self, rank: int) -> None:
        """End ``rank`` as SIGKILL would, unless it has ended already."""
        self._scheduler.kill(rank)

    def pause(self, rank: int, seconds: float) -> None:
        """Stop ``rank``, as SIGSTOP would, for ``seconds`` from its next wait or ``compute`` on."""
        self._scheduler.add_work(rank, seconds)

    def cut(self, partition: Partition) -> None:
        """Add ``partition``, which says which links are cut, and when.

        Raises ``ValueError`` for ranks that do not exist.
        """
        self._check_ranks(partition.ranks)
        self._state.links.partitions.append(partition)

    def revive(self, rank: int, role: Callable[[Member], Any], like: int) -> None:
        """Start a dead or absent rank, which is alone (see ``Member``) until ``Member.join``.

        Collectives include it from now on: the first one that it calls is matched with the next one of rank
        ``like``. So, under strategies that use collectives, call this when all living members have called the
        same number of collectives. Raises ``ValueError`` if the rank is alive, or does not exist.
        """
        member = self.member(rank)
        self._scheduler.revive(rank, functools.partial(role, member))
        member.alone = True
        self._state.record(rank, "return")
        for channel in self._channels.values():
            channel.mailbox.on_revival(rank)
            channel.collectives.on_revival(rank, like)

    @property
    def living(self) -> Sequence[int]:
        return self._scheduler.living()

    def _check_ranks(self, named: set[int]) -> None:
        if self.size < 1 or not named <= set(range(self.size)):
            raise ValueError(
                f"The size is {self.size}, and ranks {sorted(named)} are named: the size must be at least 1, "
                "and ranks from 0 to below it."
            )

    def _open(self, name: str, like: Tensor, group: tuple[int, ...]) -> ChannelState:
        # the label also distinguishes the scheduler's topics (see ``Wait``), so each group needs its own
        label = name if len(group) == self.size else f"{name} of {list(group)}"
        mailbox = SimulatedMailbox(
            self._state, label, self.mail_faults, self.mail_capacity, self.mail_deadline_seconds
        )
        collectives = SimulatedCollectives(self._state, label, self.collective_deadline_seconds, group)
        registers = {rank: SimulatedRegister(rank) for rank in group}
        return ChannelState(label, like.shape, like.dtype, group, mailbox, collectives, registers)

    def _on_crash(self, rank: int) -> None:
        self._state.record(rank, "crash")
        for channel in self._channels.values():
            channel.mailbox.on_crash(rank)


class Member:
    """One member's ``Fabric``, which can also let virtual time pass and write into the fabric's log.

    While it is ``alone``, its collectives involve no other member. exchanging_seconds: virtual time spent on
    transfers, without the time spent waiting for other members.
    """

    def __init__(self, fabric: SimulatedFabric, rank: int) -> None:
        self._fabric, self.rank, self.size, self.capabilities = fabric, rank, fabric.size, fabric.capabilities
        self.alone = False
        self.exchanging_seconds = 0.0

    def living(self) -> Sequence[int]:
        self._fabric._scheduler.turn(self.rank)
        return self._fabric._scheduler.living()

    @property
    def now(self) -> float:
        """The virtual time; reading it is not a fabric call."""
        return self._fabric.virtual_seconds

    def join(self) -> None:
        """From now on, this member's collectives are with all members."""
        self.alone = False

    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> SimulatedChannel:
        fabric, group = self._fabric, checked_group(members, self.rank, self.size)
        if (name, group) not in fabric._channels:
            fabric._channels[name, group] = fabric._open(name, like, group)
        state = fabric._channels[name, group]
        if (state.shape, state.dtype) != (like.shape, like.dtype):
            raise FabricError(
                f"Rank {self.rank} makes channel '{name}' for {like.dtype} {list(like.shape)}, others made "
                f"it for {state.dtype} {list(state.shape)}: give all members the same model."
            )
        return SimulatedChannel(
            self, fabric._state, state, fabric.capabilities, fabric.collective_deadline_seconds
        )

    def compute(self, seconds: float) -> None:
        """Be busy for ``seconds`` of virtual time, while other members run. It counts as a fabric call."""
        scheduler = self._fabric._scheduler
        scheduler.turn(self.rank)
        scheduler.sleep(self.rank, seconds)

    def note(self, kind: str, value: Any = None) -> None:
        """Write an event (an update, a mix) into the log; it is not a fabric call."""
        self._fabric._state.record(self.rank, kind, detail=value)


def run_members(
    size: int, functions: Sequence[Callable[[Fabric], Any]], deadline_seconds: float = 60.0
) -> list[Any]:
    """Run each member's function on a fabric without delays or faults; returns their results, by rank."""
    fabric = SimulatedFabric(
        size, seed=0, mail_deadline_seconds=deadline_seconds, collective_deadline_seconds=deadline_seconds
    )
    return fabric.run(functions)
