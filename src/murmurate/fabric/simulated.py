"""All four protocols on threads that pass one baton: repeatable asynchrony, virtual time, faults.

For unit tests, for laws under hundreds of schedules, and for clusters larger than the machine. What
happens is a function of the schedule seed alone: bit for bit the same in every run.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from murmurate.fabric._baton import Baton, Crashed, Stopped, Wait
from murmurate.fabric._meeting import Meeting, Round
from murmurate.fabric._post import Faults, Post
from murmurate.fabric._slot import Slot
from murmurate.fabric._world import Event, Latency, Links, Partition, World
from murmurate.fabric.interface import Capability, FabricError, FabricFactory, Letter, Traffic
from murmurate.fabric.threads import ordered_mean

__all__ = [
    "Crashed",
    "Event",
    "Faults",
    "Latency",
    "Member",
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
    ``crash_seconds`` at a time. ``call_seconds`` is what every fabric call adds to everybody's clock, so
    that polling makes time pass. ``keep_log=False`` saves memory in long runs.

    Collectives and shared memory take no time and are never lost; partitions hold collectives up.
    Raises ``ValueError`` for a size below 1 or for ranks that are not members.
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

    def __post_init__(self) -> None:
        named = {
            *self.crashes,
            *self.crash_seconds,
            *(r for p in self.partitions for ij in p.pairs for r in ij),
        }
        if self.size < 1 or not named <= set(range(self.size)):
            raise ValueError(f"Ranks {sorted(named)} of {self.size} members: need size >= 1, ranks below it.")
        schedule, links = (np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(2))
        self._baton = Baton(
            self.size, schedule, self.call_seconds, self.crashes, self.crash_seconds, self._on_crash
        )
        around = Links(self.size, links, self.latency, self.partitions)
        self._world = World(self.size, self._baton, around, [] if self.keep_log else None)
        self._channels: dict[str, _Shared] = {}

    @property
    def log(self) -> list[Event]:
        """All that happened so far, in order; empty with ``keep_log=False``."""
        return self._world.log or []

    @property
    def virtual_seconds(self) -> float:
        return self._baton.now

    def member(self, rank: int) -> Member:
        """Rank ``rank``'s door to this fabric; to be used inside ``run`` only."""
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
        doors = [self.member(rank) for rank in range(self.size)]
        roles = [functools.partial(f, door) for f, door in zip(functions, doors, strict=True)]
        return self._baton.run(roles)

    def _open(self, name: str, shape: torch.Size) -> _Shared:
        post = Post(self._world, name, self.mail_faults, self.mail_capacity, self.mail_deadline_seconds)
        meeting = Meeting(self._world, name, self.collective_deadline_seconds)
        return _Shared(name, shape, post, meeting, [Slot(self.size) for _ in range(self.size)])

    def _on_crash(self, rank: int) -> None:
        self._world.record(rank, "crash")
        for shared in self._channels.values():
            shared.post.on_crash(rank)


class Member:
    """A ``FabricFactory`` that can also let virtual time pass and write into the log."""

    def __init__(self, fabric: SimulatedFabric, rank: int) -> None:
        self._fabric, self._rank = fabric, rank

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
        self._fabric._baton.turn(self._rank)
        return self._fabric._baton.living()

    def channel(self, name: str, like: Tensor) -> Channel:
        fabric = self._fabric
        if name not in fabric._channels:
            fabric._channels[name] = fabric._open(name, like.shape)
        shared = fabric._channels[name]
        if shared.shape != like.shape:
            raise FabricError(
                f"Rank {self.rank} wants channel '{name}' for {list(like.shape)}, others have it for "
                f"{list(shared.shape)}: give all members the same model."
            )
        return Channel(fabric, shared, self._rank)

    def compute(self, seconds: float) -> None:
        """Be busy for ``seconds`` of virtual time, in which the others go on. Counts as a fabric call."""
        baton = self._fabric._baton
        baton.turn(self._rank)
        end = baton.now + seconds
        topic = ("compute", self._rank)
        baton.wait(self._rank, Wait(topic, lambda: baton.now >= end, lambda: "its work", wake_at=lambda: end))

    def note(self, kind: str, value: Any = None) -> None:
        """Put an event of one's own (an update, a mix) into the log, in order; no fabric call."""
        self._fabric._world.record(self._rank, kind, detail=value)


@dataclass(eq=False)
class _Shared:
    """What all members of one channel have in common."""

    name: str
    shape: torch.Size
    post: Post
    meeting: Meeting
    slots: list[Slot]
    memory: dict[str, Tensor] = field(default_factory=dict)


