"""Collectives inside a step: on any nested structure of tensors, differentiable where that is defined.

TF-Replicator, section 3.3: all_reduce, all_sum, all_gather, broadcast, map_reduce, map_gather. Each is a
linear map on what all members hand in, and its backward pass is the adjoint map, itself a collective: so
the gradient is that of the sum of all members' losses with respect to each one's own input. A strategy that
takes the mean of gradients then has the gradient of the mean loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from murmurate.fabric.interface import FabricError
from murmurate.replicator.gather import TensorExchange

Reduction = str | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """Members of a step that reduce and gather among themselves, over channels of their own.

    Calls are matched within the group: its members make the same ones in the same order, in backward passes
    too. Ranks are positions in the group. Dead members are left out, and a mean is over the living.
    Structures are dictionaries, lists, tuples and named tuples of tensors and numbers, and alike on all
    members. Results are on the device of what was handed in, and the same bits on all members of a group.

    All raise FabricError when members make different calls, or one does not call before the deadline. A
    result requires a gradient if any member's input does; then all must run that backward pass.
    """

    wire: TensorExchange

    @property
    def size(self) -> int:
        return self.wire.size

    @property
    def rank(self) -> int:
        """The own place in the group, from 0 up."""
        return self.wire.rank

    def mean(self, x: Any) -> Any:
        """The mean over the group of every tensor in ``x``; backward: the mean of the gradients."""
        return self._map("mean", x)

    def sum(self, x: Any) -> Any:
        """The sum over the group of every tensor in ``x``; backward: the sum of the gradients."""
        return self._map("sum", x)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """``x`` of the group's member ``root``; backward: the sum of the gradients, at the root."""
        if not 0 <= root < self.size:
            raise ValueError(f"there is no member {root} in a group of {self.size}: use 0..{self.size - 1}")
        return self._map("broadcast", x, root=root)

    def gather(self, x: Any, join: bool = False) -> Any:
        """Every tensor of all members, by rank: [k, ...] for k living members.

        ``join``: along the first dimension instead, which may then differ (the last, shorter batch, say).
        Backward: each gets the sum of the gradients of its own part.
        """
        if join:
            return self._map("gather", x)
        return self._map("gather", pytree.tree_map(lambda leaf: _tensor(leaf).unsqueeze(0), x))

    def reduce(self, x: Any, operation: Reduction) -> Any:
        """``operation`` over the group: mean, sum, min, max, product, or any function of [k, ...] tensors.

        The gradient of min and max goes to the owner of the extreme, the lowest rank of several; that of a
        function, through the function. Raises ValueError for an unknown name.
        """
        if operation in ("mean", "sum"):
            return self._map(str(operation), x)
        act = _reduction(operation)
        return pytree.tree_map(act, self.gather(x))

    def map_gather(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Any:
        """``function`` of every item, the work shared among the group: [len(items), ...] in their order.

        ``items`` are the same on all members. The items of a member that dies are redone by the others.
        """
        if not items:
            raise ValueError("map_gather and map_reduce need at least one item")
        parts, order = [], torch.empty(0, dtype=torch.int64)
        missing, workers = list(range(len(items))), list(range(self.size))
        while missing:
            mine = missing[workers.index(self.rank) :: len(workers)]
            # a member without items still computes one, to know the structure of results
            done = [function(items[i]) for i in mine or missing[:1]]
            stacked = pytree.tree_map(lambda *rows: torch.stack([_tensor(r) for r in rows]), *done)
            found = pytree.tree_map(functools.partial(_first, len(mine)), stacked)
            own = torch.tensor(mine, dtype=torch.int64)
            part, came, present = self.gather((found, own, torch.tensor([self.rank])), join=True)
            parts.append(part)
            order = torch.cat([order, came])
            missing, workers = sorted(set(missing) - set(came.tolist())), present.tolist()
        back = order.argsort()
        return pytree.tree_map(lambda *leaves: torch.cat(leaves)[back.to(leaves[0].device)], *parts)

    def map_reduce(self, function: Callable[[Any], Any], items: Sequence[Any], operation: Reduction) -> Any:
        """``operation`` (see ``reduce``) over ``function`` of every item, the work shared in the group."""
        act = _reduction(operation)
        return pytree.tree_map(act, self.map_gather(function, items))

    def _map(self, kind: str, x: Any, root: int = -1) -> Any:
        leaves, structure = pytree.tree_flatten(x)
        tensors = [_tensor(leaf) for leaf in leaves]
        if kind == "mean" and any(not (t.is_floating_point() or t.is_complex()) for t in tensors):
            raise TypeError("a mean is of floating-point tensors: convert whole numbers and booleans first")
        return pytree.tree_unflatten(_apply(_Map(self, kind, root), tensors), structure)


@dataclass
class _Map:
    """A linear map on the tensors of all members of a group, and what its adjoint has to know."""

    group: Group
    kind: str
    root: int = -1
    rows: dict[int, list[int]] = field(default_factory=dict)  # of each member and tensor, for "deal"

    def run(self, tensors: Sequence[Tensor], wants_gradient: bool) -> tuple[list[Tensor], bool]:
        """This member's results, and whether some member wants a gradient."""
        call = self.kind if self.root < 0 else f"{self.kind} {self.root}"
        everybody = self.group.wire.gather(call, tensors, wants_gradient)
        given = {rank: message.tensors for rank, message in sorted(everybody.items())}
        if self.kind == "broadcast" and self.root not in given:
            raise FabricError(f"rank {self.root} died before it could broadcast: let a living one")
        results = [
            self._one(index, {rank: found[index] for rank, found in given.items()}).to(x.device)
            for index, x in enumerate(tensors)
        ]
        if self.kind == "gather":
            self.rows = {rank: [len(x) for x in found] for rank, found in given.items()}
        return results, any(m.wants_gradient for m in everybody.values())

    def _one(self, index: int, given: dict[int, Tensor]) -> Tensor:
        if self.kind == "broadcast":
            return given[self.root]
        if self.kind == "gather":
            return torch.cat(list(given.values()))
        if self.kind == "deal":
            return torch.stack([self._own_rows(index, x) for x in given.values()]).sum(0)
        if self.kind == "collect" and self.group.wire.rank != self.root:
            return torch.zeros_like(given[self.group.wire.rank])
        stacked = torch.stack(list(given.values()))
        return stacked.mean(0) if self.kind == "mean" else stacked.sum(0)

    def _own_rows(self, index: int, x: Tensor) -> Tensor:
        me = self.group.wire.rank
        start = sum(counts[index] for rank, counts in self.rows.items() if rank < me)
        return x[start : start + self.rows[me][index]]

    def adjoint(self) -> _Map:
        return _Map(self.group, _ADJOINT[self.kind], self.root, self.rows)


# every map here is linear in all members' inputs and has an adjoint; "deal" returns gathered gradients to
# their owners
_ADJOINT = {
    "mean": "mean",
    "sum": "sum",
    "gather": "deal",
    "deal": "gather",
    "broadcast": "collect",
    "collect": "broadcast",
}


class _Linear(torch.autograd.Function):
    """Attaches the adjoint to results that are already computed; differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, act: _Map, results: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.act = act
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *_apply(ctx.act.adjoint(), list(gradients)))


def _apply(act: _Map, tensors: Sequence[Tensor]) -> list[Tensor]:
    smooth = [x.is_floating_point() or x.is_complex() for x in tensors]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    with torch.no_grad():
        results, anybody = act.run([x.detach() for x in tensors], wanted)
    if not (anybody and torch.is_grad_enabled()):
        return results
    through = [i for i, right in enumerate(smooth) if right]
    # members with constant inputs also take part in the collective of the backward pass
    inputs = [
        tensors[i] if tensors[i].requires_grad else tensors[i].detach().requires_grad_() for i in through
    ]
    rows = {rank: [counts[i] for i in through] for rank, counts in act.rows.items()}
    hung = _Linear.apply(_Map(act.group, act.kind, act.root, rows), [results[i] for i in through], *inputs)  # type: ignore[no-untyped-call]
    for i, result in zip(through, hung, strict=True):
        results[i] = result
    return results


def _tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, bool | int | float):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    raise TypeError(f"collectives take tensors and numbers in any nesting, not {type(leaf).__name__}")


def _reduction(operation: Reduction) -> Callable[[Tensor], Tensor]:
    if callable(operation):
        return operation
    if operation not in _REDUCTIONS:
        raise ValueError(
            f"'{operation}' is no reduction: use {', '.join(_REDUCTIONS)} or a function of [k, ...] tensors"
        )
    return _REDUCTIONS[operation]


def _first(count: int, rows: Tensor) -> Tensor:
    return rows[:count]


def _extreme(which: Callable[..., Tensor], stacked: Tensor) -> Tensor:
    # torch finds no place in booleans; the first place of several is the lowest rank's
    ordered = stacked.to(torch.uint8) if stacked.dtype == torch.bool else stacked
    return torch.take_along_dim(stacked, which(ordered, 0, keepdim=True), 0).squeeze(0)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "sum": lambda x: x.sum(0),
    "min": functools.partial(_extreme, torch.argmin),
    "max": functools.partial(_extreme, torch.argmax),
    "product": lambda x: x.prod(0),
}
