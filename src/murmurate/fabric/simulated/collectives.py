"""Collectives of the simulated fabric: calls that members make in the same order, each complete once all
living members have made it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from torch import Tensor

from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.network_model import FabricState
from murmurate.fabric.simulated.scheduler import Wait


@dataclass(eq=False)
class Round:
    """One collective call: each member's input and, once a mean or gather is complete, who took part.

    left: members that have continued after it.
    """

    kind: str
    root: int | None
    inputs: dict[int, Tensor] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    complete_seconds: float = math.inf  # when all had called, and no cut divided them
    end_seconds: float = math.inf  # when the network has transferred everything
    mean: Tensor | None = None
    left: set[int] = field(default_factory=set)


class SimulatedCollectives:
    """All collectives of one channel: the k-th calls of all its members (k from 1 up) are matched.

    Ranks are those of the fabric. group: the ranks of the channel's members.
    """

    def __init__(
        self, state: FabricState, channel: str, deadline_seconds: float, group: tuple[int, ...]
    ) -> None:
        self._state, self._channel, self._deadline = state, channel, deadline_seconds
        self._group = frozenset(group)
        self._calls = dict.fromkeys(group, 0)
        self._rounds: dict[int, Round] = {}

    def run(self, rank: int, kind: str, x: Tensor, root: int | None = None) -> Round:
        """Contribute ``x`` to ``rank``'s next collective and wait until ``rank`` can continue.

        Raises ``FabricError`` at the deadline, for calls that do not match, and for a root that died without
        calling.
        """
        scheduler, topic = self._state.scheduler, (self._channel, "collective")
        self._calls[rank] += 1
        number = self._calls[rank]
        call = self._rounds.setdefault(number, Round(kind, root))
        # comparing with the first input is enough, as the others were compared with it
        for other, first in itertools.islice(call.inputs.items(), 1):
            if (call.kind, call.root, first.shape) != (kind, root, x.shape):
                raise FabricError(
                    f"Rank {rank} calls {_described(kind, root)} #{number} of {list(x.shape)} on "
                    f"'{self._channel}', rank {other} {_described(call.kind, call.root)} of "
                    f"{list(first.shape)}: make the same calls everywhere."
                )
        call.inputs[rank] = x.detach().clone()
        if self._can_leave(rank, call) or kind == "broadcast":
            scheduler.notify(topic)
        wait = Wait(
            topics=(topic,),
            ready=lambda: self._can_leave(rank, call),
            describe=lambda: f"{kind} #{number} of {self._expected(call)}, has {sorted(call.inputs)}",
            deadline_seconds=self._deadline,
            wake_at=lambda: call.end_seconds if call.members else self._next_repair(),
        )
        if not scheduler.wait(rank, wait):
            silent = [other for other in self._expected(call) if other not in call.inputs]
            if silent:
                cause = f"ranks {silent} did not call it within"
            else:
                cause = "its messages took more than" if call.members else "the network was partitioned for"
            raise FabricError(
                f"{kind} #{number} on '{self._channel}': {cause} {self._deadline:g} s. Shorten steps, "
                "messages and faults, or use a strategy without collectives."
            )
        if root is not None and root not in call.inputs:
            raise FabricError(f"{kind} #{number} on '{self._channel}': its root, rank {root}, is dead.")
        self._state.record(rank, kind, self._channel, root, number, call.members)
        call.left.add(rank)
        if len(call.left) >= self._count() and call.left >= set(self._living()):
            del self._rounds[number]
        return call

    def _living(self) -> list[int]:
        living = self._state.scheduler.living()
        return living if len(self._group) == self._state.size else [r for r in living if r in self._group]

    def _count(self) -> int:
        """The number of living members of the channel."""
        return len(self._group) - len(self._group & self._state.scheduler.dead)

    def _expected(self, call: Round) -> list[int]:
        return self._living() if call.root is None else [call.root]

    def _can_leave(self, rank: int, call: Round) -> bool:
        """Whether ``rank`` can continue. The first check after the last input determines who takes part."""
        scheduler = self._state.scheduler
        if call.root is not None:
            reachable = self._state.links.departure(call.root, rank, scheduler.now) == scheduler.now
            return call.root in scheduler.dead or (call.root in call.inputs and reachable)
        if not call.members and len(call.inputs) >= self._count():
            living = self._living()
            if all(other in call.inputs for other in living) and not self._is_partitioned(set(living)):
                call.members = tuple(living)
                self._begin(call)
        return bool(call.members) and scheduler.now >= call.end_seconds

    def _begin(self, call: Round) -> None:
        """All members have called: the transfer begins."""
        links, size = self._state.links, next(iter(call.inputs.values())).nbytes
        call.complete_seconds = call.end_seconds = self._state.scheduler.now
        if links.network is not None:
            call.end_seconds += links.network.collective_seconds(size, len(call.members), links.generator)
            self._state.scheduler.notify((self._channel, "collective"))  # waiting members can set alarms now

    def _is_partitioned(self, ranks: set[int]) -> bool:
        now, cuts = self._state.scheduler.now, self._state.links.partitions
        return any(cut.divides(ranks, now) for cut in cuts)

    def on_revival(self, rank: int, like: int) -> None:
        """Match the first collective that ``rank`` calls with the one that rank ``like`` calls next."""
        if rank in self._group:
            self._calls[rank] = self._calls.get(like, max(self._calls.values()))

    def _next_repair(self) -> float:
        now, cuts = self._state.scheduler.now, self._state.links.partitions
        return min((cut.end_seconds for cut in cuts if cut.end_seconds > now), default=math.inf)


def _described(kind: str, root: int | None) -> str:
    return kind if root is None else f"{kind} from rank {root}"
