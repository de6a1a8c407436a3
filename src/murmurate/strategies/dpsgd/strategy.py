"""DPSGD: lock-free inside a node, asynchronous between nodes (Mohamad et al., Algorithms 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel, Message
from murmurate.replica.sparse import Scale
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.checkpoint_barrier import Cut
from murmurate.strategies.dpsgd.sparse_delta import NodeRows, fits
from murmurate.strategies.dpsgd.sparse_server import MasterRows
from murmurate.strategies.dpsgd.step_sizes import refuse_shrinking, scaled_rate
from murmurate.strategies.interface import (
    MemberEvent,
    Strategy,
    centre_of,
    replicas_of,
    require,
    shown_by_centre,
)
from murmurate.strategies.reply import answer, clear, demand_centre

_PUSH, _REPLY = "update", "parameters"
_IDLE_SECONDS = 0.002
_LOST = "v"

# What the threads of a node know together: their updates at the last push; 1 + the rank whose push is
# without an answer, or 0; the version of v in the base; the version that the oldest update since the last
# push was made from; how often v has come.
_PUSHED_AT, _AWAITED, _VERSION, _OLDEST, _PULLS = range(5)


@dataclass
class DPSGD(Strategy):
    """Update a node's shared vector u without a lock; every B updates push u - v; the master folds M.

    The lowest living thread of a node speaks with the master for it. Each push is answered at once with v as
    it then is (Algorithm 2, line 3, waits for no fold), and a node has one push under way at most.

    threads: p, replicas that make a node: ranks 0..p-1, p..2p-1, ... share memory. 0: all are one node.
    local_updates: B, updates of each replica between two pushes of its node (B~ = pB of the node).
    batch: M, pushed vectors that the master joins in one update of v.
    global_learning_rate: rho of Algorithm 1, line 4; a gradient moves v by rho times the optimizer's own rate
        eta. None is 1 over the number of nodes: what they moved since the same v then counts as its mean.
    global_momentum: on that step.
    scale_rates: scale eta and rho by Corollary 1, taking the given ones as right for p = B = M = 1.
    wait: for the master's answer, as a line 3 that follows line 10 would; False learns on until it comes.
        What was learned meanwhile is kept: u <- v' + (u - u at the push). If nothing was, that is u <- v'.
        (Differs: Algorithm 9, line 34, writes v' over what other threads did in between.)
    delay_bound: D; the master refuses an update of a v more than D of its own updates old, and the node goes
        on from the fresh v. 0: none is refused.
    shrinks: of which v a push takes its share, where gradients shrink all of it. Line 4 has that which the
        node had ``pulled``. Of the ``present`` one counts stay counts (``_master_rows``).
    deadline_seconds: how long a push or a wait may take. The outcome is to go on, and to push or pull later.
    """

    threads: int = 2
    local_updates: int = 10
    batch: int = 1
    global_learning_rate: float | None = None
    global_momentum: float = 0.0
    scale_rates: bool = False
    wait: bool = False
    delay_bound: int = 0
    shrinks: Literal["present", "pulled"] = "present"
    deadline_seconds: float = 10.0

    name: ClassVar[str] = "dpsgd"
    summary: ClassVar[str] = "lock-free inside a node; every B updates push u - v; the master folds M"
    paper: ClassVar[str] = "Mohamad et al., Algorithms 1 and 2 (DPSGD); 8 and 9 (HSA2C)"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.MAIL, Capability.REGISTER, Capability.SHARED_MEMORY}
    )
    remedy: ClassVar[str] = "--strategy.threads 1 makes each replica a node of its own, which shares nothing"
    centre: ClassVar[bool] = True
    hears_every: ClassVar[str] = "--strategy.local-updates or --strategy.batch"
    keeps_scale: ClassVar[bool] = True
    counts_all: ClassVar[bool] = True
    carries: ClassVar[str] = "deltas"
    bounded_by: ClassVar[str] = "delay_bound: older updates are refused"
    on_death: ClassVar[str] = "its node goes on, led by the next; without its master the run stops"
    on_slow: ClassVar[str] = "nobody waits for it"
    on_join: ClassVar[str] = "lives on its node's vector; a node of one takes a living peer's"

    _v: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _saved: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _params: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _base: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _clocks: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _marks: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _nodes: list[list[int]] = field(default_factory=list, init=False, repr=False, compare=False)
    _node: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _pushes: Cut = field(default_factory=lambda: Cut(_PUSH), init=False, repr=False, compare=False)
    _rows: NodeRows | None = field(default=None, init=False, repr=False, compare=False)
    _master_rows: MasterRows | None = field(default=None, init=False, repr=False, compare=False)
    _unfolded: list[Message] = field(default_factory=list, init=False, repr=False, compare=False)
    _master: torch.optim.SGD | None = field(default=None, init=False, repr=False, compare=False)
    _rank: int = field(default=0, init=False, repr=False, compare=False)
    _scale: Scale = field(default_factory=Scale, init=False, repr=False, compare=False)
    _kept: Message | None = field(default=None, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _pulled_at: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, least in (("threads", 0), ("local_updates", 1), ("batch", 1), ("delay_bound", 0)):
            value = getattr(self, what)
            require(value >= least, f"{what} is at least {least}, not {value}")
        right = self.global_learning_rate is None or self.global_learning_rate > 0
        require(right, "global_learning_rate is above 0")

    def needed(self) -> frozenset[Capability]:
        """Nodes of one thread have nothing to share: they may sit on different hosts."""
        return self.needs - {Capability.SHARED_MEMORY} if self.threads == 1 else self.needs

    def _threads_of(self, replicas: int) -> int:
        """p of so many replicas."""
        return min(self.threads or replicas, replicas)

    def _rho(self, replicas: int) -> float:
        p = self._threads_of(replicas)
        nodes = -(-replicas // p)
        rho = self.global_learning_rate or 1 / nodes  # their moves since the same v count as the mean
        return scaled_rate(rho, p, self.local_updates, self.batch) if self.scale_rates else rho

    def check_shrinking(self, eta: float, replicas: int) -> None:
        """The p B updates of a push leave s = (1 - eta)^(pB) of v, so M pushes take rho M (1 - s) of it."""
        p, rho = self._threads_of(replicas), self._rho(replicas)
        if self.scale_rates:
            eta = scaled_rate(eta, p, self.local_updates, self.batch)
        refuse_shrinking(eta, rho, p, self.local_updates, self.batch)

    def attach(self, replica: Replica, channel: Channel) -> None:
        replicas = replicas_of(channel)
        p = self._threads_of(len(replicas))
        nodes = [list(replicas[k : k + p]) for k in range(0, len(replicas), p)]
        mine = next((k for k, node in enumerate(nodes) if channel.rank in node), None)

        def shared(key: str, like: Tensor) -> Tensor:
            """Every member asks for every node's, in the same order; its own is what it gets."""
            if p == 1:
                return like
            found = [channel.shared(f"node {k}: {key}", like) for k in range(len(nodes))]
            return like if mine is None else found[mine]

        params = self._params = shared("params", replica.params.detach())
        self._base = shared("base", replica.params.detach().clone())
        self._marks = shared("marks", torch.zeros(5, dtype=torch.int64))
        # one cell a replica, so that no count is lost to a race
        clocks = torch.zeros(channel.size, dtype=torch.int64)
        self._clocks = clocks if p == 1 else channel.shared("clocks", clocks)
        rho = self._rho(len(replicas))
        if self.scale_rates:
            replica.scale_rates(scaled_rate(1.0, p, self.local_updates, self.batch))
        # optimizer moments are shared in a node, as in Hogwild
        replica.rebind(params, shared if p > 1 else None)
        logs = shared("log scales", torch.zeros(channel.size, dtype=torch.float64))
        marks = shared("scale marks", torch.zeros(Scale.marks(channel.size), dtype=torch.int64))
        replica.scale.share(logs, marks, channel.rank)
        rows = NodeRows(replica, self._base, shared)
        self._rank, self._nodes, self._scale = channel.rank, nodes, replica.scale
        if mine is None:
            replica.touched = None
            self._master_rows = MasterRows(replica, nodes, pulled=self.shrinks == "pulled")
            self._v = replica.params
            self._master = torch.optim.SGD([replica.params], lr=rho, momentum=self.global_momentum)
        else:
            self._node = node = nodes[mine]
            self._rows = rows
            replica.make_room = lambda: rows.make_room(self._others(channel))
            # schedules follow all updates; those of other nodes are taken to be as many as here
            replica.steps_taken = lambda: self._done() * len(replicas) // len(node)

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        demand_centre(channel, _LOST)
        replica.update()  # Algorithm 2, line 8
        self._clocks[channel.rank] += 1  # our own cell; not the replica's clock, which may come from a peer
        living = set(self._node) & set(channel.living())
        if channel.rank == min(living):
            self._lead(replica, channel, len(living))
        pulled = int(self._marks[_PULLS]) > self._rounds
        if pulled:
            self._rounds += 1  # one at a time: a round is counted when it is seen
            self._pulled_at = replica.clock
        return Exchange(self._rounds, len(living) + pulled, replica.clock - self._pulled_at)

    def _lead(self, replica: Replica, channel: Channel, p: int) -> None:
        if int(self._marks[_AWAITED]) == channel.rank + 1:
            kept, self._kept = self._kept, None
            self._pull(kept or channel.receive(_REPLY), replica, channel)
        elif self._marks[_AWAITED]:
            self._marks[_AWAITED] = 0  # it goes to the leader before us, who is dead
        stretched = self._rows is not None and self._rows.stretched
        if stretched and self._marks[_AWAITED] and self._kept is None:
            self._pull(answer(channel, _REPLY, self.deadline_seconds, _LOST), replica, channel)
        due = stretched or self._done() - int(self._marks[_PUSHED_AT]) >= self.local_updates * p
        if due and not self._marks[_AWAITED]:
            clear(channel, _REPLY)
            self._push(replica, channel)
            if self._marks[_AWAITED] and self.wait:
                self._pull(answer(channel, _REPLY, self.deadline_seconds, _LOST), replica, channel)

    def _done(self) -> int:
        """Updates of all threads of this node so far."""
        return int(self._clocks[self._node].sum())

    def _push(self, replica: Replica, channel: Channel) -> None:
        """Push u - v (line 10). Other threads write on, so the base advances by just what was pushed.

        Of a leader killed between the push and that, the next one pushes the same again: at most one push of
        its node.
        """
        if self._rows is not None and self._rows.used:
            self._push_rows(self._rows, replica, channel)
            return
        update = replica.params.detach() - self._base
        if self._sent(update, self._done(), channel):
            self._base.add_(update)

    def _sent(self, update: Tensor, done: int, channel: Channel) -> bool:
        """Whether the centre gets it: then the node waits for an answer."""
        oldest, patience = int(self._marks[_OLDEST]), self.deadline_seconds
        sent = channel.send(centre_of(channel), _PUSH, update, oldest, deadline_seconds=patience)
        if sent:
            self._marks[_PUSHED_AT], self._marks[_OLDEST] = done, self._marks[_VERSION]
            self._marks[_AWAITED] = channel.rank + 1
        else:
            demand_centre(channel, _LOST)
        return sent

    def _push_rows(self, rows: NodeRows, replica: Replica, channel: Channel) -> None:
        """The same, where u has moved in a few rows only (``_parcels``)."""
        with replica.scale.closed(self._others(channel)) as alone:
            if not alone:
                return  # somebody stopped in the middle of a write: later
            done, parcel = self._done(), rows.take(int(self._marks[_VERSION]))
        short = fits(len(parcel.row), rows.width, replica.params)
        if self._sent(parcel.pack() if short else rows.dense(parcel), done, channel):
            with replica.scale.closed(self._others(channel)) as alone:
                rows.advance(parcel, alone)

    def _others(self, channel: Channel) -> list[int]:
        """Living threads of this node."""
        return self._node if len(self._node) == 1 else sorted(set(self._node) & set(channel.living()))

    def _pull(self, message: Message | None, replica: Replica, channel: Channel) -> None:
        """u <- v' + (u - u at the push) (line 3)."""
        if message is None:
            return
        u, version, refused = replica.params.detach(), abs(int(message.note)), message.note < 0
        # what else was learned since a refused push is of the same old v
        fresh = refused or (len(self._node) == 1 and self._done() == int(self._marks[_PUSHED_AT]))
        if self._rows is not None and self._rows.used:
            with replica.scale.closed(self._others(channel)) as alone:
                if not alone:
                    self._kept = message  # somebody stopped in the middle of a write: later
                    return
                self._rows.pull(message.x, afresh=refused)
        elif fresh:
            u.copy_(message.x)
            self._base.copy_(message.x)
        else:
            u.add_(message.x - self._base)
            self._base.copy_(message.x)
        if fresh:
            self._marks[_OLDEST] = version
        self._marks[_VERSION] = version
        self._marks[_PULLS] += 1
        self._marks[_AWAITED] = 0
        self.refused += refused

    # -- the master ---------------------------------------------------------------------------------

    def serve(self, replica: Replica, channel: Channel) -> bool:
        """Collect M updates, then v <- v + rho sum_m w_m (Algorithm 1, lines 3 and 4)."""
        message = self._pushes.receive(channel, _IDLE_SECONDS)
        if message is not None:
            self._fold(message, replica, channel)
        return message is not None

    def _fold(self, message: Message, replica: Replica, channel: Channel) -> None:
        """The version answered counts updates of v; a minus says that what was pushed is refused."""
        rows = self._master_rows
        if rows is None:
            raise RuntimeError("attach comes before serve")
        refused = 0 < self.delay_bound < replica.clock - message.note or not rows.is_sound(message.x)
        self.refused += refused
        if not refused:
            self._unfolded.append(message)
        if len(self._unfolded) == self.batch:
            self._step_master(replica)
        channel.send(
            message.sender, _REPLY, rows.answer(message.x), note=replica.clock * (-1 if refused else 1)
        )
        rows.answered(message.sender, channel.living(), unfolded=bool(self._unfolded))

    def _step_master(self, replica: Replica) -> None:
        rows = self._master_rows
        if self._master is None or rows is None:
            raise RuntimeError("attach comes before serve")
        if all(rows.is_parcel(one.x) for one in self._unfolded) and not self.global_momentum:
            rows.step([one.x for one in self._unfolded], self._master.param_groups[0]["lr"])
        else:
            updates = [rows.dense(one.x) for one in self._unfolded]
            rows.change_all()
            if replica.scale.logarithm:
                replica.fold()
            replica.grad.zero_()
            for update in updates:
                replica.grad.sub_(update)
            self._master.step()
        replica.tick()
        rows.remember()
        self._unfolded.clear()

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        return shown_by_centre(replica, channel)

    def on_member(self, event: MemberEvent) -> None:
        if event.kind == "joined":
            self._pushes.forget(event.rank)

    # -- state --------------------------------------------------------------------------------------

    def settle(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """What nodes pushed before the cut is with the master, folded or not; answers are given anew."""
        if channel.rank != centre_of(channel):
            # each thread, as each may have to lead
            return self._pushes.announce(channel, number, [centre_of(channel)], self._params)
        return self._pushes.drain(
            channel,
            number,
            replicas_of(channel),
            lambda one: self._fold(one, replica, channel),
            deadline_seconds,
        )

    def _leader(self, node: list[int], channel: Channel) -> int | None:
        return min(set(node) & set(channel.living()), default=None)

    def joined(self, replica: Replica, channel: Channel) -> None:
        """The former life's reply will not come, but after ``resumed``; rounds are those of the own node."""
        if self._saved and len(self._node) == 1:
            self._restore(channel)
        if self._saved and int(self._marks[_AWAITED]) == channel.rank + 1:
            self._marks[_AWAITED] = 0
        self._rounds, self._pulled_at = int(self._marks[_PULLS]), replica.clock
        self._saved = {}

    def state(self) -> dict[str, Any]:
        kept = {
            "rank": self._rank,
            # whole, though others write on
            "params": self._scale.steady(lambda scale: self._params * scale),
            "base": self._base.clone() if self._rows is None else self._rows.values(),
            "marks": self._marks.clone(),
            "clocks": self._clocks.clone(),
            "unfolded": {str(number): one.x.clone() for number, one in enumerate(self._unfolded)},
            "rounds": self._rounds,
            "pulled_at": self._pulled_at,
            "refused": self.refused,
        }
        momentum = None if self._master is None else self._master.state[self._v].get("momentum_buffer")
        return kept | ({} if momentum is None else {"momentum": momentum.clone()})

    def load(self, state: dict[str, Any]) -> None:
        self._saved = state
        torch.maximum(self._clocks, state["clocks"], out=self._clocks)
        self._rounds, self._pulled_at = int(state["rounds"]), int(state["pulled_at"])
        self.refused = int(state["refused"])
        left = state.get("unfolded", {})
        self._unfolded = [Message(-1, left[key]) for key in sorted(left, key=int)]
        if self._master is not None and "momentum" in state:
            self._master.state[self._v]["momentum_buffer"] = state["momentum"].clone()

    def resumed(self, replica: Replica, channel: Channel) -> None:
        """Each node goes on from its leader's u and base; the master answers all of them once."""
        if self._master_rows is not None:
            self._master_rows.restart()
            for node in self._nodes:
                leader = self._leader(node, channel)
                if leader is not None:
                    channel.send(leader, _REPLY, replica.values().detach(), note=replica.clock)
        elif channel.rank == self._leader(self._node, channel):
            self._restore(channel)
        self._saved = {}

    def _restore(self, channel: Channel) -> None:
        saved, rank = self._saved, channel.rank
        own = int(saved["rank"]) in self._node
        base = saved["base"] if own else saved["params"]  # another node pushes what it learned itself
        if self._rows is not None:
            self._rows.restore(saved["params"], base, foreign=not own)
        if self.threads == 1:  # others cannot tell its count, and schedules go on from the peer's
            self._clocks[rank] = max(self._clocks[rank], saved["clocks"][int(saved["rank"])])
        self._marks.copy_(saved["marks"])
        self._marks[_PUSHED_AT] = min(int(self._marks[_PUSHED_AT]), self._done()) if own else self._done()
        self._marks[_AWAITED] = rank + 1
