"""DPSGD: lock-free inside a node, asynchronous between nodes (Mohamad et al., Algorithms 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Fabric, FabricError, Letter
from murmurate.strategies._cut import Cut
from murmurate.strategies.interface import Strategy, centre_of, replicas_of, require, shown_by_centre
from murmurate.vector import Exchange, Replica

_PUSH, _REPLY = "update", "parameters"
_IDLE_SECONDS = 0.02


def scaled_rate(rate: float, p: int, B: int, M: int, reference: tuple[int, int, int] = (1, 1, 1)) -> float:
    """rho' = rho (pBM / p'B'M')^(1/4) (Corollary 1): from ``reference``'s p, B, M to these.

    It holds for eta and for rho alike; a pushed gradient moves v by their product.
    """
    old = reference[0] * reference[1] * reference[2]
    return float(rate * (old / (p * B * M)) ** 0.25)


@dataclass
class DPSGD(Strategy):
    """Update a node's shared vector u without a lock; every B updates push u - v; the master folds M.

    threads: p, replicas that make a node: ranks 0..p-1, p..2p-1, ... share memory. 0: all are one node.
    local_updates: B, updates of each replica between two pushes of its node (B~ = pB of the node).
    batch: M, pushed vectors that the master joins in one update of v.
    global_learning_rate, global_momentum: rho of Algorithm 1, line 4, and momentum on that step.
    scale_rates: scale eta (the optimizer's rate) and rho by Corollary 1, taking the given ones as right for
        p = B = M = 1.
    wait: for the master's answer, as a line 3 that follows line 10 would; False learns on until it comes.
        What was learned meanwhile is kept: u <- v' + (u - u at the push). With ``wait`` and p = 1 that is
        u <- v'. (Differs: Algorithm 9, line 34, writes v' over what other threads did in between.)
    delay_bound: D; the master refuses an update of a v more than D of its own updates old. 0: none.
    """

    threads: int = 2
    local_updates: int = 10
    batch: int = 1
    global_learning_rate: float = 1.0
    global_momentum: float = 0.0
    scale_rates: bool = False
    wait: bool = False
    delay_bound: int = 0
    deadline_seconds: float = 10.0

    name: ClassVar[str] = "dpsgd"
    summary: ClassVar[str] = "lock-free inside a node; every B updates push u - v; the master folds M"
    paper: ClassVar[str] = "Mohamad et al., Algorithms 1 and 2 (DPSGD); 8 and 9 (HSA2C)"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.MAIL, Capability.REGISTER, Capability.SHARED_MEMORY}
    )
    centre: ClassVar[bool] = True
    carries: ClassVar[str] = "deltas"
    bounded_by: ClassVar[str] = "delay_bound: older updates are refused"
    on_death: ClassVar[str] = "its node goes on, led by another; without its master the run stops"
    on_slow: ClassVar[str] = "nobody waits for it"
    on_join: ClassVar[str] = "lives on its node's vector"

    refused: int = field(default=0, init=False, repr=False, compare=False)
    _v: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _saved: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _params: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _base: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _clocks: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _marks: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _nodes: list[list[int]] = field(default_factory=list, init=False, repr=False, compare=False)
    _node: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _pushes: Cut = field(default_factory=lambda: Cut(_PUSH), init=False, repr=False, compare=False)
    _unfolded: list[Letter] = field(default_factory=list, init=False, repr=False, compare=False)
    _master: torch.optim.SGD | None = field(default=None, init=False, repr=False, compare=False)
    _version: int = field(default=0, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _pulled_at: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, least in (("threads", 0), ("local_updates", 1), ("batch", 1), ("delay_bound", 0)):
            value = getattr(self, what)
            require(value >= least, f"{what} is at least {least}, not {value}")
        require(self.global_learning_rate > 0, "global_learning_rate is above 0")

    # -- the node -----------------------------------------------------------------------------------

    def attach(self, replica: Replica, fabric: Fabric) -> None:
        replicas = replicas_of(fabric)
        p = self.threads or len(replicas)
        nodes = [list(replicas[k : k + p]) for k in range(0, len(replicas), p)]
        mine = next((k for k, node in enumerate(nodes) if fabric.rank in node), None)

        def shared(key: str, like: Tensor) -> Tensor:
            """Every member asks for every node's, in the same order; its own is what it gets."""
            found = [fabric.shared(f"node {k}: {key}", like) for k in range(len(nodes))]
            return like if mine is None else found[mine]

        params = self._params = shared("params", replica.params.detach())
        self._base = shared("base", replica.params.detach())
        # pushed_at, awaited, version of v in the base, how often it changed
        self._marks = shared("marks", torch.zeros(4, dtype=torch.int64))
        self._clocks = fabric.shared("clocks", torch.zeros(fabric.size, dtype=torch.int64))
        rho = self.global_learning_rate
        if self.scale_rates:
            rho = scaled_rate(rho, p, self.local_updates, self.batch)
            replica.scale_rates(scaled_rate(1.0, p, self.local_updates, self.batch))
        # optimizer moments are shared in a node, as in Hogwild; the master gets its own back
        replica.rebind(params, shared)
        self._nodes = nodes
        if mine is None:
            self._v = replica.params
            self._master = torch.optim.SGD([replica.params], lr=rho, momentum=self.global_momentum)
        else:
            self._node = nodes[mine]

    def step(self, replica: Replica, fabric: Fabric) -> Exchange:
        replica.update()  # Algorithm 2, line 8
        self._clocks[fabric.rank] = replica.clock
        living = set(self._node) & set(fabric.living())
        if fabric.rank == min(living):
            self._lead(replica, fabric, len(living))
        heard = len(living)
        changes = int(self._marks[3])
        if changes > self._rounds:
            self._rounds += 1  # one at a time: a round is counted when it is seen
            self._pulled_at = replica.clock
            heard += 1
        return Exchange(self._rounds, heard, replica.clock - self._pulled_at)

    def _lead(self, replica: Replica, fabric: Fabric, p: int) -> None:
        """The lowest living rank of a node speaks with the master for it."""
        pushed_at, awaited = int(self._marks[0]), int(self._marks[1])
        if awaited:
            awaited = self._pull(replica, fabric, 0.0)
        done = int(self._clocks[self._node].sum())
        if not awaited and done - pushed_at >= self.local_updates * p:
            self._push(replica, fabric, done)
            if self.wait:
                self._pull(replica, fabric, self.deadline_seconds)

    def _push(self, replica: Replica, fabric: Fabric, done: int) -> None:
        """Push u - v (line 10). Other threads write on, so v advances by just what was pushed."""
        centre = centre_of(fabric)
        update = replica.params.detach() - self._base
        sent = fabric.send(
            centre, _PUSH, update, note=int(self._marks[2]), deadline_seconds=self.deadline_seconds
        )
        if sent:
            self._base.add_(update)
            self._marks[0], self._marks[1] = done, 1
        elif centre not in fabric.living():
            raise FabricError("the master died, and with it v. Go on from the last checkpoint.")

    def _pull(self, replica: Replica, fabric: Fabric, deadline_seconds: float) -> int:
        """u <- v' + (u - u at the push) (line 3); returns whether the answer is still awaited."""
        letter = fabric.wait(_REPLY, deadline_seconds) if deadline_seconds else fabric.receive(_REPLY)
        if letter is None:
            return 1
        if self.wait and len(self._node) == 1:
            replica.params.copy_(letter.x)
        else:
            replica.params.add_(letter.x - self._base)
        self._base.copy_(letter.x)
        self.refused += letter.note < 0
        self._marks[1], self._marks[2] = 0, abs(int(letter.note))
        self._marks[3] += 1
        return 0

    # -- the master ---------------------------------------------------------------------------------

    def serve(self, replica: Replica, fabric: Fabric) -> bool:
        """Collect M updates, then v <- v + rho sum_m w_m (Algorithm 1, lines 3 and 4)."""
        letter = self._pushes.receive(fabric, _IDLE_SECONDS)
        if letter is None:
            return False
        self._fold(letter, replica, fabric)
        return True

    def _fold(self, letter: Letter, replica: Replica, fabric: Fabric) -> None:
        if self.delay_bound and replica.clock - letter.note > self.delay_bound:
            self.refused += 1
            fabric.send(letter.sender, _REPLY, replica.params, note=-max(replica.clock, 1))
            return
        self._unfolded.append(letter)
        if len(self._unfolded) < self.batch:
            return
        if self._master is None:
            raise RuntimeError("attach comes before serve")
        replica.grad.zero_()
        for one in self._unfolded:
            replica.grad.sub_(one.x)
        self._master.step()
        replica.tick()
        for one in self._unfolded:
            if one.sender >= 0:  # restored ones had their answer on resume
                fabric.send(one.sender, _REPLY, replica.params, note=replica.clock)
        self._unfolded.clear()

    def consensus(self, replica: Replica, fabric: Fabric) -> Tensor:
        return shown_by_centre(replica, fabric)

    # -- state --------------------------------------------------------------------------------------

    def settle(self, replica: Replica, fabric: Fabric, number: int, deadline_seconds: float) -> bool:
        """What nodes pushed before the cut is with the master, folded or not; answers are given anew."""
        if fabric.rank == centre_of(fabric):
            leaders = [min(alive) for node in self._nodes if (alive := set(node) & set(fabric.living()))]
            return self._pushes.drain(
                fabric, number, leaders, lambda one: self._fold(one, replica, fabric), deadline_seconds
            )
        if fabric.rank == self._leader(fabric):
            self._pushes.announce(fabric, number, [centre_of(fabric)], replica.params)
        return True

    def _leader(self, fabric: Fabric) -> int:
        return min(set(self._node) & set(fabric.living()))

    def state(self) -> dict[str, Any]:
        kept = {
            "params": self._params.clone(),  # of the same moment as the base, though others write on
            "base": self._base.clone(),
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
        self._unfolded = [Letter(-1, x) for _, x in sorted(state["unfolded"].items())]
        if self._master is not None and "momentum" in state:
            self._master.state[self._v]["momentum_buffer"] = state["momentum"].clone()

    def resumed(self, replica: Replica, fabric: Fabric) -> None:
        """Each node goes on from its leader's u and base; the master answers all of them once."""
        if fabric.rank == centre_of(fabric):
            for node in self._nodes:
                fabric.send(min(node), _REPLY, replica.params, note=replica.clock)
        elif fabric.rank == self._leader(fabric):
            self._params.copy_(self._saved["params"])
            self._base.copy_(self._saved["base"])
            self._marks.copy_(self._saved["marks"])
            self._marks[1] = 1
        self._saved = {}
