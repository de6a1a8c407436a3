"""The master of DPSGD where pushes are a few rows (``sparse_delta``).

A push says that all of v shrinks to s_m of itself. Algorithm 1, line 4, means the v that its node had pulled,

    v <- v + rho sum_m ((s_m - 1) v_m + increments_m)

and v may have had some steps since. A row that has had none is v_m = f v with one factor f; what the others
were the master keeps, until nobody can push from that version any more. Of the present v taken instead, a
count stays a count: the shrink of an old v may take more of it than is left.

Nodes that learn on until their answer comes push less often than they are asked to, so s_m is less, and
rho sum_m (1 - s_m) of the present v may be 1 and more though it was not with an answer at once. Such a fold
has a smaller rho, with which the sum is 0.99: then v is nearly the mean of increments_m / (1 - s_m), and each
of these is a mean of what the node's mini-batches say v should be.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel
from murmurate.replica.sparse import Rows, StepTooLarge, add_rows
from murmurate.replica.vector import Replica
from murmurate.strategies.dpsgd.master import Master
from murmurate.strategies.dpsgd.sparse_delta import SparseDelta, blank, fits

_VERSIONS = 10_000  # of v whose scale is remembered
_OPENED = 8  # pushes that need not be read again
_STEPS_BACK = 100  # of v, for which it is remembered what they changed
_MOST_TAKEN = 0.99  # of v, by a fold that would leave nothing


class _Pulled(NamedTuple):
    """A pulled v: ``factor`` times the present one, and ``excess`` [R, W] more in the rows ``row`` [R]."""

    factor: float
    row: Tensor
    excess: Tensor


class SparseMaster(Master):
    """v, when each row of it changed, by what it had shrunk at each version, and what rows were before.

    shrinks: the v that a node had ``pulled``, or the ``present`` one; for the latter no rows are kept.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.SGD,
        nodes: Sequence[Sequence[int]],
        batch: int = 1,
        delay_bound: int = 0,
        shrinks: str = "present",
    ) -> None:
        super().__init__(replica, optimizer, nodes, batch, delay_bound)
        replica.scale.keep()
        self._keeps = shrinks == "pulled"
        self.width = replica.row_width or 1
        self._changed = torch.zeros(len(replica) // self.width, dtype=torch.int64)
        self._shrunk = 0.0  # logarithm, over all folds of the scale into the vector
        self._logs: OrderedDict[int, float] = OrderedDict()
        self._before: OrderedDict[int, Rows] = OrderedDict()  # by version: rows that its step changed
        self._opened: deque[tuple[Tensor, SparseDelta]] = deque(maxlen=_OPENED)
        self._held: dict[int, int] = {}  # the version that each node got last
        self._remember()

    def _remember(self) -> None:
        """The present version's scale."""
        self._logs[self.replica.clock] = self._shrunk
        if len(self._logs) > _VERSIONS:
            self._logs.popitem(last=False)

    def _read(self, x: Tensor) -> SparseDelta:
        """What a push says; asked for when it comes, when it is folded and when it is answered.

        Raises ValueError if nobody packed it.
        """
        for push, delta in self._opened:
            if push is x:
                return delta
        self._opened.append((x, SparseDelta.unpack(x, self.width)))
        return self._opened[-1][1]

    def _is_sparse(self, x: Tensor) -> bool:
        return len(x) != len(self.replica)

    def accepts(self, push: Tensor) -> bool:
        """A whole vector, or rows that v has."""
        if not self._is_sparse(push):
            return True
        try:
            row = self._read(push).row
        except ValueError:
            return False
        return not len(row) or (0 <= int(row.min()) <= int(row.max()) < len(self._changed))

    def fold(self) -> None:
        if any(not self._is_sparse(x) for x in self.unfolded) or self.optimizer.param_groups[0]["momentum"]:
            self.unfolded = [self._dense(x) for x in self.unfolded]
            self._change_all()
            if self.replica.scale.logarithm:
                self.replica.scale.fold()
            super().fold()
        else:
            self._fold_rows([self._read(x) for x in self.unfolded], self.optimizer.param_groups[0]["lr"])
            self.unfolded.clear()
            self.replica.tick()
        self._remember()

    def _fold_rows(self, pushes: Sequence[SparseDelta], rho: float) -> None:
        """v <- v + rho sum ((s_m - 1) v_m + increments_m), with a smaller rho where none of v were left.

        Of a ``pulled`` v a smaller one would not keep counts above 0: there StepTooLarge is raised.
        """
        found = [self._pulled(push.version) for push in pushes]
        shrink = rho * sum((1 - s.factor) * v.factor for s, v in zip(pushes, found, strict=True))
        if shrink >= 1 and self._keeps:
            raise StepTooLarge(
                f"the master would shrink v by {shrink:g} of itself, and parameters that are counts become "
                "negative: use --strategy.shrinks present, a smaller global_learning_rate, fewer "
                "local_updates, or a smaller step"
            )
        if shrink >= 1:
            rho, shrink = rho * _MOST_TAKEN / shrink, _MOST_TAKEN
        moves = [Rows(one.row, one.values) for one in pushes]
        moves += [
            Rows(v.row, (s.factor - 1) * v.excess) for s, v in zip(pushes, found, strict=True) if len(v.row)
        ]
        if self._keeps:
            self._keep(torch.cat([one.row for one in moves]))
        self.replica.scale.shrink(shrink)
        self._shrunk += math.log1p(-shrink)
        for one in moves:
            add_rows(self.replica.params.detach(), one, rho / self.replica.scale.value)
            self._changed[one.row] = self.replica.clock + 1
        self.replica.scale.fold_when_small()

    def _dense(self, x: Tensor) -> Tensor:
        """A push as a whole vector."""
        if not self._is_sparse(x):
            return x
        push = self._read(x)
        v = self._pulled(push.version)
        difference = (push.factor - 1) * v.factor * self.replica.values().detach()
        add_rows(difference, Rows(v.row, v.excess), push.factor - 1)
        add_rows(difference, Rows(push.row, push.values), 1.0)
        return difference

    def _change_all(self) -> None:
        """v is about to have a dense step."""
        if self._keeps:
            self._keep(torch.arange(len(self._changed)))
        self._changed.fill_(self.replica.clock + 1)

    def answer(self, push: Tensor) -> Tensor:
        """Rows, or all of v where that is shorter."""
        rows = self._answer_rows(push) if self._is_sparse(push) and self.accepts(push) else None
        return self.replica.values().detach() if rows is None else rows

    def _answer_rows(self, x: Tensor) -> Tensor | None:
        push = self._read(x)
        if push.version not in self._logs:
            return None
        news = self._changed > push.version
        news[push.row] = True
        row = news.nonzero()[:, 0]
        if not fits(len(row), self.width, self.replica.params):
            return None
        factor = math.exp(self._shrunk - self._logs[push.version])
        message, values = blank(factor, self.replica.clock, row, self.width, self.replica.params.dtype)
        self._values(row, values)
        return message

    def answered(self, rank: int, living: Sequence[int]) -> None:
        """Should its leader die, it pushes from no version. Forget what nobody of the ``living`` pushes from,
        unless there are pushes to be folded."""
        if not self.unfolded:
            self._opened.clear()  # or their slots stay lent
        if not self._keeps:
            return
        there = set(living)
        for number, node in enumerate(self.nodes):
            if rank in node:
                self._held[number] = self.replica.clock
        if self.unfolded:
            return
        held = [self._held.get(number, 0) for number, node in enumerate(self.nodes) if there & {*node}]
        oldest = min(held, default=self.replica.clock)
        while self._before and (next(iter(self._before)) < oldest or len(self._before) > _STEPS_BACK):
            self._before.popitem(last=False)

    def resumed(self, channel: Channel) -> None:
        """No version but the present one is known."""
        for known in (self._logs, self._before, self._held, self._opened):
            known.clear()
        self._shrunk = 0.0
        self._changed.fill_(self.replica.clock)
        self._remember()
        super().resumed(channel)

    def _values(self, row: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, W] what these rows are, in ``out`` if that is given."""
        v = self.replica.params.detach().view(-1, self.width)
        return torch.index_select(v, 0, row, out=out).mul_(self.replica.scale.value)

    def _keep(self, row: Tensor) -> None:
        """What these rows are at the present version, which is about to end."""
        row = torch.unique(row)
        self._before[self.replica.clock] = Rows(row, self._values(row))

    def _pulled(self, version: int) -> _Pulled:
        """The v of ``version``; the present one if it is too old to be known."""
        nothing = torch.empty(0, self.width, dtype=self.replica.params.dtype)
        steps = [at for at in self._before if at >= version]
        known = len(steps) == self.replica.clock - version and version in self._logs
        if not self._keeps or not steps or not known:
            return _Pulled(1.0, torch.empty(0, dtype=torch.int64), nothing)
        then = self._logs[version]
        every = torch.cat([self._before[at].row for at in steps])
        values = torch.cat([math.exp(then - self._logs[at]) * self._before[at].values for at in steps])
        row, which = torch.unique(every, return_inverse=True)
        # the step that changed a row first knows what it was
        first = torch.full_like(row, len(every)).scatter_reduce_(0, which, torch.arange(len(every)), "amin")
        factor = math.exp(then - self._shrunk)
        return _Pulled(factor, row, values[first] - factor * self._values(row))
