"""Collectives of the simulated fabric: matched calls, complete once all the living have come."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from torch import Tensor

from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.network_model import World
from murmurate.fabric.simulated.scheduler import Wait


@dataclass(eq=False)
class Round:
    """One matched call: what each has given and, once a mean or gather is complete, who is in it."""

    kind: str
    root: int | None
    given: dict[int, Tensor] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    complete_seconds: float = math.inf  # when the last came
    end_seconds: float = math.inf  # when the network has carried it all
    mean: Tensor | None = None
    left: set[int] = field(default_factory=set)


class SimulatedCollectives:
    """All collectives of one channel, numbered from 1 up by each member's own calls."""

    def __init__(self, world: World, channel: str, deadline_seconds: float, group: tuple[int, ...]) -> None:
        self._world, self._channel, self._deadline = world, channel, deadline_seconds
        self._group = frozenset(group)
        self._calls = dict.fromkeys(group, 0)
        self._rounds: dict[int, Round] = {}

    def meet(self, rank: int, kind: str, x: Tensor, root: int | None = None) -> Round:
        """Give ``x`` to ``rank``'s next collective and wait until ``rank`` can go on.

        Raises ``FabricError`` at the deadline, for calls that do not match, and for a dead root.
        """
        scheduler, topic = self._world.scheduler, (self._channel, "collective")
        self._calls[rank] += 1
        number = self._calls[rank]
        here = self._rounds.setdefault(number, Round(kind, root))
        for other, given in itertools.islice(here.given.items(), 1):  # all others equal the first
            if (here.kind, here.root, given.shape) != (kind, root, x.shape):
                raise FabricError(
                    f"Rank {rank} calls {kind} #{number} of {list(x.shape)} on '{self._channel}', rank "
                    f"{other} {here.kind} of {list(given.shape)}: make the same calls everywhere."
                )
        here.given[rank] = x.detach().clone()
        if self._can_leave(rank, here) or kind == "broadcast":
            scheduler.touch(topic)
        wait = Wait(
            topics=(topic,),
            ready=lambda: self._can_leave(rank, here),
            words=lambda: f"{kind} #{number} of {self._expected(here)}, has {sorted(here.given)}",
            deadline_seconds=self._deadline,
            wake_at=lambda: here.end_seconds if here.members else self._next_repair(),
        )
        if not scheduler.wait(rank, wait):
            silent = [other for other in self._expected(here) if other not in here.given]
            cause = f"ranks {silent} did not come" if silent else "the links were cut"
            raise FabricError(
                f"{kind} #{number} on '{self._channel}': {cause} within {self._deadline:g} s. Raise the "
                "deadline, or use a strategy without collectives."
            )
        if root is not None and root not in here.given:
            raise FabricError(f"{kind} #{number} on '{self._channel}': its root, rank {root}, is dead.")
        self._world.record(rank, kind, self._channel, root, number, here.members)
        here.left.add(rank)
        if len(here.left) >= self._count() and here.left >= set(self._living()):
            del self._rounds[number]
        return here

    def _living(self) -> list[int]:
        living = self._world.scheduler.living()
        return living if len(self._group) == self._world.size else [r for r in living if r in self._group]

    def _count(self) -> int:
        """How many live; cheaper than who."""
        return len(self._group) - len(self._group & self._world.scheduler.dead)

    def _expected(self, here: Round) -> list[int]:
        return self._living() if here.root is None else [here.root]

    def _can_leave(self, rank: int, here: Round) -> bool:
        """Whether ``rank`` can go on; whoever first finds all the living here fixes who is in."""
        scheduler = self._world.scheduler
        if here.root is not None:
            reachable = self._world.links.departure(here.root, rank, scheduler.now) == scheduler.now
            return here.root in scheduler.dead or (here.root in here.given and reachable)
        if not here.members and len(here.given) >= self._count():
            living = self._living()
            if all(other in here.given for other in living) and not self._apart(set(living)):
                here.members = tuple(living)
                self._begin(here)
        return bool(here.members) and scheduler.now >= here.end_seconds

    def _begin(self, here: Round) -> None:
        """All have come: from now on the network works."""
        links, size = self._world.links, next(iter(here.given.values())).nbytes
        here.complete_seconds = here.end_seconds = self._world.scheduler.now
        if links.network is not None:
            here.end_seconds += links.network.collective_seconds(size, len(here.members), links.generator)
            self._world.scheduler.touch((self._channel, "collective"))  # they know now when to wake

    def _apart(self, ranks: set[int]) -> bool:
        now, cuts = self._world.scheduler.now, self._world.links.partitions
        return any(cut.divides(ranks, now) for cut in cuts)

    def on_return(self, rank: int, like: int) -> None:
        """``rank`` takes part from the round on that ``like`` calls next."""
        if rank in self._group:
            self._calls[rank] = self._calls.get(like, max(self._calls.values()))

    def _next_repair(self) -> float:
        now, cuts = self._world.scheduler.now, self._world.links.partitions
        return min((cut.end_seconds for cut in cuts if cut.end_seconds > now), default=math.inf)
