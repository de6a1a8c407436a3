"""The collectives of a script's own loop: over all replicas, within a worker, and across workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from murmurate.fabric.interface import Fabric, ranks_across, ranks_within
from murmurate.replicator.collectives import Group, Reduction
from murmurate.replicator.gather import TensorExchange
from murmurate.replicator.input_split import ReplicaIndex
from murmurate.replicator.replicator import Replicator, check_common_rounds
from murmurate.strategies.interface import Strategy


class LoopCollectives(Replicator):
    """A replicator that also knows its rank, and has collectives for the script, all of which raise Refusal
    under a strategy without common rounds.

    workers: number of workers, to which the replicas belong in blocks of equal size.
    """

    def __init__(self, strategy: Strategy, fabric: Fabric, workers: int) -> None:
        super().__init__(strategy, fabric)
        worker = self.rank // (self.size // workers)
        self._index = ReplicaIndex(self.rank, self.size, worker, workers)
        self._exchanges: dict[tuple[int, ...], TensorExchange] = {}  # by the ranks of a group
        self._has_collectives = False  # whether the script has asked for any
        if strategy.common_rounds:  # opened on all members at the same point, before any collective
            self._exchange(range(self.size))

    def __deepcopy__(self, memo: dict[int, Any]) -> LoopCollectives:
        """This object: the copy of a module that makes collectives makes them among the same replicas."""
        return self

    @property
    def rank(self) -> int:
        """The number of this replica, from 0; at a centre, the number of replicas."""
        return self.fabric.rank

    @property
    def size(self) -> int:
        """The number of replicas that were started, also after some have died or ended, without a centre."""
        return self.fabric.size - self.strategy.centre

    @property
    def _more_pushes(self) -> str:
        fields = self.strategy.behaviour.pushes_after.replace("--strategy.", "").replace("-", "_")
        return f"Make more steps, or the strategy's {fields} smaller."

    @property
    def everyone(self) -> Group:
        """All replicas."""
        return self._group(range(self.size), "a collective")

    @property
    def within(self) -> Group:
        """The replicas of this replica's worker."""
        return self._group(ranks_within(self.rank, self._index.per_worker), "a collective within workers")

    @property
    def across(self) -> Group:
        """The replicas with the same position in their workers as this one."""
        ranks = ranks_across(self.rank, self._index.per_worker, self.size)
        return self._group(ranks, "a collective across workers")

    def _group(self, ranks: Sequence[int], feature: str) -> Group:
        check_common_rounds(self.strategy, feature)
        self._has_collectives = True
        return Group(self._exchange(ranks))

    def _exchange(self, ranks: Sequence[int]) -> TensorExchange:
        members = tuple(ranks)
        if members not in self._exchanges:
            self._exchanges[members] = TensorExchange(self.fabric, members)
        return self._exchanges[members]

    def mean(self, x: Any) -> Any:
        """See ``Group.mean``; this method and the six below call those of ``everyone``."""
        return self.everyone.mean(x)

    def sum(self, x: Any) -> Any:
        """The sum over all replicas: ``Group.sum``."""
        return self.everyone.sum(x)

    def reduce(self, x: Any, operation: Reduction) -> Any:
        """mean, sum, min, max, product or any function over all replicas: ``Group.reduce``."""
        return self.everyone.reduce(x, operation)

    def gather(self, x: Any, join: bool = False) -> Any:
        """The tensors of all replicas, by rank: ``Group.gather``."""
        return self.everyone.gather(x, join)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """``x`` of the replica ``root``: ``Group.broadcast``."""
        return self.everyone.broadcast(x, root)

    def map_reduce(self, function: Callable[[Any], Any], items: Sequence[Any], operation: Reduction) -> Any:
        """``operation`` over ``function`` of every item, the work shared: ``Group.map_reduce``."""
        return self.everyone.map_reduce(function, items, operation)

    def map_gather(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Any:
        """``function`` of every item, the work shared among all replicas: ``Group.map_gather``."""
        return self.everyone.map_gather(function, items)

    @property
    def bytes_exchanged(self) -> int:
        return super().bytes_exchanged + sum(e.bytes for e in self._exchanges.values())

    @property
    def waiting_seconds(self) -> float:
        return super().waiting_seconds + sum(e.waiting_seconds for e in self._exchanges.values())
