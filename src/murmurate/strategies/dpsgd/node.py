"""A node of DPSGD: the memory that its threads share, its pushes and pulls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel, Message
from murmurate.replica.vector import Exchange, Replica

REPLY = "parameters"  # the tag of the master's replies

Memory = Callable[[str, Tensor], Tensor]


def nodes_of(replicas: Sequence[int], threads: int) -> list[list[int]]:
    """Ranks 0..p-1, p..2p-1, ..., with p ``threads`` in each."""
    return [list(replicas[k : k + threads]) for k in range(0, len(replicas), threads)]


def leader_of(ranks: Sequence[int], channel: Channel) -> int | None:
    """The lowest living rank; None if all are dead."""
    return min(set(ranks) & set(channel.living()), default=None)


def _node_memory(channel: Channel, nodes: Sequence[Sequence[int]]) -> Memory:
    """A function from a key and an initial value to memory that the threads of this member's node share.

    Every member requests the memory of all nodes, in the same order, and uses that of its own node. Nodes of
    one thread share no memory.
    """

    def shared(key: str, like: Tensor) -> Tensor:
        memory = [channel.shared(f"node {k}: {key}", like) for k in range(len(nodes))]
        return next((x for x, ranks in zip(memory, nodes, strict=True) if channel.rank in ranks), like)

    return shared if len(nodes[0]) > 1 else lambda key, like: like


def _shared_counter(cell: int) -> Any:
    """A property: one of ``Node.counters``, an integer that all threads of a node share."""

    def write(node: Node, value: int) -> None:
        node.counters[cell] = value

    return property(lambda node: int(node.counters[cell]), write)


class Node:
    """The node's vector u, the master's v from which u was trained (``base``), and counters, in memory that
    the threads of a node share.

    A thread is a replica. ranks: ranks of the node's replicas, at most ``threads``. rank: this replica's.
    clocks: [members] int64, updates by rank, in separate cells, so that no count is lost to a race.
    """

    pushed_at = _shared_counter(0)  # updates of all its threads at the last push
    awaited_rank_plus_1 = _shared_counter(1)  # 1 + the rank whose push has no reply yet; 0: none
    version = _shared_counter(2)  # version of the v in ``base``
    oldest_version = _shared_counter(3)  # version of v from which the oldest unpushed update was made
    pulls = _shared_counter(4)  # number of pulls of v

    def __init__(
        self,
        replica: Replica,
        ranks: Sequence[int],
        rank: int,
        shared: Memory = lambda key, like: like,
        *,
        clocks: Tensor | None = None,
        threads: int = 1,
    ) -> None:
        self.replica, self.ranks, self.rank = replica, list(ranks), rank
        self.base = shared("base", replica.params.detach().clone())
        self.counters = shared("marks", torch.zeros(5, dtype=torch.int64))
        self.clocks = torch.zeros(max(ranks) + 1, dtype=torch.int64) if clocks is None else clocks
        self.reply: Message | None = None  # a reply that ``_take`` could not apply yet
        self._rounds = self._pulled_at = 0
        self._saved: dict[str, Any] = {}

    @classmethod
    def join(cls, replica: Replica, channel: Channel, nodes: Sequence[Sequence[int]]) -> Self:
        """The node of this member's rank; the master, which is in no node, gets one of its own."""
        shared = _node_memory(channel, nodes)
        # optimizer moments are shared in a node, as in Hogwild
        threads, clocks = len(nodes[0]), torch.zeros(channel.size, dtype=torch.int64)
        state = None if threads == 1 else shared
        clocks = clocks if threads == 1 else channel.shared("clocks", clocks)
        replica.rebind(shared("params", replica.params.detach()), state)
        ranks = next((ranks for ranks in nodes if channel.rank in ranks), [channel.rank])
        return cls(replica, ranks, channel.rank, shared, clocks=clocks, threads=threads)

    def update_count(self) -> int:
        """The number of updates of all its threads so far."""
        return int(self.clocks[self.ranks].sum())

    @property
    def must_push(self) -> bool:
        """Whether a push is necessary before B updates have been made."""
        return False

    def difference(self) -> Tensor | None:
        """What to push: u - v [N], or a packed ``SparseDelta``; None if it cannot be computed yet."""
        return self.replica.params.detach() - self.base

    def pushed(self, difference: Tensor, updates: int) -> None:
        """``difference`` was sent after ``updates`` updates of all threads.

        Other threads go on, so the base advances by exactly ``difference``.
        """
        self.pushed_at, self.oldest_version = updates, self.version
        self.awaited_rank_plus_1 = self.rank + 1
        self.reply = None  # to an earlier push, if another replica has led the node meanwhile
        self._advance(difference)

    def pull(self, reply: Message) -> bool:
        """u <- v' + (u - u at the push); True if the push was refused.

        The reply's note is the number of updates of v; negative if the push was too old. Then the updates
        made since the push are dropped, too, as they started from the same old v.
        """
        version, refused = abs(int(reply.note)), reply.note < 0
        equals_v = refused or self._is_idle()  # whether u will equal v', without newer updates
        self.reply = None if self._take(reply.x, afresh=refused) else reply
        if self.reply is not None:
            return False
        if equals_v:
            self.oldest_version = version
        self.version = version
        self.pulls += 1
        self.awaited_rank_plus_1 = 0
        return refused

    def exchange(self, living: int) -> Exchange:
        """The result of this thread's last update. living: number of threads that update this vector."""
        pulled = self.pulls > self._rounds
        if pulled:
            self._rounds += 1  # a step counts at most one round, however many pulls there were
            self._pulled_at = self.replica.clock
        return Exchange(self._rounds, living + pulled, self.replica.clock - self._pulled_at)

    def _is_idle(self) -> bool:
        """Whether certainly no update was made since the last push; only a single thread can be certain."""
        return len(self.ranks) == 1 and self.update_count() == self.pushed_at

    def _advance(self, difference: Tensor) -> None:
        self.base.add_(difference)

    def _take(self, v: Tensor, *, afresh: bool) -> bool:
        """Apply the reply ``v``; False if that is not possible yet. afresh: whether to drop the updates since
        the push."""
        u = self.replica.params.detach()
        if afresh or self._is_idle():
            u.copy_(v)
        else:
            u.add_(v - self.base)
        self.base.copy_(v)
        return True

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        counts = {"marks": self.counters.clone(), "clocks": self.clocks.clone(), "rank": self.rank}
        return counts | self._vectors() | {"rounds": self._rounds, "pulled_at": self._pulled_at}

    def load(self, state: dict[str, Any]) -> None:
        """Restore counts, which only grow; ``resumed`` restores the vectors, once for each node."""
        self._saved = state
        torch.maximum(self.clocks, state["clocks"], out=self.clocks)
        self._rounds, self._pulled_at = int(state["rounds"]), int(state["pulled_at"])

    def resumed(self, channel: Channel) -> None:
        """When all members have loaded their states, continue from the leader's u and base; the master sends
        a reply."""
        if self.rank == leader_of(self.ranks, channel):
            self._restore()
        self._saved = {}

    def joined(self) -> None:
        """Continue from a peer's state. The process that this one replaces is dead, and will get no reply."""
        if self._saved and len(self.ranks) == 1:
            self._restore()
        if self._saved and self.awaited_rank_plus_1 == self.rank + 1:
            self.awaited_rank_plus_1 = 0
        self._rounds, self._pulled_at = self.pulls, self.replica.clock
        self._saved = {}

    def _restore(self) -> None:
        saved, saved_rank = self._saved, int(self._saved["rank"])
        is_own = saved_rank in self.ranks
        self._set_vectors(saved, is_own)
        if len(self.ranks) == 1:  # no other member counts its updates, so schedules continue from the peer's
            self.clocks[self.rank] = max(self.clocks[self.rank], saved["clocks"][saved_rank])
        self.counters.copy_(saved["marks"])
        self.pushed_at = min(self.pushed_at, self.update_count()) if is_own else self.update_count()
        self.awaited_rank_plus_1 = self.rank + 1

    def _vectors(self) -> dict[str, Any]:
        return {"params": self.replica.params.detach().clone(), "base": self.base.clone()}

    def _set_vectors(self, saved: dict[str, Any], is_own: bool) -> None:
        """Restore u and the base. is_own: whether ``saved`` is this node's; another node pushes its updates
        itself."""
        self.replica.params.detach().copy_(saved["params"])
        self.base.copy_(saved["base"] if is_own else saved["params"])
