"""The four protocols among threads of one process, with plain conditions and real seconds."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Fabric, FabricError, Letter, Traffic, check_shape

T = TypeVar("T")


def ordered_mean(given: Mapping[int, Tensor]) -> Tensor:
    """The mean of equally shaped vectors; summed by ascending rank, so whoever asks gets the same bits."""
    first, *rest = (given[rank] for rank in sorted(given))
    total = first.clone()
    for x in rest:
        total += x.to(total.device)
    return total.div_(len(given)) if rest else total


@dataclass(eq=False)
class ThreadsFabric:
    """``size`` members, each a thread of this process. All seconds are real.

    A member whose function raises is dead to the others, who go on without it. Collectives, and the wait
    for shared memory, raise ``FabricError`` after ``collective_deadline_seconds``; a ``send`` to a
    full queue gives up after ``mail_deadline_seconds``.
    """

    size: int
    mail_capacity: int = field(default=64, kw_only=True)
    mail_deadline_seconds: float = field(default=1.0, kw_only=True)
    collective_deadline_seconds: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"A fabric of {self.size} members is none: the size must be at least 1.")
        self._changed = threading.Condition()
        self._dead: set[int] = set()
        self._channels: dict[str, _Shared] = {}

    def member(self, rank: int) -> Member:
        if not 0 <= rank < self.size:
            raise ValueError(f"There is no rank {rank} among {self.size}: use 0..{self.size - 1}.")
        return Member(self, rank)

    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self._dead]

    def mark_dead(self, rank: int) -> None:
        """Let nobody wait for ``rank`` any more."""
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()

    def run(self, functions: Sequence[Callable[[Member], T]]) -> list[T]:
        """Run ``functions[rank]`` as rank ``rank``, all to their end; the result of each by rank.

        Raises the first error of a function, once all others have ended too.
        """
        if len(functions) != self.size:
            raise ValueError(f"{len(functions)} functions for {self.size} members: give one each.")
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def live(rank: int, role: Callable[[], T]) -> None:
            try:
                results[rank] = role()
            except BaseException as error:
                errors.append(error)
                self.mark_dead(rank)

        threads = []
        for rank, function in enumerate(functions):
            role = functools.partial(function, self.member(rank))
            threads.append(
                threading.Thread(target=live, args=(rank, role), name=f"replica-{rank}", daemon=True)
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]


class Member:
    """A ``Fabric``."""

    def __init__(self, fabric: ThreadsFabric, rank: int) -> None:
        self._fabric, self._rank = fabric, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._fabric.size

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset(Capability)

    def living(self) -> Sequence[int]:
        return self._fabric.living()

    def channel(self, name: str, like: Tensor) -> ThreadsChannel:
        fabric = self._fabric
        with fabric._changed:
            shared = fabric._channels.setdefault(name, _Shared(name, like.shape, [0] * fabric.size))
        if shared.shape != like.shape:
            raise FabricError(
                f"Rank {self.rank} wants channel '{name}' for {list(like.shape)}, others have it for "
                f"{list(shared.shape)}: give all members the same model."
            )
        return ThreadsChannel(fabric, shared, self._rank)


@dataclass(eq=False)
class _Round:
    """One matched collective: what each has given, and who is in it once it is complete."""

    kind: str
    root: int | None
    given: dict[int, Tensor] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    mean: Tensor | None = None
    left: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Shared:
    """What all members of one channel have in common; read and written under the fabric's condition."""

    name: str
    shape: torch.Size
    calls: list[int]  # collectives so far, by rank
    rounds: dict[int, _Round] = field(default_factory=dict)
    slots: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    inbox: dict[tuple[int, str], deque[Letter]] = field(default_factory=lambda: defaultdict(deque))
    queued: dict[tuple[int, int, str], int] = field(default_factory=lambda: defaultdict(int))
    memory: dict[str, Tensor] = field(default_factory=dict)


