"""What one member of a simulated fabric talks through: all verbs of the four protocols."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, FabricError, Message, Traffic, checked_rank
from murmurate.fabric.mean import ordered_mean
from murmurate.fabric.simulated.collectives import Round, SimulatedCollectives
from murmurate.fabric.simulated.mailbox import SimulatedMailbox
from murmurate.fabric.simulated.network_model import World
from murmurate.fabric.simulated.register import SimulatedRegister
from murmurate.fabric.simulated.scheduler import Wait


@dataclass(eq=False)
class Shared:
    """What all members of one channel have in common."""

    name: str
    shape: torch.Size
    group: tuple[int, ...]  # ranks in the fabric, which all below go by
    mailbox: SimulatedMailbox
    collectives: SimulatedCollectives
    slots: dict[int, SimulatedRegister]
    memory: dict[str, Tensor] = field(default_factory=dict)


class Owner(Protocol):
    """The member that a channel is of. While it is ``alone``, collectives have nobody else in them."""

    alone: bool
    exchanging_seconds: float  # virtual, spent on moving bytes; not on waiting for others

    @property
    def rank(self) -> int: ...


class SimulatedChannel:
    """One member's ``Channel``. Every verb is one turn: others may run before it, none during it."""

    def __init__(
        self,
        owner: Owner,
        world: World,
        shared: Shared,
        capabilities: frozenset[Capability],
        deadline_seconds: float,
    ) -> None:
        self._owner, self._world, self._shared, self._rank = owner, world, shared, owner.rank
        self._group = shared.group
        self._place = {rank: place for place, rank in enumerate(shared.group)}
        self._scheduler, self._capabilities, self._deadline = world.scheduler, capabilities, deadline_seconds
        self.traffic = Traffic()

    @property
    def rank(self) -> int:
        return self._place[self._rank]

    @property
    def size(self) -> int:
        return len(self._group)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self._capabilities

    def living(self) -> Sequence[int]:
        self._scheduler.turn(self._rank)
        if self.size == self._world.size:
            return self._scheduler.living()
        return [place for place, rank in enumerate(self._group) if rank not in self._scheduler.dead]

    def has_lost(self, rank: int) -> bool:
        return rank not in self.living()

    # -- Collective -------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        if self._alone():
            return 1
        here = self._meet("mean", x)
        if here.mean is None:
            here.mean = ordered_mean({rank: here.given[rank] for rank in here.members})
        x.detach().copy_(here.mean)
        return len(here.members)

    def broadcast_(self, x: Tensor, root: int) -> None:
        root = self._among(root)
        if not self._alone():
            x.detach().copy_(self._meet("broadcast", x, root).given[root])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        if self._alone():
            return {self.rank: x.detach().clone()}
        here = self._meet("gather", x)
        return {self._place[rank]: here.given[rank].clone() for rank in here.members}

    def _alone(self) -> bool:
        self._turn(Capability.COLLECTIVE)
        return self._owner.alone

    def _meet(self, kind: str, x: Tensor, root: int | None = None) -> Round:
        self._scheduler.pay(self._rank)
        start = self._scheduler.now
        here = self._shared.collectives.meet(self._rank, kind, x, root)
        carried = here.end_seconds - here.complete_seconds if here.members else 0.0
        self._owner.exchanging_seconds += carried
        self.traffic.waiting_seconds += self._scheduler.now - start - carried
        network, members = self._world.links.network, here.members or (root,)
        if network is None:
            self.traffic.bytes += x.nbytes * (1 + len(members))
        else:
            self.traffic.bytes += round(2 * network.collective_bytes(x.nbytes, len(members)))
        return here

    # -- Mail -------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        self._turn(Capability.MAIL)
        with self._waiting():
            sent = self._shared.mailbox.send(self._rank, self._among(to), tag, x, note, deadline_seconds)
        if sent:
            self._carry(x)
        return sent

    def receive(self, tag: str) -> Message | None:
        self._turn(Capability.MAIL)
        return self._count(self._shared.mailbox.receive(self._rank, tag))

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        self._turn(Capability.MAIL)
        with self._waiting():
            message = self._shared.mailbox.wait(self._rank, tag, deadline_seconds)
        return self._count(message)

    def _count(self, message: Message | None) -> Message | None:
        if message is None:
            return None
        self._carry(message.x)
        return message._replace(sender=self._place[message.sender])

    def _carry(self, x: Tensor) -> None:
        """Count a message given or taken, and have the core work for it."""
        self.traffic.bytes += x.nbytes
        network = self._world.links.network
        work = 0.0 if network is None else network.work_seconds(x.nbytes)
        if work:
            self._scheduler.owe(self._rank, work)
            self._owner.exchanging_seconds += work

    # -- Register ---------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        self._turn(Capability.REGISTER)
        if x.shape != self._shared.shape:
            raise ValueError(
                f"Channel '{self._shared.name}' is for {list(self._shared.shape)}, this is {list(x.shape)}."
            )
        now = self._scheduler.now
        arrivals = self._world.links.arrivals(self._rank, now, x.nbytes)
        version = self._shared.slots[self._rank].put(x, now, arrivals)
        self._carry(x)
        self._world.record(self._rank, "publish", self._shared.name, version=version)
        self._scheduler.touch((self._shared.name, "register", self._rank))
        return version

    def version(self, peer: int) -> int:
        self._turn(Capability.REGISTER)
        return self._shared.slots[self._among(peer)].newest(self._rank, self._scheduler.now)[0]

    def peek(self, peer: int) -> tuple[Tensor, int]:
        self._turn(Capability.REGISTER)
        version, x = self._shared.slots[self._among(peer)].newest(self._rank, self._scheduler.now)
        if x is None:
            raise FabricError(
                f"Nothing that rank {peer} published on '{self._shared.name}' has reached rank {self._rank}: "
                "ask version first, or wait_newer."
            )
        self._world.record(self._rank, "peek", self._shared.name, self._group[peer], version)
        self._carry(x)
        return x, version

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        self._turn(Capability.REGISTER)
        asked = {self._among(peer): version for peer, version in zip(peers, seen, strict=True)}
        slots, scheduler = self._shared.slots, self._scheduler

        def missing() -> list[int]:
            alive = [peer for peer in asked if peer not in scheduler.dead]
            return [peer for peer in alive if slots[peer].newest(self._rank, scheduler.now)[0] <= asked[peer]]

        wait = Wait(
            topics=tuple((self._shared.name, "register", peer) for peer in asked),
            ready=lambda: not missing(),
            words=lambda: f"a newer version of {missing()}",
            deadline_seconds=deadline_seconds,
            wake_at=lambda: min(
                (slots[p].next_arrival(self._rank, scheduler.now) for p in asked), default=math.inf
            ),
        )
        return self._wait(wait)

    # -- SharedMemory -----------------------------------------------------------------------------

    def shared(self, key: str, like: Tensor) -> Tensor:
        self._turn(Capability.SHARED_MEMORY)
        memory, topic = self._shared.memory, (self._shared.name, "memory")
        wait = Wait(
            topics=(topic,),
            ready=lambda: key in memory or self._lowest() == self.rank,
            words=lambda: f"rank {self._lowest()} to share '{key}'",
            deadline_seconds=self._deadline,
        )
        if not self._wait(wait):
            raise FabricError(f"Rank {self._lowest()} did not share '{key}' in time.")
        if key not in memory:
            memory[key] = like.detach().clone()
            self._scheduler.touch(topic)
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
        self._scheduler.turn(self._rank)

    def _wait(self, wait: Wait) -> bool:
        with self._waiting():
            return self._scheduler.wait(self._rank, wait)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._scheduler.pay(self._rank)
        start = self._scheduler.now
        yield
        self.traffic.waiting_seconds += self._scheduler.now - start

    def _lowest(self) -> int:
        """The lowest living rank of the channel."""
        return next(place for place, rank in enumerate(self._group) if rank not in self._scheduler.dead)

    def _among(self, rank: int) -> int:
        """The rank in the fabric of one of the channel."""
        return self._group[checked_rank(rank, self.size)]
