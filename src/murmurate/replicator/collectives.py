"""Collective operations inside a step, on any nested structure of tensors; differentiable where that is
defined.

TF-Replicator, section 3.3: all_reduce, all_sum, all_gather, broadcast, map_reduce, map_gather. A mean, sum,
broadcast or gather is a linear map of all members' inputs, and its backward pass is the adjoint map, which is
also a collective. The others compute their results from what they have gathered. So the gradient is that of
the sum of all members' losses with respect to each member's own input. A strategy that averages gradients
then has the gradient of the mean loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from murmurate.fabric.interface import FabricError
from murmurate.replicator.gather import NoExchange, TensorExchange

Reduction = str | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """Members that reduce and gather among themselves, over their own channels.

    All members must make the same calls in the same order, also in backward passes. Ranks are positions in
    the group. Dead members are left out; a mean is over the living. Inputs are dictionaries, lists, tuples
    and named tuples of tensors, arrays and numbers, with the same structure on all members. Results are on
    the input's device, and the same bit for bit on all members.

    A result requires a gradient if any member's input does; then all members must run that backward pass.

    All methods raise FabricError if members make different calls, or one makes none before the deadline, and
    TypeError for an input that is neither a tensor, an array nor a number.
    """

    exchange: TensorExchange | NoExchange

    @classmethod
    def of_one(cls) -> Group:
        """A group with one member."""
        return cls(NoExchange())

    @property
    def size(self) -> int:
        return self.exchange.size

    @property
    def rank(self) -> int:
        """This member's position in the group, from 0."""
        return self.exchange.rank

    def mean(self, x: Any) -> Any:
        """The mean over the group of every tensor in ``x``; backward: the mean of the gradients.

        Raises TypeError for integers and booleans.
        """
        return self._map("mean", x)

    def sum(self, x: Any) -> Any:
        """The sum over the group of every tensor in ``x``; backward: the sum of the gradients."""
        return self._map("sum", x)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """``x`` of the group's member ``root``; backward: the sum of the gradients, at the root.

        Raises ValueError if the group has no such member, FabricError if it is dead.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"there is no member {root} in a group of {self.size}: use 0..{self.size - 1}")
        return self._map("broadcast", x, root=root)

    def gather(self, x: Any, join: bool = False) -> Any:
        """Every tensor of all members, by rank: [k, ...] for k living members.

        join: whether to concatenate along the first dimension instead of stacking. All tensors must then have
        one; its length may differ (for a shorter last batch).

        Backward: each member gets the sum of the gradients of its own rows.
        """
        if join:
            return self._map("gather", x)
        return self._map("gather", pytree.tree_map(lambda leaf: tensor_of(leaf).unsqueeze(0), x))

    def reduce(self, x: Any, operation: Reduction) -> Any:
        """``operation`` over the group: mean, sum, min, max, product, or any function of [k, ...] tensors.

        The gradient of min and max goes to the owner of the extreme value, the lowest rank if there are
        several. Raises ValueError for an unknown name.
        """
        if operation in ("mean", "sum"):
            return self._map(str(operation), x)
        return pytree.tree_map(_reduction(operation), self.gather(x))

    def map_gather(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Any:
        """``function`` of every item, [len(items), ...] in their order, with the work shared among the group.

        ``items`` must be the same on all members, and all results must have equal shapes. ``function`` must
        make no collective calls. If a member dies, the others compute its items.

        Raises ValueError if there are no items.
        """
        if not items:
            raise ValueError("map_gather and map_reduce need at least one item")
        gathered, gathered_numbers = [], torch.empty(0, dtype=torch.int64)
        missing, workers = list(range(len(items))), list(range(self.size))
        while missing:
            own_items = missing[workers.index(self.rank) :: len(workers)]
            # a member without items still computes one, to know the structure of results
            computed = [function(items[i]) for i in own_items or missing[:1]]
            stacked = pytree.tree_map(lambda *rows: torch.stack([tensor_of(r) for r in rows]), *computed)
            own_results = pytree.tree_map(functools.partial(_first_rows, len(own_items)), stacked)
            own_numbers, own_rank = torch.tensor(own_items, dtype=torch.int64), torch.tensor([self.rank])
            results, numbers, living = self.gather((own_results, own_numbers, own_rank), join=True)
            gathered.append(results)
            gathered_numbers = torch.cat([gathered_numbers, numbers])
            missing, workers = sorted(set(missing) - set(numbers.tolist())), living.tolist()
        in_order = gathered_numbers.argsort()
        return pytree.tree_map(lambda *leaves: torch.cat(leaves)[in_order.to(leaves[0].device)], *gathered)

    def map_reduce(self, function: Callable[[Any], Any], items: Sequence[Any], operation: Reduction) -> Any:
        """``operation`` (as in ``reduce``) over ``function`` of every item (as in ``map_gather``)."""
        return pytree.tree_map(_reduction(operation), self.map_gather(function, items))

    def _map(self, kind: str, x: Any, root: int = -1) -> Any:
        leaves, structure = pytree.tree_flatten(x)
        tensors = [tensor_of(leaf) for leaf in leaves]
        if kind == "mean" and any(not (t.is_floating_point() or t.is_complex()) for t in tensors):
            raise TypeError("a mean needs floating-point tensors: convert integers and booleans first")
        return pytree.tree_unflatten(_apply(_Map(self, kind, root), tensors), structure)


@dataclass
class _Map:
    """A linear map of the tensors of all members of a group, with the data that its adjoint needs."""

    group: Group
    kind: str
    root: int = -1
    rows: dict[int, list[int]] = field(default_factory=dict)  # of each tensor, by rank; for reduce-scatter

    def run(self, tensors: Sequence[Tensor], wants_gradient: bool) -> tuple[list[Tensor], bool]:
        """This member's results, and whether any member wants a gradient."""
        call = self.kind if self.root < 0 else f"{self.kind} {self.root}"
        contributions = self.group.exchange.gather(call, tensors, wants_gradient)
        inputs = {rank: message.tensors for rank, message in sorted(contributions.items())}
        if self.kind == "broadcast" and self.root not in inputs:
            raise FabricError(f"rank {self.root} died before it could broadcast: choose a living root")
        results = [
            self._result(index, {rank: values[index] for rank, values in inputs.items()}).to(x.device)
            for index, x in enumerate(tensors)
        ]
        if self.kind == "gather":
            self.rows = {rank: [len(x) for x in values] for rank, values in inputs.items()}
        return results, any(m.wants_gradient for m in contributions.values())

    def _result(self, index: int, inputs: dict[int, Tensor]) -> Tensor:
        """The result for tensor number ``index``, from that tensor of each rank."""
        if self.kind == "broadcast":
            return inputs[self.root]
        if self.kind == "gather":
            return torch.cat(list(inputs.values()))
        if self.kind == "reduce-scatter":
            return torch.stack([self._own_rows(index, x) for x in inputs.values()]).sum(0)
        if self.kind == "reduce" and self.group.rank != self.root:
            return torch.zeros_like(inputs[self.group.rank])
        stacked = torch.stack(list(inputs.values()))
        return stacked.mean(0) if self.kind == "mean" else stacked.sum(0)

    def _own_rows(self, index: int, x: Tensor) -> Tensor:
        """This member's rows of ``x``, which has those of all members."""
        own_rank = self.group.rank
        start = sum(counts[index] for rank, counts in self.rows.items() if rank < own_rank)
        return x[start : start + self.rows[own_rank][index]]

    def adjoint(self) -> _Map:
        """The map of the backward pass."""
        return _Map(self.group, _ADJOINT[self.kind], self.root, self.rows)


