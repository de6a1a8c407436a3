"""The master of DPSGD where pushes are row-sparse (``sparse_delta``).

A push multiplies all of v by s_m. Algorithm 1, line 4, applies this to the v_m that node m had pulled,

    v <- v + rho sum_m ((s_m - 1) v_m + increments_m)

and v may have been updated since. Rows that since then were only scaled satisfy v_m = f v, with one factor f
for all of them; of the other rows the master keeps the values in v_m as long as a node may push from that
version. If a push shrinks the present v instead, counts stay positive, whereas a share of an old, larger v
may exceed the present v.

Nodes that go on learning until their reply arrives push more updates at once, so s_m is smaller, and
rho sum_m (1 - s_m) may be 1 or more although it would be less with immediate replies. Such pushes are applied
with a smaller rho, with which the sum is 0.99: then v is nearly the mean of increments_m / (1 - s_m), and
each of these is a weighted mean of the estimates of v from the node's mini-batches.
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
from murmurate.strategies.dpsgd.sparse_delta import SparseDelta, blank, most_rows

_SCALES_KEPT = 10_000  # number of versions of v whose scale is kept
_UNPACKED_KEPT = 8  # number of pushes that are kept unpacked
_UPDATES_KEPT = 100  # number of updates of v for which former values of rows are kept
_MOST_SHRINK = 0.99  # the largest share of v that one update takes away


class _FormerV(NamedTuple):
    """A former v: ``factor`` times the present one, plus ``excess`` [R, W] in the rows ``row`` [R]."""

    factor: float
    row: Tensor
    excess: Tensor


class SparseMaster(Master):
    """v, the version at which each row changed last, the scale at each version, and former values of rows.

    shrinks: whether a push shrinks the v that its node had ``pulled``, or the ``present`` v; then no former
    rows are kept.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        nodes: Sequence[Sequence[int]],
        batch: int = 1,
        delay_bound: int = 0,
        shrinks: str = "present",
    ) -> None:
        super().__init__(replica, optimizer, nodes, batch, delay_bound)
        replica.scale.keep()
        self._keeps_rows = shrinks == "pulled"
        self.width = replica.row_width or 1
        self._changed = torch.zeros(len(replica) // self.width, dtype=torch.int64)
        self._shrunk = 0.0  # logarithm of the factor by which v has shrunk so far
        self._shrunk_at: OrderedDict[int, float] = OrderedDict()  # by version of v: ``_shrunk`` then
        # by version: the rows that the next update changed, with their values before it
        self._former: OrderedDict[int, Rows] = OrderedDict()
        self._unpacked: deque[tuple[Tensor, SparseDelta]] = deque(maxlen=_UNPACKED_KEPT)
        self._latest_version: dict[int, int] = {}  # by node: the newest version that was sent to it
        self._record_scale()

    def _record_scale(self) -> None:
        """Keep ``_shrunk`` of the present version."""
        self._shrunk_at[self.replica.clock] = self._shrunk
        if len(self._shrunk_at) > _SCALES_KEPT:
            self._shrunk_at.popitem(last=False)

    def _unpack(self, x: Tensor) -> SparseDelta:
        """The push ``x``, unpacked. It is kept, as it is needed on arrival, when applied and for the reply.

        Raises ValueError if it is malformed.
        """
        for push, delta in self._unpacked:
            if push is x:
                return delta
        self._unpacked.append((x, SparseDelta.unpack(x, self.width)))
        return self._unpacked[-1][1]

    def _is_sparse(self, x: Tensor) -> bool:
        return len(x) != len(self.replica)

    def is_valid(self, push: Tensor) -> bool:
        """Whether ``push`` is a whole vector, or rows that v has."""
        if not self._is_sparse(push):
            return True
        try:
            row = self._unpack(push).row
        except ValueError:
            return False
        return not len(row) or (0 <= int(row.min()) <= int(row.max()) < len(self._changed))

    def apply_pending(self) -> None:
        if any(not self._is_sparse(x) for x in self.pending) or self.optimizer.param_groups[0]["momentum"]:
            self.pending = [self._dense(x) for x in self.pending]
            self._change_all()
            if self.replica.scale.logarithm:
                self.replica.scale.fold()
            super().apply_pending()
        else:
            self._apply_rows([self._unpack(x) for x in self.pending], self.optimizer.param_groups[0]["lr"])
            self.pending.clear()
            self.replica.tick()
        self._record_scale()

    def _apply_rows(self, pushes: Sequence[SparseDelta], rho: float) -> None:
        """v <- v + rho sum ((s_m - 1) v_m + increments_m), with a smaller rho if v would vanish.

        If the ``pulled`` v is shrunk, a smaller rho would not keep counts positive: then StepTooLarge is
        raised.
        """
        pulled = [self._former_v(push.version) for push in pushes]
        shrink = rho * sum((1 - push.factor) * v.factor for push, v in zip(pushes, pulled, strict=True))
        if shrink >= 1 and self._keeps_rows:
            raise StepTooLarge(
                f"the master would shrink v by {shrink:g} of itself, and parameters that are counts become "
                "negative: use shrinks 'present', a smaller global_learning_rate, fewer "
                "local_updates, or a smaller step"
            )
        if shrink >= 1:
            rho, shrink = rho * _MOST_SHRINK / shrink, _MOST_SHRINK
        changes = [Rows(push.row, push.values) for push in pushes]
        changes += [
            Rows(v.row, (push.factor - 1) * v.excess)
            for push, v in zip(pushes, pulled, strict=True)
            if len(v.row)
        ]
        if self._keeps_rows:
            self._record_rows(torch.cat([change.row for change in changes]))
        self.replica.scale.shrink(shrink)
        self._shrunk += math.log1p(-shrink)
        for change in changes:
            add_rows(self.replica.params.detach(), change, rho / self.replica.scale.value)
            self._changed[change.row] = self.replica.clock + 1
        self.replica.scale.fold_when_small()

    def _dense(self, x: Tensor) -> Tensor:
        """A push as a whole vector."""
        if not self._is_sparse(x):
            return x
        push = self._unpack(x)
        v = self._former_v(push.version)
        difference = (push.factor - 1) * v.factor * self.replica.values().detach()
        add_rows(difference, Rows(v.row, v.excess), push.factor - 1)
        add_rows(difference, Rows(push.row, push.values), 1.0)
        return difference

    def _change_all(self) -> None:
        """Note that the next update changes all rows."""
        if self._keeps_rows:
            self._record_rows(torch.arange(len(self._changed)))
        self._changed.fill_(self.replica.clock + 1)

    def reply_to(self, push: Tensor) -> Tensor:
        """The rows that have changed since the push's version, or all of v if that is shorter."""
        rows = self._reply_rows(push) if self._is_sparse(push) and self.is_valid(push) else None
        return self.replica.values().detach() if rows is None else rows

    def _reply_rows(self, x: Tensor) -> Tensor | None:
        push = self._unpack(x)
        if push.version not in self._shrunk_at:
            return None
        changed = self._changed > push.version
        changed[push.row] = True
        row = changed.nonzero()[:, 0]
        if len(row) > most_rows(self.width, self.replica.params):
            return None
        factor = math.exp(self._shrunk - self._shrunk_at[push.version])
        message, values = blank(factor, self.replica.clock, row, self.width, self.replica.params.dtype)
        self._row_values(row, values)
        return message

    def replied(self, rank: int, living: Sequence[int]) -> None:
        """Forget the versions from which no living node can push, unless pushes are still pending. (If the
        leader of ``rank`` dies before it reads the reply, its node pushes next from version -1.)"""
        if not self.pending:
            self._unpacked.clear()  # frees their messages' slots in the queues
        if not self._keeps_rows:
            return
        living_ranks = set(living)
        for number, node in enumerate(self.nodes):
            if rank in node:
                self._latest_version[number] = self.replica.clock
        if self.pending:
            return
        latest = [
            self._latest_version.get(number, 0)
            for number, node in enumerate(self.nodes)
            if living_ranks & {*node}
        ]
        oldest = min(latest, default=self.replica.clock)
        while self._former and (next(iter(self._former)) < oldest or len(self._former) > _UPDATES_KEPT):
            self._former.popitem(last=False)

    def resumed(self, channel: Channel) -> None:
        """Forget all versions but the present one."""
        for records in (self._shrunk_at, self._former, self._latest_version, self._unpacked):
            records.clear()
        self._shrunk = 0.0
        self._changed.fill_(self.replica.clock)
        self._record_scale()
        super().resumed(channel)

    def _row_values(self, row: Tensor, out: Tensor | None = None) -> Tensor:
        """The values [R, W] of these rows of v, written to ``out`` if given."""
        v = self.replica.params.detach().view(-1, self.width)
        return torch.index_select(v, 0, row, out=out).mul_(self.replica.scale.value)

    def _record_rows(self, row: Tensor) -> None:
        """Keep the present values of these rows, which the next update will change."""
        row = torch.unique(row)
        self._former[self.replica.clock] = Rows(row, self._row_values(row))

    def _former_v(self, version: int) -> _FormerV:
        """The v of ``version``; the present v if ``version`` is too old to be known."""
        no_excess = torch.empty(0, self.width, dtype=self.replica.params.dtype)
        updates = [at for at in self._former if at >= version]
        is_known = len(updates) == self.replica.clock - version and version in self._shrunk_at
        if not self._keeps_rows or not updates or not is_known:
            return _FormerV(1.0, torch.empty(0, dtype=torch.int64), no_excess)
        log_at_version = self._shrunk_at[version]
        rows = torch.cat([self._former[at].row for at in updates])
        values = torch.cat(
            [math.exp(log_at_version - self._shrunk_at[at]) * self._former[at].values for at in updates]
        )
        row, row_index = torch.unique(rows, return_inverse=True)
        # a row's value in ``version`` is that before the first update that changed it
        first = torch.full_like(row, len(rows)).scatter_reduce_(0, row_index, torch.arange(len(rows)), "amin")
        factor = math.exp(log_at_version - self._shrunk)
        return _FormerV(factor, row, values[first] - factor * self._row_values(row))