class ThreadsChannel:
    """One member's ``Channel``."""

    def __init__(self, fabric: ThreadsFabric, shared: _Shared, rank: int) -> None:
        self._fabric, self._shared, self._rank = fabric, shared, rank
        self._changed = fabric._changed
        self.traffic = Traffic()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._fabric.size

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset(Capability)

    def living(self) -> Sequence[int]:
        return self._fabric.living()

    def has_lost(self, rank: int) -> bool:
        return rank not in self.living()

    # -- Collective -------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        check_shape(self._shared.name, self._shared.shape, x)
        here = self._meet("mean", x)
        with self._changed:
            if here.mean is None:
                here.mean = ordered_mean({rank: here.given[rank] for rank in here.members})
        x.detach().copy_(here.mean)
        return len(here.members)

    def broadcast_(self, x: Tensor, root: int) -> None:
        check_shape(self._shared.name, self._shared.shape, x)
        self._among(root)
        x.detach().copy_(self._meet("broadcast", x, root).given[root])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        check_shape(self._shared.name, self._shared.shape, x)
        here = self._meet("gather", x)
        return {rank: here.given[rank].clone() for rank in here.members}

    def _meet(self, kind: str, x: Tensor, root: int | None = None) -> _Round:
        """Give ``x`` to the next collective and wait until it is complete."""
        shared, copy, seconds = self._shared, x.detach().clone(), self._fabric.collective_deadline_seconds
        with self._changed:
            shared.calls[self._rank] += 1
            number = shared.calls[self._rank]
            here = shared.rounds.setdefault(number, _Round(kind, root))
            for other, given in itertools.islice(here.given.items(), 1):  # all others equal the first
                if (here.kind, here.root, given.shape) != (kind, root, x.shape):
                    raise FabricError(
                        f"Rank {self._rank} calls {kind} #{number} of {list(x.shape)} on '{shared.name}', "
                        f"rank {other} {here.kind} of {list(given.shape)}: make the same calls everywhere."
                    )
            here.given[self._rank] = copy
            self._changed.notify_all()
            if not self._wait(lambda: self._complete(here), seconds):
                silent = [rank for rank in self.living() if rank not in here.given]
                raise FabricError(
                    f"{kind} #{number} on '{shared.name}': ranks {silent} did not come within {seconds:g} s. "
                    "Raise the deadline, or use a strategy without collectives."
                )
            if root is not None and root not in here.given:
                raise FabricError(f"{kind} #{number} on '{shared.name}': its root, rank {root}, is dead.")
            self.traffic.bytes += x.nbytes * (1 + len(here.members or (root,)))
            here.left.add(self._rank)
            if here.left >= set(self.living()):
                del shared.rounds[number]
        return here

    def _complete(self, here: _Round) -> bool:
        """Whether this member can go on; the first to find a mean complete fixes who is in it."""
        if here.root is not None:
            return here.root in here.given or here.root in self._fabric._dead
        living = self.living()
        if not here.members and all(rank in here.given for rank in living):
            here.members = tuple(living)
            self._changed.notify_all()
        return bool(here.members)

    # -- Mail -------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        stream = (self._rank, self._among(to), tag)
        queued, dead = self._shared.queued, self._fabric._dead
        copy = x.detach().clone()
        with self._changed:
            self._wait(
                lambda: queued[stream] < self._fabric.mail_capacity or to in dead,
                self._fabric.mail_deadline_seconds if deadline_seconds is None else deadline_seconds,
            )
            if queued[stream] >= self._fabric.mail_capacity or to in dead:
                return False
            queued[stream] += 1
            self._shared.inbox[to, tag].append(Letter(self._rank, copy, note))
            self._changed.notify_all()
        self.traffic.bytes += x.nbytes
        return True

    def receive(self, tag: str) -> Letter | None:
        return self.wait(tag, 0.0)

    def wait(self, tag: str, deadline_seconds: float) -> Letter | None:
        with self._changed:
            inbox = self._shared.inbox[self._rank, tag]
            if not self._wait(lambda: bool(inbox), deadline_seconds):
                return None
            letter = inbox.popleft()
            self._shared.queued[letter.sender, self._rank, tag] -= 1
            self._changed.notify_all()
        self.traffic.bytes += letter.x.nbytes
        return letter

    # -- Register ---------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        check_shape(self._shared.name, self._shared.shape, x)
        copy = x.detach().clone()
        with self._changed:
            version = self._shared.slots.get(self._rank, (copy, 0))[1] + 1
            self._shared.slots[self._rank] = (copy, version)
            self._changed.notify_all()
        self.traffic.bytes += x.nbytes
        return version

    def version(self, peer: int) -> int:
        slot = self._shared.slots.get(self._among(peer))
        return slot[1] if slot else 0

    def peek(self, peer: int) -> tuple[Tensor, int]:
        slot = self._shared.slots.get(self._among(peer))  # one reference, swapped whole by publish
        if slot is None:
            raise FabricError(
                f"Rank {peer} has published nothing on '{self._shared.name}' yet: ask version first, or "
                "wait_newer."
            )
        self.traffic.bytes += slot[0].nbytes
        return slot

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        asked = {self._among(peer): version for peer, version in zip(peers, seen, strict=True)}
        dead = self._fabric._dead
        with self._changed:
            return self._wait(
                lambda: all(peer in dead or self.version(peer) > asked[peer] for peer in asked),
                deadline_seconds,
            )

    # -- SharedMemory -----------------------------------------------------------------------------

    def shared(self, key: str, like: Tensor) -> Tensor:
        memory, seconds = self._shared.memory, self._fabric.collective_deadline_seconds
        with self._changed:
            if not self._wait(lambda: key in memory or self.living()[0] == self._rank, seconds):
                raise FabricError(f"Rank {self.living()[0]} did not share '{key}' within {seconds:g} s.")
            if key not in memory:
                memory[key] = like.detach().clone()
                self._changed.notify_all()
            found = memory[key]
        if found.shape != like.shape or found.dtype != like.dtype:
            raise FabricError(
                f"Shared '{key}' is {found.dtype} {list(found.shape)}, rank {self._rank} expects "
                f"{like.dtype} {list(like.shape)}: give all members the same model."
            )
        return found

    def _wait(self, condition: Callable[[], bool], deadline_seconds: float) -> bool:
        """Under the condition's lock: wait until ``condition``; False at the deadline."""
        if condition():
            return True
        start = time.monotonic()
        limit = None if math.isinf(deadline_seconds) else deadline_seconds
        met = self._changed.wait_for(condition, limit)
        self.traffic.waiting_seconds += time.monotonic() - start
        return met

    def _among(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"There is no rank {rank} among {self.size}: use 0..{self.size - 1}.")
        return rank


def run_members(
    size: int, functions: Sequence[Callable[[Fabric], Any]], deadline_seconds: float = 60.0
) -> list[Any]:
    """Run one function a member on a fabric of threads; their results, by rank."""
    fabric = ThreadsFabric(
        size, mail_deadline_seconds=deadline_seconds, collective_deadline_seconds=deadline_seconds
    )
    return fabric.run(functions)
