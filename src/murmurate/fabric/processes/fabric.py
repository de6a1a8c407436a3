"""The fabric between processes of one host: slots and counters in shared memory, without locks.

*Register*: a reader reads the publisher's buffer directly, without a copy (``register``).

*Collective*: there are two sets of slots, with one slot for each member; rounds (successive collective calls)
use the sets in turn. A member writes its slot, raises its round counter and waits for the others' counters;
as no member can be two rounds ahead, slots being read are never overwritten. Each member reduces for itself,
in the order of ranks, so the result is bitwise the same for all. The members need not vote on a death: a
member that is dead and has not raised its counter takes no part in the round, and all others see the same.
For this to hold, a member is marked dead only after its process has ended (docs/decisions/0010), and a
restarted member takes part only from the round at which all others admit it (``admit``).

*Mail*: each ordered pair of members has slots, whose messages are read in place (``spsc_ring``, ``mailbox``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.interface import (
    STILL_ALIVE,
    Capability,
    Fabric,
    FabricError,
    Message,
    Traffic,
    check_shape,
    checked_group,
    checked_rank,
)
from murmurate.fabric.processes.mailbox import ProcessMailbox
from murmurate.fabric.processes.membership import ChannelMembership, Membership
from murmurate.fabric.processes.register import BufferedRegister
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import Died, run
from murmurate.replica.fence import fence

__all__ = ["Died", "ProcessChannel", "ProcessFabric", "run_members"]

_MOST_MEMBERS = 254  # a register has two buffers more, and numbers them in 8 bits


class ProcessFabric:
    """One member's fabric: makes channels in the shared memory (see ``Fabric``).

    joins: this process replaces one that died. Until ``enter``, its collectives involve no other member.
    by_agreement: all members run the same rounds, and admit a joiner at the same one (see ``Membership``).
    """

    capabilities = frozenset(Capability)

    def __init__(
        self,
        memory_file: SharedMemoryFile,
        run_state: RunState,
        rank: int,
        deadline_seconds: float = 60.0,
        joins: bool = False,
        by_agreement: bool = False,
    ) -> None:
        if run_state.size > _MOST_MEMBERS:
            raise Refusal(
                f"{run_state.size} processes cannot share memory: at most {_MOST_MEMBERS} can. Use fewer "
                "--replicas here; murmurate simulate has no such limit."
            )
        self.memory_file = memory_file
        self._run_state = run_state
        self.rank = rank
        self.size = run_state.size
        self.deadline_seconds = deadline_seconds
        self.membership = Membership(run_state, rank, not joins, by_agreement)
        self._channels: dict[str, ProcessChannel] = {}

    def living(self) -> Sequence[int]:
        return self.membership.living()

    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> ProcessChannel:
        group = checked_group(members, self.rank, self.size)
        has_all = len(group) == self.size
        label = name if has_all else f"{name} of {list(group)}"
        if label in self._channels:
            raise FabricError(f"a channel named {label!r} exists already")
        # only the group's members make its channel, so its memory must not shift that of other channels
        memory_file = self.memory_file if has_all else self.memory_file.zone(label)
        membership = ChannelMembership(self.membership, group)
        channel = ProcessChannel(memory_file, membership, label, like, self.deadline_seconds)
        self._channels[label] = channel
        return channel

    # -- restarted members

    def admit(self, rank: int, incarnation: int) -> None:
        """Include ``rank``, in its new ``incarnation``, from the next round of every channel on.

        If the strategy makes all members run the same rounds, all must call this at the same round.
        """
        self.membership.admit(rank, incarnation)
        for channel in self._channels.values():
            channel.expect([rank])

    def joining_state(self, partners: Sequence[int]) -> dict[str, Any]:
        """The state that a joiner needs to continue: this member's rounds by channel, and who takes part.

        partners: the members that take part. Where all run the same rounds, these are the members of the last
            round, on which all agree (the result of ``living`` may differ between members).
        """
        return {
            "rounds": {name: channel.round for name, channel in self._channels.items()},
            "partners": list(partners),
            "incarnations": self.membership.incarnations.tolist(),
        }

    def enter(self, joining_state: dict[str, Any]) -> None:
        """Take part in collectives, continuing from a peer's ``joining_state``."""
        self.membership.incarnations[:] = joining_state["incarnations"]
        self.membership.incarnations[self.rank] = self._run_state.incarnation(self.rank)
        self.membership.admitted = True
        for name, channel in self._channels.items():
            if name not in joining_state["rounds"]:
                raise FabricError(
                    f"rank {self.rank} cannot enter channel '{name}' with the state of a member that is not "
                    "in its group: run without restarts where groups are used."
                )
            channel.enter(int(joining_state["rounds"][name]), [*joining_state["partners"], self.rank])


