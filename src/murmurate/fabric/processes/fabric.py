"""The fabric between processes of one host: slots and counters in shared memory, no locks to die with.

*Register*: a reader mixes straight from its publisher's buffer (``register``).

*Collective*: two sets of slots used in turn. A member writes its slot, raises its round counter and
waits for the others'; as nobody can be two rounds ahead, the slots being read are never overwritten.
Everyone reduces for itself, in rank order, so all get the same bits, and a death is settled without a
vote: whoever is dead and has not raised its counter is out of the round, for everybody alike. For that a
member is called dead only after its process has ended (docs/decisions/0010), and one that is started again
takes part only from the round on at which all others let it in (``admit``).

*Mail*: slots for each ordered pair, read where they lie (``spsc_ring``, ``mailbox``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.fabric.interface import (
    Capability,
    Fabric,
    FabricError,
    Message,
    Traffic,
    check_shape,
    checked_group,
)
from murmurate.fabric.processes.mailbox import ProcessMailbox
from murmurate.fabric.processes.membership import Group, Membership
from murmurate.fabric.processes.register import BufferedRegister
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile, fence
from murmurate.fabric.processes.spawn import Died, run

__all__ = ["Died", "ProcessChannel", "ProcessFabric", "run_members"]

_ALL = frozenset(Capability)


class ProcessFabric:
    """What one member has of it: makes channels over the shared memory (see ``Fabric``).

    joins: this process takes the place of one that died. Until ``enter`` its collectives are its own
    affair, as if it were alone: nobody counts with it yet.
    by_agreement: members have common rounds, and let joiners in at one of them (see ``Membership``).
    """

    def __init__(
        self,
        memory_file: SharedMemoryFile,
        run_state: RunState,
        rank: int,
        deadline_seconds: float = 60.0,
        joins: bool = False,
        by_agreement: bool = False,
    ) -> None:
        self.memory_file = memory_file
        self._run_state = run_state
        self.rank = rank
        self.size = run_state.size
        self.deadline_seconds = deadline_seconds
        self.membership = Membership(run_state, rank, not joins, by_agreement)
        self._channels: dict[str, ProcessChannel] = {}

    @property
    def capabilities(self) -> frozenset[Capability]:
        return _ALL

    def living(self) -> Sequence[int]:
        return self.membership.living()

    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> ProcessChannel:
        group = checked_group(members, self.rank, self.size)
        whole = len(group) == self.size
        label = name if whole else f"{name} of {list(group)}"
        # others do not make a group's channel, so its place must not depend on what was taken before
        memory_file = self.memory_file if whole else self.memory_file.apart(label)
        made = ProcessChannel(memory_file, self.membership.group(group), label, like, self.deadline_seconds)
        self._channels[label] = made
        return made

    # -- members that are started again

    def admit(self, rank: int, incarnation: int) -> None:
        """Count with ``rank``, which begins ``incarnation``, from the next round of every channel on.

        Members whose strategy has common rounds call it at the same one.
        """
        self.membership.admit(rank, incarnation)
        for channel in self._channels.values():
            channel.expect([rank])

    def place(self, partners: Sequence[int]) -> dict[str, Any]:
        """Where this member stands, for one that enters here: rounds by channel, and who takes part.

        With common rounds ``partners`` came to the last one: who lives now may look different elsewhere.
        """
        return {
            "rounds": {name: channel.round for name, channel in self._channels.items()},
            "partners": list(partners),
            "incarnations": self.membership.incarnations.tolist(),
        }

    def enter(self, place: dict[str, Any]) -> None:
        """Take part from where ``place`` says, with those that take part there."""
        self.membership.incarnations[:] = place["incarnations"]
        self.membership.incarnations[self.rank] = self._run_state.incarnation(self.rank)
        self.membership.inside = True
        for name, channel in self._channels.items():
            if name not in place["rounds"]:
                raise FabricError(
                    f"rank {self.rank} cannot enter channel '{name}' with the state of a member that is not "
                    "in its group: run without restarts where groups are used."
                )
            channel.enter(int(place["rounds"][name]), [*place["partners"], self.rank])


class ProcessChannel:
    """One channel (see ``Channel``): all four protocols for vectors shaped like ``like`` [N]."""

    def __init__(
        self, memory_file: SharedMemoryFile, group: Group, name: str, like: Tensor, deadline_seconds: float
    ) -> None:
        rank, self.size = group.rank, group.size
        self.rank = rank
        self.name = name
        self.traffic = Traffic()
        self.deadline_seconds = deadline_seconds
        self.memory_file, self._group = memory_file, group
        self._bytes = like.numel() * like.element_size()
        self._device, self._shape = like.device, like.shape
        n, shape = self.size, (like.numel(),)
        # register: pins[p, reader]
        newest = memory_file.counters(f"{name}.newest", (n,))
        pins = memory_file.counters(f"{name}.pins", (n, n))
        self._buffers = memory_file.tensors(f"{name}.register", (n, n + 2, *shape), like.dtype)
        self._pins = [row.data for row in pins]
        self._registers = [BufferedRegister(newest[p : p + 1].data, list(self._buffers[p])) for p in range(n)]
        # collective
        self._rounds = memory_file.counters(f"{name}.rounds", (n,))
        self.round = int(self._rounds[rank])
        self._partners = np.ones(n, dtype=np.bool_)  # who is waited for
        self._slots = memory_file.tensors(f"{name}.collective", (2, n, *shape), like.dtype)
        self._arrived: dict[int, Tensor] = {}
        self._pinned: set[int] = set()
        self._memory: dict[str, Tensor] = {}
        self._barrier = threading.Lock()
        self._mailbox = ProcessMailbox(memory_file, group, name, like, self.traffic, self._store, self._wait)
        if not group.inside:
            pins[:, rank] = 0  # what the former incarnation was reading

    @property
    def capabilities(self) -> frozenset[Capability]:
        # a vector in GPU memory cannot live in the shared memory
        return _ALL if self._device.type == "cpu" else _ALL - {Capability.SHARED_MEMORY}

    def living(self) -> Sequence[int]:
        return self._group.living()

    def has_lost(self, rank: int) -> bool:
        return not self._group.is_alive(rank)

    def expect(self, ranks: Sequence[int]) -> None:
        """See ``ProcessFabric.admit``; ranks of the fabric."""
        self._partners |= np.isin(self._group.ranks, ranks)

    def enter(self, round: int, partners: Sequence[int]) -> None:
        """See ``ProcessFabric.enter``; ranks of the fabric."""
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
        return self._registers[peer].version

    def peek(self, peer: int) -> tuple[Tensor, int]:
        found = self._registers[peer].peek(self._pins[peer], self.rank)
        if found is None:
            raise FabricError(f"rank {peer} has published nothing on channel '{self.name}' yet")
        self.traffic.bytes += self._bytes
        return self._bring(peer, found[0]), found[1]

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        def spoken() -> bool:
            return all(
                self.version(p) > v or not self._group.is_alive(p) or self._group.has_finished(p)
                for p, v in zip(peers, seen, strict=True)
            )

        return self._wait(spoken, deadline_seconds)

    # -- collective ---------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        check_shape(self.name, self._shape, x)
        if self._is_alone:
            return 1
        slots, present = self._meet(x)
        self.traffic.bytes += self._bytes * len(present)
        if x.device.type != "cpu":
            x.copy_(slots[present].mean(0))
        elif len(present) == self.size:
            torch.mean(slots, 0, out=x.data)
        else:
            x.copy_(slots[present].mean(0))
        return len(present)

    def broadcast_(self, x: Tensor, root: int) -> None:
        check_shape(self.name, self._shape, x)
        if self._is_alone:
            return
        slots, present = self._meet(x if self.rank == root else None)
        if root not in present:
            raise FabricError(f"rank {root} died before it could broadcast on channel '{self.name}'")
        self.traffic.bytes += self._bytes
        x.copy_(slots[root])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        check_shape(self.name, self._shape, x)
        if self._is_alone:
            return {self.rank: x.detach().clone()}
        slots, present = self._meet(x)
        self.traffic.bytes += self._bytes * len(present)
        return {rank: slots[rank].to(x.device, copy=True) for rank in present}

    @property
    def _is_alone(self) -> bool:
        return self.size == 1 or not self._group.inside

    def _meet(self, x: Tensor | None) -> tuple[Tensor, list[int]]:
        """Bring ``x`` to this round and wait for the rest: (slots of the round [n, N], who came)."""
        self.round += 1
        turn = self.round
        slots = self._slots[turn & 1]
        if x is not None:
            self._store(slots[self.rank], x)
        self._fence()
        self._rounds[self.rank] = turn

        def settled() -> bool:
            # looked at in this order: who is dead can no longer raise its counter
            awaited = self._partners & self._group.alive()
            return bool((self._rounds[awaited] >= turn).all())

        if not self._wait(settled, self.deadline_seconds):
            silent = [r for r in self.living() if self._partners[r] and self._rounds[r] < turn]
            raise FabricError(
                f"rank {self.rank} waited {self.deadline_seconds:g} s for rank(s) {silent} in round {turn} "
                f"of channel '{self.name}'. They live but do not answer: look at their logs."
            )
        # who did not come has died, and is out until it is let in again
        self._partners &= self._rounds >= turn
        return slots, [int(rank) for rank in np.flatnonzero(self._partners)]

    # -- mail ---------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        patience = self.deadline_seconds if deadline_seconds is None else deadline_seconds
        return self._mailbox.send(to, tag, x, note, patience)

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
        if key in self._memory:
            return self._memory[key]
        ready = self.memory_file.counters(f"{self.name}.{key}.ready", (1,))
        tensor = self.memory_file.tensors(f"{self.name}.{key}", tuple(like.shape), like.dtype)

        def settled() -> bool:
            return bool(ready[0]) or self.living()[0] == self.rank

        if not self._wait(settled, self.deadline_seconds):
            raise FabricError(
                f"rank {self.living()[0]} did not fill '{key}' of channel '{self.name}' within "
                f"{self.deadline_seconds:g} s. It lives but does not answer: look at its log."
            )
        if not ready[0]:  # once filled it stays: a later lowest rank must not write over it
            tensor.copy_(like)
            self._fence()
            ready[0] = 1
        self._memory[key] = tensor
        return tensor

    # -- underneath ---------------------------------------------------------------------------------

    def _store(self, slot: Tensor, x: Tensor) -> None:
        self.traffic.bytes += slot.nbytes
        slot.copy_(x.detach())
        if x.device.type != "cpu":
            torch.cuda.current_stream(x.device).synchronize()

    def _bring(self, peer: int, slot: Tensor) -> Tensor:
        """The slot itself on a CPU; its copy in device memory where the replica lives on a GPU."""
        if self._device.type == "cpu":
            return slot
        self._pin_pages(peer)
        if peer not in self._arrived:
            self._arrived[peer] = torch.empty_like(slot, device=self._device)
        return self._arrived[peer].copy_(slot, non_blocking=True)

    def _pin_pages(self, peer: int) -> None:
        """Lock the publisher's buffers into memory once, so that the GPU copies from them directly."""
        if peer not in self._pinned:
            self._pinned.add(peer)
            buffers = self._buffers[peer]
            size = buffers.numel() * buffers.element_size()
            torch.cuda.cudart().cudaHostRegister(buffers.data_ptr(), size, 0)  # type: ignore[no-untyped-call]

    def _fence(self) -> None:
        fence(self._barrier)

    def _wait(self, condition: Callable[[], bool], deadline_seconds: float) -> bool:
        if condition():
            return True
        start = time.monotonic()
        pause = 20e-6
        try:
            while not condition():
                self._group.heartbeat()
                if time.monotonic() - start > deadline_seconds:
                    return False
                time.sleep(pause)
                pause = min(pause * 1.5, 500e-6)
            return True
        finally:
            self.traffic.waiting_seconds += time.monotonic() - start


def run_members(
    size: int, functions: Sequence[Callable[[Fabric], Any]], deadline_seconds: float = 60.0
) -> list[Any]:
    """Run one function a member, each in a process of its own; their results, by rank.

    Functions and results travel by pickle, so functions stand at module level. A member that raises or
    dies is dead to the others, who go on without it; a death gives ``Died``. Raises the first error of
    a function, once all others have ended too.
    """
    return run(size, functions, ProcessFabric, deadline_seconds)
