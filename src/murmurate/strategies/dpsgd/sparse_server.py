"""What DPSGD's master does with pushes of a few rows (``_parcels``).

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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.replica.sparse import Rows, ShrinksAway, add_rows
from murmurate.replica.vector import Replica
from murmurate.strategies.dpsgd.sparse_delta import Parcel, blank, fits

_VERSIONS = 10_000  # of v whose scale is remembered
_OPENED = 8  # pushes that need not be read again
_STEPS_BACK = 100  # of v, for which it is remembered what they changed
_MOST_TAKEN = 0.99  # of v, by a fold that would leave nothing


class _Pulled(NamedTuple):
    """A pulled v: ``factor`` times the present one, and ``excess`` [R, W] more in the rows ``row`` [R]."""

    factor: float
    row: Tensor
    excess: Tensor


class MasterRows:
    """v, when each row of it changed, by what it had shrunk at each version, and what rows were before.

    nodes: the ranks of each. pulled: shrink the v that a node had pulled; else the present one, and of rows
        nothing is kept.
    """

    def __init__(self, replica: Replica, nodes: Sequence[Sequence[int]], *, pulled: bool = False) -> None:
        self._replica, self._nodes, self._keeps = replica, nodes, pulled
        self.width = replica.row_width or 1
        rows = len(replica) // self.width if replica.row_width else 0  # other models have no rows to follow
        self._changed = torch.zeros(rows, dtype=torch.int64)
        self._shrunk = 0.0  # logarithm, over all folds of the scale into the vector
        self._logs: OrderedDict[int, float] = OrderedDict()
        self._before: OrderedDict[int, Rows] = OrderedDict()  # by version: rows that its step changed
        self._opened: deque[tuple[Tensor, Parcel]] = deque(maxlen=_OPENED)
        self._held: dict[int, int] = {}  # the version that each node got last
        self.remember()

    def remember(self) -> None:
        """The present version's scale."""
        self._logs[self._replica.clock] = self._shrunk
        if len(self._logs) > _VERSIONS:
            self._logs.popitem(last=False)

    def _read(self, x: Tensor) -> Parcel:
        """What a push says; asked for when it comes, when it is folded and when it is answered.

        Raises ValueError if nobody packed it.
        """
        for message, parcel in self._opened:
            if message is x:
                return parcel
        self._opened.append((x, Parcel.unpack(x, self.width)))
        return self._opened[-1][1]

    def is_parcel(self, x: Tensor) -> bool:
        return len(x) != len(self._replica)

    def is_sound(self, x: Tensor) -> bool:
        """Whether what a node pushed can be folded: a whole vector, or rows that v has."""
        if not self.is_parcel(x):
            return True
        try:
            row = self._read(x).row
        except ValueError:
            return False
        return not len(row) or (0 <= int(row.min()) <= int(row.max()) < len(self._changed))

    def step(self, pushes: Sequence[Tensor], rho: float) -> None:
        """v <- v + rho sum ((s_m - 1) v_m + increments_m), with a smaller rho where none of v were left.

        Of a ``pulled`` v a smaller one would not keep counts above 0: there ShrinksAway is raised.
        """
        parcels = [self._read(x) for x in pushes]
        found = [self._pulled(parcel.version) for parcel in parcels]
        shrink = rho * sum((1 - s.factor) * v.factor for s, v in zip(parcels, found, strict=True))
        if shrink >= 1 and self._keeps:
            raise ShrinksAway(
                f"the master would shrink v by {shrink:g} of itself, and parameters that are counts become "
                "negative: use --strategy.shrinks present, a smaller global_learning_rate, fewer "
                "local_updates, or a smaller step"
            )
        if shrink >= 1:
            rho, shrink = rho * _MOST_TAKEN / shrink, _MOST_TAKEN
        moves = [Rows(one.row, one.values) for one in parcels]
        moves += [
            Rows(v.row, (s.factor - 1) * v.excess) for s, v in zip(parcels, found, strict=True) if len(v.row)
        ]
        if self._keeps:
            self._keep(torch.cat([one.row for one in moves]))
        self._replica.scale.shrink(shrink)
        self._shrunk += math.log1p(-shrink)
        for one in moves:
            add_rows(self._replica.params.detach(), one, rho / self._replica.scale.value)
            self._changed[one.row] = self._replica.clock + 1
        self._replica.scale.await_room(self._replica.fold)

    def dense(self, x: Tensor) -> Tensor:
        """A push as a whole vector."""
        if not self.is_parcel(x):
            return x
        parcel = self._read(x)
        v = self._pulled(parcel.version)
        difference = (parcel.factor - 1) * v.factor * self._replica.values().detach()
        add_rows(difference, Rows(v.row, v.excess), parcel.factor - 1)
        add_rows(difference, Rows(parcel.row, parcel.values), 1.0)
        return difference

    def change_all(self) -> None:
        """v is about to have a dense step."""
        if self._keeps:
            self._keep(torch.arange(len(self._changed)))
        self._changed.fill_(self._replica.clock + 1)

    def answer(self, push: Tensor) -> Tensor:
        """What a node needs to have the present v: rows, or all of it where that is shorter."""

        def whole() -> Tensor:
            return self._replica.values().detach()

        if not self.is_parcel(push) or not self.is_sound(push):
            return whole()
        parcel = self._read(push)
        if parcel.version not in self._logs:
            return whole()
        news = self._changed > parcel.version
        news[parcel.row] = True
        row = news.nonzero()[:, 0]
        if not fits(len(row), self.width, self._replica.params):
            return whole()
        factor = math.exp(self._shrunk - self._logs[parcel.version])
        message, values = blank(factor, self._replica.clock, row, self.width, self._replica.params.dtype)
        self._values(row, values)
        return message

    def answered(self, rank: int, living: Iterable[int], *, unfolded: bool) -> None:
        """The node of ``rank`` has the present version under way; should its leader die, it pushes from none.
        Forget what nobody of the ``living`` pushes from, unless there are ``unfolded`` pushes."""
        if not unfolded:
            self._opened.clear()  # or their slots stay lent
        if not self._keeps:
            return
        there = set(living)
        for number, node in enumerate(self._nodes):
            if rank in node:
                self._held[number] = self._replica.clock
        if unfolded:
            return
        held = [self._held.get(number, 0) for number, node in enumerate(self._nodes) if there & {*node}]
        oldest = min(held, default=self._replica.clock)
        while self._before and (next(iter(self._before)) < oldest or len(self._before) > _STEPS_BACK):
            self._before.popitem(last=False)

    def restart(self) -> None:
        """From a checkpoint: all nodes are about to be sent the present version, and no other is known."""
        for known in (self._logs, self._before, self._held, self._opened):
            known.clear()
        self._shrunk = 0.0
        self._changed.fill_(self._replica.clock)
        self.remember()

    def _values(self, row: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, W] what these rows are, in ``out`` if that is given."""
        v = self._replica.params.detach().view(-1, self.width)
        return torch.index_select(v, 0, row, out=out).mul_(self._replica.scale.value)

    def _keep(self, row: Tensor) -> None:
        """What these rows are at the present version, which is about to end."""
        if len(self._changed):
            row = torch.unique(row)
            self._before[self._replica.clock] = Rows(row, self._values(row))

    def _pulled(self, version: int) -> _Pulled:
        """The v of ``version``; the present one if it is too old to be known."""
        nothing = torch.empty(0, self.width, dtype=self._replica.params.dtype)
        steps = [at for at in self._before if at >= version]
        known = len(steps) == self._replica.clock - version and version in self._logs
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
