"""A node of DPSGD whose gradients are row-sparse: its vector u and the base (the v from which u was
trained) are each a scale times a tensor; pushes and pulls contain a few rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.replica.scale import LEAST_SCALE
from murmurate.replica.sparse import Rows, add_rows
from murmurate.replica.vector import Replica
from murmurate.strategies.dpsgd.node import Memory, Node
from murmurate.strategies.dpsgd.sparse_delta import SparseDelta, most_rows

_LEAST_LOGARITHM = -25.0  # of a scale; below it the scaled numbers lose precision
_LEAST_SHARE = 0.9  # of the moved rows that must fit into a message; if fewer fit, the whole vector is sent
_BASE, _PUSHED, _USED = range(3)  # positions in ``_scales``


class SparseNode(Node):
    """A node of sparse gradients; while gradients are dense it behaves as a ``Node``.

    _scales: [3] float64, shared: the logarithm of the base's scale, that of s_m of the last push until its
    reply (then 0), and whether any gradient was sparse. touched: [N / W] uint8, shared: 1 for rows moved
    since the last push, 2 for rows of a push that may not have arrived. A row that is marked needlessly only
    makes a message longer, as pushes are u - v.
    _torn: [1] int64, shared: 1 while u and the base are changed together. If it stays 1, a thread has died
    during a change; then the node restarts from the whole of v and loses its updates since the last push.
    """

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
        super().__init__(replica, ranks, rank, shared, clocks=clocks, threads=threads)
        self.width = replica.row_width or 1
        self._delta_to_push: SparseDelta | None = None
        self._base_is_foreign = False  # whether the base is a peer's u instead of a version of v
        self._scales = shared("scales", torch.zeros(3, dtype=torch.float64))
        self.touched = shared("touched", torch.zeros(len(replica) // self.width, dtype=torch.uint8))
        self._torn = shared("torn", torch.zeros(1, dtype=torch.int64))
        replica.scale.share(shared, threads, self.ranks.index(rank))
        replica.scale.keep(touched=self.touched, fold_if_small=self.fold_if_small)

    @property
    def must_push(self) -> bool:
        """Whether the node is torn, or u has shrunk so much since the last push that it holds little of v."""
        with self.replica.scale.writing():  # so that no thread is in the middle of a change
            if self._torn[0]:
                return True
        return self.replica.scale.logarithm - float(self._scales[_BASE]) < _LEAST_LOGARITHM

    @property
    def has_sparse_gradients(self) -> bool:
        """Whether any gradient was sparse."""
        return bool(self._scales[_USED]) or self.replica.scale.logarithm != 0.0

    # -- push -----------------------------------------------------------------------------------------

    def difference(self) -> Tensor | None:
        if not self.has_sparse_gradients:
            return super().difference()
        with self.replica.scale.exclusive() as alone:
            if not alone:
                return None  # a thread has been stopped in the middle of a write
            self._delta_to_push = self.next_push(self.version)
        if len(self._delta_to_push.row) <= most_rows(self.width, self.replica.params):
            return self._delta_to_push.pack()
        return self.as_dense(self._delta_to_push)

    def next_push(self, version: int) -> SparseDelta:
        """The next push; to be called while no thread writes. version: version of the v in the base.

        The push's version is -1 (unknown) for the first push of a member that joined, for the push after one
        whose reply went to a dead leader, and for a torn node, which requests the whole of v by an empty
        push.
        """
        u, base = self._views()
        self._scales[_USED] = 1
        if self._torn[0]:
            return SparseDelta(1.0, -1, torch.empty(0, dtype=torch.int64), u[:0])
        version = -1 if self._base_is_foreign or self._scales[_PUSHED] else version
        row = self.touched.nonzero()[:, 0]
        logarithm = self.replica.scale.logarithm
        # index_select copies rows several times faster than u[row]
        increments = u.index_select(0, row).sub_(base.index_select(0, row)).mul_(math.exp(logarithm))
        most_that_fit = most_rows(self.width, self.replica.params)
        if _LEAST_SHARE * len(row) <= most_that_fit < len(row):
            farthest = increments.abs().sum(1).topk(most_that_fit, sorted=False).indices.sort().values
            row, increments = row[farthest], increments[farthest]
        self.touched[row] = 2
        return SparseDelta(math.exp(logarithm - float(self._scales[_BASE])), version, row, increments)

    def as_dense(self, delta: SparseDelta) -> Tensor:
        """A push as a whole vector [N]."""
        difference = self.base_values().mul_(delta.factor - 1)
        add_rows(difference, Rows(delta.row, delta.values), 1.0)
        return difference

    def _advance(self, difference: Tensor) -> None:
        if self._delta_to_push is None:
            super()._advance(difference)
            return
        delta, self._delta_to_push = self._delta_to_push, None
        with self.replica.scale.exclusive() as alone:
            self.advance_base(delta, alone)

    def advance_base(self, delta: SparseDelta, alone: bool) -> None:
        """After ``delta`` was sent, set the base to the u from which it was taken. alone: whether no thread
        writes."""
        with self._changing():
            self._scales[_BASE] += math.log(delta.factor)
            self._scales[_PUSHED] = math.log(delta.factor)
            add_rows(self.base, Rows(delta.row, delta.values), math.exp(-float(self._scales[_BASE])))
            if alone:
                self.touched[delta.row[self.touched[delta.row] == 2]] = 0

    # -- pull -----------------------------------------------------------------------------------------

    def _take(self, v: Tensor, *, afresh: bool) -> bool:
        if not self.has_sparse_gradients:
            return super()._take(v, afresh=afresh)
        with self.replica.scale.exclusive() as alone:
            if alone:
                self.apply_reply(v, afresh=afresh)
        return alone

    def apply_reply(self, reply: Tensor, *, afresh: bool) -> None:
        """u <- s v' + the updates since the push, and base <- v'; to be called while no thread writes.

        s: the factor by which u has shrunk since the push. afresh: whether to drop the updates since then.
        """
        is_whole = len(reply) == len(self.base)
        if self._torn[0] and not is_whole:
            return  # rows of v cannot repair a torn node; its next push requests all of v
        afresh = afresh or bool(self._torn[0])
        u, base = self._views()
        u_logarithm, base_logarithm = self.replica.scale.logarithm, float(self._scales[_BASE])
        log_s = 0.0 if afresh else u_logarithm - base_logarithm
        moved_here = self.touched.bool()
        if is_whole:
            row, reply_rows, new_logarithm = torch.arange(len(u)), reply.view(-1, self.width), 0.0
        else:
            delta = SparseDelta.unpack(reply, self.width)
            new_logarithm = base_logarithm + math.log(delta.factor) - float(self._scales[_PUSHED])
            only_moved_here = moved_here.clone()
            only_moved_here[delta.row] = False
            other_rows = only_moved_here.nonzero()[:, 0]
            row = torch.cat([delta.row, other_rows])
            reply_rows = torch.cat(
                [delta.values * math.exp(-new_logarithm), base.index_select(0, other_rows)]
            )
        new_u_rows = reply_rows
        if not afresh and moved_here.any():  # else there are no updates to keep
            # in units of the new u's scale; 0 for rows that were not moved here
            own_updates = u.index_select(0, row).sub_(base.index_select(0, row))
            new_u_rows = (
                own_updates.mul_(math.exp(u_logarithm - new_logarithm - log_s))
                .mul_(moved_here[row][:, None])
                .add_(reply_rows)
            )
        with self._changing(repairs=is_whole and afresh):
            base.index_copy_(0, row, reply_rows)
            u.index_copy_(0, row, new_u_rows)
            self._scales[_BASE], self._scales[_PUSHED] = new_logarithm, 0.0
            self.replica.scale.restore(new_logarithm + log_s)
            self._base_is_foreign = False
            if afresh:
                self.touched.zero_()
        if abs(new_logarithm + log_s) > -_LEAST_LOGARITHM:
            self.fold()

    @contextlib.contextmanager
    def _changing(self, repairs: bool = False) -> Iterator[None]:
        """While u and the base are changed: a thread that dies within this context leaves the node torn.

        repairs: whether all of u and the base is written, after which the node is not torn.
        """
        torn, self._torn[0] = int(self._torn[0]), 1
        yield
        self._torn[0] = 0 if repairs else torn

    # -- the scale ------------------------------------------------------------------------------------

    def fold_if_small(self) -> None:
        """``fold`` while no thread writes, unless another thread has just done so."""
        with self.replica.scale.exclusive() as alone:
            if alone and self.replica.scale.value < LEAST_SCALE:
                self.fold()

    def fold(self) -> None:
        """Multiply u's tensor by the scale, and the base's by the same, so that untouched rows stay equal in
        both."""
        factor = self.replica.scale.logarithm
        with self._changing():
            self.replica.scale.fold()
            self.base.mul_(math.exp(factor))
            self._scales[_BASE] -= factor
            # rare, and afterwards all rows are pushed
            if abs(float(self._scales[_BASE])) > -2 * _LEAST_LOGARITHM:
                self.base.mul_(math.exp(float(self._scales[_BASE])))
                self._scales[_BASE] = 0.0
                self.touched.fill_(1)

    def base_values(self) -> Tensor:
        """The base [N]."""
        return self.base * math.exp(float(self._scales[_BASE]))

    def _views(self) -> tuple[Tensor, Tensor]:
        return self.replica.params.detach().view(-1, self.width), self.base.view(-1, self.width)

    # -- state ----------------------------------------------------------------------------------------

    def _vectors(self) -> dict[str, Any]:
        with self.replica.scale.writing():  # so that all are of the same moment
            u = self.replica.params.detach() * self.replica.scale.value
            return {"params": u, "base": self.base_values(), "torn": int(self._torn[0])}

    def _set_vectors(self, saved: dict[str, Any], is_own: bool) -> None:
        self._base_is_foreign = not is_own
        self.replica.scale.restore(0.0)
        super()._set_vectors(saved, is_own)
        self._scales.zero_()
        u, base = self._views()
        self.touched.copy_((u != base).any(1))
        self._torn[0] = saved.get("torn", 0)