class ProcessChannel:
    """One channel (see ``Channel``), with all four protocols, for vectors shaped like ``like`` [N]."""

    def __init__(
        self,
        memory_file: SharedMemoryFile,
        membership: ChannelMembership,
        name: str,
        like: Tensor,
        deadline_seconds: float,
    ) -> None:
        self.rank, self.size, self.name = membership.rank, membership.size, name
        self.traffic = Traffic()
        self.deadline_seconds = deadline_seconds
        self.memory_file, self._membership = memory_file, membership
        self._bytes = like.nbytes
        self._device, self._shape = like.device, like.shape
        self.capabilities = ProcessFabric.capabilities
        if like.device.type != "cpu":  # a vector in GPU memory cannot be in the shared memory
            self.capabilities -= {Capability.SHARED_MEMORY}
        n, shape = self.size, (like.numel(),)
        # register; pins[publisher, reader]: see ``BufferedRegister``
        newest = memory_file.counters(f"{name}.newest", (n,))
        pins = memory_file.counters(f"{name}.pins", (n, n))
        self._buffers = memory_file.tensors(f"{name}.register", (n, n + 2, *shape), like.dtype)
        self._pins = [row.data for row in pins]
        self._registers = [BufferedRegister(newest[p : p + 1].data, list(self._buffers[p])) for p in range(n)]
        # collective
        self._rounds = memory_file.counters(f"{name}.rounds", (n,))
        self.round = int(self._rounds[self.rank])
        self._partners = np.ones(n, dtype=np.bool_)  # whether each member takes part in rounds
        self._slots = memory_file.tensors(f"{name}.collective", (2, n, *shape), like.dtype)
        self._on_device: dict[int, Tensor] = {}  # by publisher: the copy of its newest vector on the GPU
        self._shared: dict[str, Tensor] = {}
        self._barrier = threading.Lock()
        self._mailbox = ProcessMailbox(
            memory_file, membership, name, like, self.traffic, self._store, self._wait
        )
        if not membership.admitted:
            pins[:, self.rank] = 0  # pins that the former incarnation of this rank left

    def living(self) -> Sequence[int]:
        return self._membership.living()

    def has_lost(self, rank: int) -> bool:
        return not self._membership.is_alive(rank)

    def expect(self, ranks: Sequence[int]) -> None:
        """Include these members in rounds (see ``ProcessFabric.admit``). ranks: ranks of the fabric."""
        self._partners |= np.isin(self._membership.ranks, ranks)

    def enter(self, round: int, partners: Sequence[int]) -> None:
        """See ``ProcessFabric.enter``. partners: ranks of the fabric."""
        self.round = round
        self._partners[:] = False
        self.expect(partners)

    # -- register -----------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        check_shape(self.name, self._shape, x)
        register = self._registers[self.rank]
        version = register.version + 1
        register.publish(version, self._pins[self.rank], lambda buffer: self._store(buffer, x))
        return version

    def version(self, peer: int) -> int:
        return self._registers[checked_rank(peer, self.size)].version

    def peek(self, peer: int) -> tuple[Tensor, int]:
        newest = self._registers[checked_rank(peer, self.size)].peek(self._pins[peer], self.rank)
        if newest is None:
            raise FabricError(
                f"rank {self._fabric_rank(peer)} has published nothing on channel '{self.name}' yet"
            )
        self.traffic.bytes += self._bytes
        return self._to_device(peer, newest[0]), newest[1]

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        def all_newer() -> bool:
            return all(
                self.version(p) > v or not self._membership.is_alive(p) or self._membership.has_finished(p)
                for p, v in zip(peers, seen, strict=True)
            )

        return self._wait(all_newer, deadline_seconds)

    # -- collective ---------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        check_shape(self.name, self._shape, x)
        if self._is_alone:
            return 1
        slots, present = self._run_round(x)
        self.traffic.bytes += self._bytes * len(present)
        if len(present) == self.size and x.device.type == "cpu":
            torch.mean(slots, 0, out=x.data)
        else:
            x.copy_(slots[present].mean(0))
        return len(present)

    def broadcast_(self, x: Tensor, root: int) -> None:
        check_shape(self.name, self._shape, x)
        if self._is_alone:
            return
        slots, present = self._run_round(x if self.rank == root else None)
        if root not in present:
            raise FabricError(
                f"rank {self._fabric_rank(root)} died before it could broadcast on channel '{self.name}'"
            )
        self.traffic.bytes += self._bytes
        x.copy_(slots[root])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        check_shape(self.name, self._shape, x)
        if self._is_alone:
            return {self.rank: x.detach().clone()}
        slots, present = self._run_round(x)
        self.traffic.bytes += self._bytes * len(present)
        return {rank: slots[rank].to(x.device, copy=True) for rank in present}

    @property
    def _is_alone(self) -> bool:
        return self.size == 1 or not self._membership.admitted

    def _run_round(self, x: Tensor | None) -> tuple[Tensor, list[int]]:
        """Contribute ``x`` and wait for the others; returns (slots of the round [n, N], who took part)."""
        self.round += 1
        number = self.round
        slots = self._slots[number & 1]
        if x is not None:
            self._store(slots[self.rank], x)
        fence(self._barrier)
        self._rounds[self.rank] = number

        def complete() -> bool:
            # one that raises its counter and dies between these two looks is found below to have taken part
            behind = self._partners & (self._rounds < number)
            return not behind.any() or not (behind & self._membership.alive()).any()

        work = self._membership.work()
        while not self._wait(complete, self.deadline_seconds):
            late = [r for r in self.living() if self._partners[r] and self._rounds[r] < number]
            before, work = work, self._membership.work()
            if (work[late] > before[late]).any():
                continue  # one still collects a batch or validates, whereas members in a deadlock only wait
            raise FabricError(
                f"rank {self._fabric_rank(self.rank)} waited {self.deadline_seconds:g} s for rank(s) "
                f"{[self._fabric_rank(r) for r in late]} in round {number} "
                f"of channel '{self.name}'. {STILL_ALIVE}"
            )
        fence(self._barrier)  # no slot may be read before the counters
        # a member that did not take part has died, and is left out until it is admitted again
        self._partners &= self._rounds >= number
        return slots, [int(rank) for rank in np.flatnonzero(self._partners)]

    # -- mail ---------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        if deadline_seconds is None:
            deadline_seconds = self.deadline_seconds
        return self._mailbox.send(to, tag, x, note, deadline_seconds)

    def receive(self, tag: str) -> Message | None:
        return self._mailbox.receive(tag)

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        return self._mailbox.wait(tag, deadline_seconds)

    # -- shared memory ------------------------------------------------------------------------------

    def shared(self, key: str, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            raise FabricError(
                f"'{key}' is on {like.device}, and processes share only host memory. Use --strategy gala."
            )
        if key in self._shared:
            return self._shared[key]
        ready = self.memory_file.counters(f"{self.name}.{key}.ready", (1,))
        tensor = self.memory_file.tensors(f"{self.name}.{key}", tuple(like.shape), like.dtype)

        def can_proceed() -> bool:
            return bool(ready[0]) or self.living()[0] == self.rank

        if not self._wait(can_proceed, self.deadline_seconds):
            raise FabricError(
                f"rank {self._fabric_rank(self.living()[0])} did not fill '{key}' of channel '{self.name}' "
                f"within {self.deadline_seconds:g} s. It is alive but silent: see its log or output."
            )
        if not ready[0]:  # filled only once: a member that later becomes the lowest must not overwrite it
            tensor.copy_(like)
            fence(self._barrier)
            ready[0] = 1
        fence(self._barrier)  # the tensor must not be read before ``ready``
        self._shared[key] = tensor
        return tensor

    # -- internals ----------------------------------------------------------------------------------

    def _fabric_rank(self, rank: int) -> int:
        """The rank in the fabric of the member that has ``rank`` in this channel."""
        return int(self._membership.ranks[checked_rank(rank, self.size)])

    def _store(self, slot: Tensor, x: Tensor) -> None:
        self.traffic.bytes += slot.nbytes
        slot.copy_(x.detach())
        if x.device.type != "cpu":
            torch.cuda.current_stream(x.device).synchronize()

    def _to_device(self, peer: int, slot: Tensor) -> Tensor:
        """The slot itself if the replica is on a CPU; else a copy of it in the memory of the GPU."""
        if self._device.type == "cpu":
            return slot
        if peer not in self._on_device:
            buffers = self._buffers[peer]  # page-locked, so that the GPU copies from them directly
            torch.cuda.cudart().cudaHostRegister(buffers.data_ptr(), buffers.nbytes, 0)  # type: ignore[no-untyped-call]
            self._on_device[peer] = torch.empty_like(slot, device=self._device)
        return self._on_device[peer].copy_(slot, non_blocking=True)

    def _wait(self, condition: Callable[[], bool], deadline_seconds: float) -> bool:
        if condition():
            return True
        clock, pause = AwakeClock(), 20e-6
        end = clock.now() + deadline_seconds
        with self.traffic.timed():
            while True:
                self._membership.heartbeat()
                if clock.now() >= end:
                    return False
                time.sleep(pause)
                if condition():
                    return True
                pause = min(pause * 1.5, 500e-6)


def run_members(
    size: int, functions: Sequence[Callable[[Fabric], Any]], deadline_seconds: float = 60.0
) -> list[Any]:
    """Run each member's function in a process of its own; returns their results, by rank.

    Functions and results are pickled, so functions must be at module level. When a member raises an error or
    its process dies, the others go on without it. ``Died`` stands for the result of a process that died; the
    first error is raised again here, once all members have ended.
    """
    return run(size, functions, ProcessFabric, deadline_seconds)
