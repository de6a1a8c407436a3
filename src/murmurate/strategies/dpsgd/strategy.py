"""DPSGD: lock-free inside a node, asynchronous between nodes (Mohamad et al., Algorithms 1 and 2).

Where gradients are row-sparse, pushes and replies contain a few rows of the matrix: ``SparseNode`` and
``SparseMaster`` then replace ``Node`` and ``Master``.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from murmurate.fabric.interface import Capability, Channel, Message
from murmurate.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Seconds, UnitInterval
from murmurate.replica.optimizer_state import construct
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.checkpoint_barrier import CheckpointBarrier
from murmurate.strategies.dpsgd.master import Master
from murmurate.strategies.dpsgd.node import REPLY, Node, nodes_of
from murmurate.strategies.dpsgd.sparse_master import SparseMaster
from murmurate.strategies.dpsgd.sparse_node import SparseNode
from murmurate.strategies.dpsgd.step_sizes import refuse_shrinking, scaled_rate
from murmurate.strategies.interface import Behaviour, MemberEvent, Strategy, centre_of, replicas_of
from murmurate.strategies.reply import discard_replies, require_centre, wait_for_reply

_PUSH = "update"  # the tag of pushes
_LOST = "v"  # what is lost with the centre


class _RuleSizes(NamedTuple):
    """p; batch: M; rate_factor: the factor of Corollary 1 for eta and rho; rho."""

    p: int
    batch: int
    rate_factor: float
    rho: float


@dataclass
class DPSGD(Strategy):
    """Update a node's vector u without a lock; every B updates push u - v; the master applies M pushes.

    The leader of a node, its living replica of the lowest rank, communicates with the master. The master
    replies to each push at once with the present v (Algorithm 2, line 3, waits for no update of v), and a
    node has at most one push without a reply.

    threads: p, replicas of a node: ranks 0..p-1, p..2p-1, ... share memory. 0: all are one node.
    local_updates: B, updates between two pushes of a node; see ``counted``.
    counted: whose updates B counts: each ``replica``'s (so that a node pushes after B~ = pB updates), or the
        ``node``'s, on a counter that its replicas share (Algorithm 9, lines 29 and 30). The leader pushes
        after an update of its own.
    batch: M, pushes that the master combines in one update of v. 0 is the number of nodes.
    global_learning_rate: rho of Algorithm 1, line 4; a gradient moves v by rho times the optimizer's own rate
        eta. None is 1 over the number of nodes: then v moves by the mean of the nodes' movements.
    global_momentum: momentum of the master's step.
    scale_rates: whether to scale eta and rho by Corollary 1, as values that are meant for p = B = M = 1.
    wait: whether to wait for the master's reply after a push (Algorithm 2, line 10, then line 3 of the next
        pass). Else the node goes on learning until the reply v' arrives, and keeps the updates made
        meanwhile: u <- v' + (u - u at the push).
    delay_bound: D'; the master refuses a push made from a v more than D' of its own updates old, and the node
        goes on from the new v. 0: none is refused.
    shrinks: where gradients are row-sparse and shrink all of v, the v of which a push takes away a share: the
        one that the node had ``pulled`` (Algorithm 1, line 4), or the ``present`` one, with which counts stay
        positive (``sparse_master``).
    deadline_seconds: longest time for a push or a wait. Afterwards the node goes on, and pushes or pulls
    later.
    """

    threads: NonNegativeInt = 2
    local_updates: PositiveInt = 10
    batch: NonNegativeInt = 1
    global_learning_rate: PositiveFloat | None = None
    global_momentum: UnitInterval = 0.0
    scale_rates: bool = False
    wait: bool = False
    delay_bound: NonNegativeInt = 0
    shrinks: Literal["present", "pulled"] = "present"
    deadline_seconds: Seconds = 10.0
    counted: Literal["replica", "node"] = field(default="replica", metadata={"since": 6})

    name: ClassVar[str] = "dpsgd"
    summary: ClassVar[str] = "lock-free inside a node; every B updates push u - v; the master applies M"
    paper: ClassVar[str] = "Mohamad et al., Algorithms 1 and 2 (DPSGD); 8 and 9 (HSA2C)"
    centre: ClassVar[bool] = True
    counts_all: ClassVar[bool] = True
    period_field: ClassVar[str] = "local_updates"
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="deltas",
        bounded_by="delay_bound: older updates are refused",
        on_death="its node goes on, led by the next; without its master the run stops",
        on_slow="no replica waits for it",
        on_join="uses its node's vector; a node of one takes a living peer's",
        needs_less="--strategy.threads 1 (threads=1 in Python) gives each replica a node of its own",
        pushes_after="--strategy.local-updates or --strategy.batch",
    )

    _node: Node = field(init=False, repr=False, compare=False)  # at a replica
    _master: Master = field(init=False, repr=False, compare=False)  # at the centre
    _role: Node | Master = field(init=False, repr=False, compare=False)  # whichever this member has
    _pushes: CheckpointBarrier = field(init=False, repr=False, compare=False)

    @property
    def needs(self) -> frozenset[Capability]:
        """Nodes of one replica share no memory: they may be on different hosts."""
        memory = frozenset() if self.threads == 1 else frozenset({Capability.SHARED_MEMORY})
        return memory | {Capability.MAIL, Capability.REGISTER}

    def check(self, replicas: int, *, shrinks: float = 0.0) -> None:
        sizes = self._sizes(replicas)
        p = sizes.p if self.counted == "replica" else 1
        refuse_shrinking(sizes.rate_factor * shrinks, sizes.rho, p, self.local_updates, sizes.batch)

    def with_model_steps(self, rate: float) -> DPSGD:
        """eta = rho = rate / (p B M)^(1/4) (equation 13), unless the user has set rho."""
        if self.global_learning_rate is not None:
            return self
        return dataclasses.replace(self, global_learning_rate=rate, scale_rates=True)

    def _sizes(self, replicas: int) -> _RuleSizes:
        """The sizes in a run of so many replicas."""
        p = min(self.threads or replicas, replicas)
        nodes = -(-replicas // p)
        batch = self.batch or nodes
        updates_over_b = p if self.counted == "replica" else 1  # updates of a push, divided by B
        rate_factor = scaled_rate(1.0, updates_over_b, self.local_updates, batch) if self.scale_rates else 1.0
        return _RuleSizes(p, batch, rate_factor, rate_factor * (self.global_learning_rate or 1 / nodes))

    def attach(self, replica: Replica, channel: Channel) -> None:
        replicas, self._pushes = replicas_of(channel), CheckpointBarrier(_PUSH)
        sizes = self._sizes(len(replicas))
        nodes, sparse = nodes_of(replicas, sizes.p), replica.row_width is not None
        replica.scale_rates(sizes.rate_factor)
        node = (SparseNode if sparse else Node).join(replica, channel, nodes)
        if channel.rank != centre_of(channel):
            self._node = self._role = node
            # schedules follow all updates; other nodes are assumed to have made as many as this one
            replica.count_steps_by(lambda: node.update_count() * len(replicas) // len(node.ranks))
            return
        make_optimizer = functools.partial(torch.optim.SGD, lr=sizes.rho, momentum=self.global_momentum)
        optimizer = construct(make_optimizer, [replica.params])
        master_arguments = replica, optimizer, nodes, sizes.batch, self.delay_bound
        self._master = self._role = (
            SparseMaster(*master_arguments, self.shrinks) if sparse else Master(*master_arguments)
        )

    # -- a thread of a node (Algorithm 2) -------------------------------------------------------------

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        require_centre(channel, _LOST)
        node = self._node
        replica.update()  # line 8
        node.clocks[channel.rank] += 1  # not the replica's clock, which may come from a peer
        living = set(node.ranks) & set(channel.living())
        if channel.rank == min(living):
            self._lead(node, channel, len(living))
        return node.exchange(len(living))

    def _lead(self, node: Node, channel: Channel, p: int) -> None:
        """Pull and push, where these are due. p: living replicas of the node."""
        if node.awaited_rank_plus_1 == channel.rank + 1:
            self._pull(node, channel, wait=node.must_push)
        elif node.awaited_rank_plus_1:
            node.awaited_rank_plus_1 = 0  # its reply goes to the former leader, which is dead
        updates = self.local_updates * (p if self.counted == "replica" else 1)
        due = node.must_push or node.update_count() - node.pushed_at >= updates  # line 5
        if due and not node.awaited_rank_plus_1:
            discard_replies(channel, REPLY)
            self._push(node, channel)
            if node.awaited_rank_plus_1 and self.wait:
                self._pull(node, channel, wait=True)

    def _push(self, node: Node, channel: Channel) -> None:
        """Line 10. If a leader is killed before it has noted its push, the next leader repeats the push."""
        updates, difference, deadline = node.update_count(), node.difference(), self.deadline_seconds
        if difference is None:
            return
        if channel.send(
            centre_of(channel), _PUSH, difference, node.oldest_version, deadline_seconds=deadline
        ):
            node.pushed(difference, updates)
        else:
            require_centre(channel, _LOST)

    def _pull(self, node: Node, channel: Channel, *, wait: bool) -> None:
        reply = node.reply or wait_for_reply(
            channel, REPLY, self.deadline_seconds if wait else 0.0, _LOST
        )  # line 3
        if reply is not None:
            self.refused += node.pull(reply)

    # -- the master (Algorithm 1) ---------------------------------------------------------------------

    def serve(self, replica: Replica, channel: Channel) -> bool:
        """Collect M updates, then v <- v + rho sum_m w_m (lines 3 and 4)."""
        return self._pushes.serve(channel, functools.partial(self._take, channel=channel))

    def _take(self, push: Message, channel: Channel) -> None:
        self.refused += self._master.take(push, channel)

    def on_member(self, event: MemberEvent) -> None:
        self._pushes.on_member(event)

    def drain(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """The master takes all earlier pushes; those that are not yet M together are saved with its state. A
        reply in flight need not be saved: after a resume the master sends v to each node."""
        take, like = functools.partial(self._take, channel=channel), replica.params.detach()
        # each replica sends a marker, as each may be the leader
        return self._pushes.drain_to_centre(channel, number, take, deadline_seconds, like)

    def joined(self, replica: Replica, channel: Channel) -> None:
        self._node.joined()

    def resumed(self, replica: Replica, channel: Channel) -> None:
        self._role.resumed(channel)

    def state(self) -> dict[str, Any]:
        return self._role.state() | {"refused": self.refused}

    def load(self, state: dict[str, Any]) -> None:
        self.refused = int(state["refused"])
        self._role.load(state)