class Channel:
    """One member's ``Fabric``. Every verb is one turn: others may run before it, none during it."""

    def __init__(self, fabric: SimulatedFabric, shared: _Shared, rank: int) -> None:
        self._fabric, self._shared, self._rank = fabric, shared, rank
        self._baton, self._world = fabric._baton, fabric._world
        self.traffic = Traffic()

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
        self._baton.turn(self._rank)
        return self._baton.living()

    # -- Collective -------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        here = self._meet("mean", x)
        if here.mean is None:
            here.mean = ordered_mean({rank: here.given[rank] for rank in here.members})
        x.detach().copy_(here.mean)
        return len(here.members)

    def broadcast_(self, x: Tensor, root: int) -> None:
        self._among(root)
        x.detach().copy_(self._meet("broadcast", x, root).given[root])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        here = self._meet("gather", x)
        return {rank: here.given[rank].clone() for rank in here.members}

    def _meet(self, kind: str, x: Tensor, root: int | None = None) -> Round:
        self._turn(Capability.COLLECTIVE)
        with self._waiting():
            here = self._shared.meeting.meet(self._rank, kind, x, root)
        self.traffic.bytes += x.nbytes * (1 + len(here.members or (root,)))
        return here

    # -- Mail -------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        self._turn(Capability.MAIL)
        with self._waiting():
            sent = self._shared.post.send(self._rank, self._among(to), tag, x, note, deadline_seconds)
        self.traffic.bytes += x.nbytes * sent
        return sent

    def receive(self, tag: str) -> Letter | None:
        self._turn(Capability.MAIL)
        return self._count(self._shared.post.receive(self._rank, tag))

    def wait(self, tag: str, deadline_seconds: float) -> Letter | None:
        self._turn(Capability.MAIL)
        with self._waiting():
            letter = self._shared.post.wait(self._rank, tag, deadline_seconds)
        return self._count(letter)

    def _count(self, letter: Letter | None) -> Letter | None:
        self.traffic.bytes += letter.x.nbytes if letter else 0
        return letter

    # -- Register ---------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        self._turn(Capability.REGISTER)
        if x.shape != self._shared.shape:
            raise ValueError(
                f"Channel '{self._shared.name}' is for {list(self._shared.shape)}, this is {list(x.shape)}."
            )
        now, arrivals = self._baton.now, self._world.links.arrivals(self._rank, self._baton.now)
        version = self._shared.slots[self._rank].put(x, now, arrivals)
        self.traffic.bytes += x.nbytes
        self._world.record(self._rank, "publish", self._shared.name, version=version)
        self._baton.touch((self._shared.name, "register"))
        return version

    def version(self, peer: int) -> int:
        self._turn(Capability.REGISTER)
        return self._shared.slots[self._among(peer)].newest(self._rank, self._baton.now)[0]

    def peek(self, peer: int) -> tuple[Tensor, int]:
        self._turn(Capability.REGISTER)
        version, x = self._shared.slots[self._among(peer)].newest(self._rank, self._baton.now)
        if x is None:
            raise FabricError(
                f"Nothing that rank {peer} published on '{self._shared.name}' has reached rank {self._rank}: "
                "ask version first, or wait_newer."
            )
        self._world.record(self._rank, "peek", self._shared.name, peer, version)
        self.traffic.bytes += x.nbytes
        return x, version

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        self._turn(Capability.REGISTER)
        asked = {self._among(peer): version for peer, version in zip(peers, seen, strict=True)}
        slots, baton = self._shared.slots, self._baton

        def missing() -> list[int]:
            alive = [peer for peer in asked if peer not in baton.dead]
            return [peer for peer in alive if slots[peer].newest(self._rank, baton.now)[0] <= asked[peer]]

        def next_arrival() -> float:
            return min((slots[p].next_arrival(self._rank, baton.now) for p in asked), default=math.inf)

        wait = Wait(
            topic=(self._shared.name, "register"),
            ready=lambda: not missing(),
            words=lambda: f"a newer version of {missing()}",
            deadline_seconds=deadline_seconds,
            wake_at=lambda: min(
                (slots[p].next_arrival(self._rank, baton.now) for p in asked), default=math.inf
            ),
        )
        return baton.wait(self._rank, wait)

    # -- SharedMemory -----------------------------------------------------------------------------

    def shared(self, key: str, like: Tensor) -> Tensor:
        self._turn(Capability.SHARED_MEMORY)
        memory, topic = self._shared.memory, (self._shared.name, "memory")
        wait = Wait(
            topic=topic,
            ready=lambda: key in memory or self._baton.living()[0] == self._rank,
            words=lambda: f"rank {self._baton.living()[0]} to share '{key}'",
            deadline_seconds=self._fabric.collective_deadline_seconds,
        )
        if not self._wait(wait):
            raise FabricError(f"Rank {self._baton.living()[0]} did not share '{key}' in time.")
        if key not in memory:
            memory[key] = like.detach().clone()
            self._baton.touch(topic)
        if memory[key].shape != like.shape or memory[key].dtype != like.dtype:
            raise FabricError(
                f"Shared '{key}' is {memory[key].dtype} {list(memory[key].shape)}, rank {self._rank} expects "
                f"{like.dtype} {list(like.shape)}: give all members the same model."
            )
        return memory[key]

    # -- all --------------------------------------------------------------------------------------

    def _turn(self, needed: Capability) -> None:
        if needed not in self.capabilities:
            raise FabricError(
                f"This simulated fabric was made without {needed.value}: choose a strategy that does not "
                "need it, or add it to capabilities."
            )
        self._baton.turn(self._rank)

    def _wait(self, wait: Wait) -> bool:
        with self._waiting():
            return self._baton.wait(self._rank, wait)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = self._baton.now
        yield
        self.traffic.waiting_seconds += self._baton.now - start

    def _among(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"There is no rank {rank} among {self.size}: use 0..{self.size - 1}.")
        return rank


def run_members(
    size: int, functions: Sequence[Callable[[FabricFactory], Any]], deadline_seconds: float = 60.0
) -> list[Any]:
    """Run one function a member on a fabric without delays or faults; their results, by rank."""
    fabric = SimulatedFabric(
        size, seed=0, mail_deadline_seconds=deadline_seconds, collective_deadline_seconds=deadline_seconds
    )
    return fabric.run(functions)