# every map here is linear in all members' inputs and has an adjoint
_ADJOINT = {
    "mean": "mean",
    "sum": "sum",
    "gather": "reduce-scatter",
    "reduce-scatter": "gather",
    "broadcast": "reduce",
    "reduce": "broadcast",
}


class _Linear(torch.autograd.Function):
    """Makes the adjoint the backward pass of results that are already computed; differentiable any number of
    times."""

    @staticmethod
    def forward(ctx: Any, linear_map: _Map, results: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.linear_map = linear_map
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *_apply(ctx.linear_map.adjoint(), list(gradients)))


def _apply(linear_map: _Map, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of the map; if any member wants a gradient, with its adjoint as their backward pass."""
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    with torch.no_grad():
        results, any_wants_gradient = linear_map.run([x.detach() for x in tensors], wants_gradient)
    if not (any_wants_gradient and torch.is_grad_enabled()):
        return results
    differentiable = [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]
    # members with constant inputs also take part in the collective of the backward pass
    inputs = [
        tensors[i] if tensors[i].requires_grad else tensors[i].detach().requires_grad_()
        for i in differentiable
    ]
    rows = {rank: [counts[i] for i in differentiable] for rank, counts in linear_map.rows.items()}
    restricted_map = _Map(linear_map.group, linear_map.kind, linear_map.root, rows)
    restricted_results = [results[i] for i in differentiable]
    attached = _Linear.apply(restricted_map, restricted_results, *inputs)  # type: ignore[no-untyped-call]
    for i, result in zip(differentiable, attached, strict=True):
        results[i] = result
    return results


def tensor_of(leaf: Any) -> Tensor:
    """A tensor, array or number as a tensor, Python's floats in float64. Raises TypeError for others."""
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, bool | int | float):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    if isinstance(leaf, np.ndarray | np.generic):
        return torch.tensor(leaf)
    raise TypeError(f"collectives take tensors and numbers in any nesting, not {type(leaf).__name__}")


def _reduction(operation: Reduction) -> Callable[[Tensor], Tensor]:
    if callable(operation):
        return operation
    if operation not in _REDUCTIONS:
        raise ValueError(f"there is no reduction '{operation}': use {', '.join(_REDUCTIONS)} or a function")
    return _REDUCTIONS[operation]


def _first_rows(count: int, rows: Tensor) -> Tensor:
    return rows[:count]


def _extreme(position_of: Callable[..., Tensor], stacked: Tensor) -> Tensor:
    # argmin and argmax do not support booleans; of equal values they return the first, of the lowest rank
    numbers = stacked.to(torch.uint8) if stacked.dtype == torch.bool else stacked
    return torch.take_along_dim(stacked, position_of(numbers, 0, keepdim=True), 0).squeeze(0)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "sum": lambda x: x.sum(0),
    "min": functools.partial(_extreme, torch.argmin),
    "max": functools.partial(_extreme, torch.argmax),
    "product": lambda x: x.prod(0),
}
