"""A channel of the simulated fabric: all methods of the four protocols."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from murmurate.fabric.interface import (
    Capability,
    FabricError,
    Message,
    Traffic,
    check_message,
    check_shape,
    checked_rank,
    encoded_tag,
)
from murmurate.fabric.mean import ordered_mean
from murmurate.fabric.simulated.collectives import Round, SimulatedCollectives
from murmurate.fabric.simulated.mailbox import SimulatedMailbox
from murmurate.fabric.simulated.network_model import FabricState
from murmurate.fabric.simulated.register import SimulatedRegister
from murmurate.fabric.simulated.scheduler import Wait

if TYPE_CHECKING:
    from murmurate.fabric.simulated.fabric import Member


@dataclass(eq=False)
class ChannelState:
    """The state that all members of one channel share. group: the members' ranks in the fabric."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    group: tuple[int, ...]
    mailbox: SimulatedMailbox
    collectives: SimulatedCollectives
    registers: dict[int, SimulatedRegister]
    memory: dict[str, Tensor] = field(default_factory=dict)


class SimulatedChannel:
    """One member's ``Channel``. Other members may run at the start of each method, but then none until the
    method returns, except while it waits."""

    def __init__(
        self,
        owner: Member,
        fabric: FabricState,
        state: ChannelState,
        capabilities: frozenset[Capability],
        deadline_seconds: float,
    ) -> None:
        self._owner, self._fabric, self._state, self._rank = owner, fabric, state, owner.rank
        self._group = state.group
        self._position = {rank: position for position, rank in enumerate(state.group)}
        self.rank, self.size, self.capabilities = self._position[owner.rank], len(state.group), capabilities
        self._scheduler, self._deadline = fabric.scheduler, deadline_seconds
        self.traffic = Traffic()

    def living(self) -> Sequence[int]:
        self._scheduler.turn(self._rank)
        if self.size == self._fabric.size:
            return self._scheduler.living()
        return [i for i, rank in enumerate(self._group) if rank not in self._scheduler.dead]

    def has_lost(self, rank: int) -> bool:
        return rank not in self.living()

    # -- Collective -------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        check_shape(self._state.name, self._state.shape, x)
        if self._is_alone_at_turn():
            return 1
        call = self._run_round("mean", x)
        if call.mean is None:
            call.mean = ordered_mean({rank: call.inputs[rank] for rank in call.members})
        x.detach().copy_(call.mean)
        return len(call.members)

    def broadcast_(self, x: Tensor, root: int) -> None:
        check_shape(self._state.name, self._state.shape, x)
        root = self._fabric_rank(root)
        if not self._is_alone_at_turn():
            x.detach().copy_(self._run_round("broadcast", x, root).inputs[root])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        check_shape(self._state.name, self._state.shape, x)
        if self._is_alone_at_turn():
            return {self.rank: x.detach().clone()}
        call = self._run_round("gather", x)
        return {self._position[rank]: call.inputs[rank].clone() for rank in call.members}

    def _is_alone_at_turn(self) -> bool:
        """Take a turn; returns whether this member's collectives then involve no other."""
        self._turn(Capability.COLLECTIVE)
        return self._owner.alone or self.size == 1

    def _run_round(self, kind: str, x: Tensor, root: int | None = None) -> Round:
        self._scheduler.finish_work(self._rank)
        start = self._scheduler.now
        call = self._state.collectives.run(self._rank, kind, x, root)
        transfer = call.end_seconds - call.complete_seconds if call.members else 0.0
        self._owner.exchanging_seconds += transfer
        self.traffic.waiting_seconds += self._scheduler.now - start - transfer
        network, members = self._fabric.links.network, call.members or (root,)
        if network is None:
            self.traffic.bytes += x.nbytes * (1 + len(members))
        else:
            self.traffic.bytes += round(2 * network.collective_bytes(x.nbytes, len(members)))
        return call

    # -- Mail -------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        self._turn(Capability.MAIL)
        encoded_tag(tag)  # only to refuse a tag that is too long
        check_message(x, self._state.shape.numel(), self._state.dtype)
        with self._waiting():
            sent = self._state.mailbox.send(self._rank, self._fabric_rank(to), tag, x, note, deadline_seconds)
        if sent:
            self._count_message(x)
        return sent

    def receive(self, tag: str) -> Message | None:
        self._turn(Capability.MAIL)
        return self._counted(self._state.mailbox.receive(self._rank, tag))

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        self._turn(Capability.MAIL)
        with self._waiting():
            message = self._state.mailbox.wait(self._rank, tag, deadline_seconds)
        return self._counted(message)

    def _counted(self, message: Message | None) -> Message | None:
        """Count a received message; returns it with its sender's position in the channel."""
        if message is None:
            return None
        self._count_message(message.x)
        return message._replace(sender=self._position[message.sender])

    def _count_message(self, x: Tensor) -> None:
        """Count the bytes of a message sent or received, and add the time that a CPU core needs for it."""
        self.traffic.bytes += x.nbytes
        network = self._fabric.links.network
        work = 0.0 if network is None else network.work_seconds(x.nbytes)
        if work:
            self._scheduler.add_work(self._rank, work)
            self._owner.exchanging_seconds += work

    # -- Register ---------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        self._turn(Capability.REGISTER)
        check_shape(self._state.name, self._state.shape, x)
        now = self._scheduler.now
        arrivals = self._fabric.links.arrivals(self._rank, now, x.nbytes)
        version = self._state.registers[self._rank].publish(x, now, arrivals)
        self._count_message(x)
        self._fabric.record(self._rank, "publish", self._state.name, version=version)
        self._scheduler.notify((self._state.name, "register", self._rank))
        return version

    def version(self, peer: int) -> int:
        self._turn(Capability.REGISTER)
        return self._state.registers[self._fabric_rank(peer)].newest(self._rank, self._scheduler.now)[0]

    def peek(self, peer: int) -> tuple[Tensor, int]:
        self._turn(Capability.REGISTER)
        version, x = self._state.registers[self._fabric_rank(peer)].newest(self._rank, self._scheduler.now)
        if x is None:
            raise FabricError(
                f"Nothing that rank {self._group[peer]} published on '{self._state.name}' has reached rank "
                f"{self._rank}: ask version first, or wait_newer."
            )
        self._fabric.record(self._rank, "peek", self._state.name, self._group[peer], version)
        self._count_message(x)
        return x, version

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        self._turn(Capability.REGISTER)
        wanted = {self._fabric_rank(peer): version for peer, version in zip(peers, seen, strict=True)}
        registers, scheduler = self._state.registers, self._scheduler

        def missing() -> list[int]:
            gone = self._fabric.has_finished
            alive = [peer for peer in wanted if peer not in scheduler.dead and not gone(peer)]
            return [
                peer for peer in alive if registers[peer].newest(self._rank, scheduler.now)[0] <= wanted[peer]
            ]

        wait = Wait(
            topics=tuple((self._state.name, "register", peer) for peer in wanted),
            ready=lambda: not missing(),
            describe=lambda: f"a newer version of {missing()}",
            deadline_seconds=deadline_seconds,
            wake_at=lambda: min(
                (registers[p].next_arrival(self._rank, scheduler.now) for p in wanted), default=math.inf
            ),
        )
        return self._wait(wait)

    # -- SharedMemory -----------------------------------------------------------------------------

    def shared(self, key: str, like: Tensor) -> Tensor:
        self._turn(Capability.SHARED_MEMORY)
        memory, topic = self._state.memory, (self._state.name, "memory")
        wait = Wait(
            topics=(topic,),
            ready=lambda: key in memory or self._lowest_living() == self._rank,
            describe=lambda: f"rank {self._lowest_living()} to share '{key}'",
            deadline_seconds=self._deadline,
        )
        if not self._wait(wait):
            raise FabricError(f"Rank {self._lowest_living()} did not share '{key}' in time.")
        if key not in memory:
            memory[key] = like.detach().clone()
            self._scheduler.notify(topic)
        if memory[key].shape != like.shape or memory[key].dtype != like.dtype:
            raise FabricError(
                f"Shared '{key}' is {memory[key].dtype} {list(memory[key].shape)}, rank {self._rank} expects "
                f"{like.dtype} {list(like.shape)}: give all members the same model."
            )
        return memory[key]

    # -- all --------------------------------------------------------------------------------------

    def _turn(self, needed: Capability) -> None:
        """Let other members run first (see ``Scheduler.turn``). Raises FabricError without ``needed``."""
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
        self._scheduler.finish_work(self._rank)
        start = self._scheduler.now
        yield
        self.traffic.waiting_seconds += self._scheduler.now - start

    def _lowest_living(self) -> int:
        """The lowest rank in the fabric among the living members of this channel."""
        return next(rank for rank in self._group if rank not in self._scheduler.dead)

    def _fabric_rank(self, rank: int) -> int:
        """The rank in the fabric of the member that has ``rank`` in this channel."""
        return self._group[checked_rank(rank, self.size)]
