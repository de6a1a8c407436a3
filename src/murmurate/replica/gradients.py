"""Target tensors for gradients: an autograd function may write parameters' gradients there directly.

Gradients returned through autograd have the dtype of the parameter and memory of their own, and are then
copied: with bfloat16 parameters this rounds the float32 sums, and reads and writes them twice more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class GradientTargets:
    """``with GradientTargets(output, places) as targets: torch.autograd.grad(targets.root, ...)``.

    places: by the ``id`` of a parameter, the float32 tensor of its shape and strides for its
    gradient. Valid for one backward pass from ``output``, and not for passes nested in it.

    Attributes:
        root: a view of ``output``, whose node no other backward pass visits.
        written: the ids of the parameters whose targets were written; autograd returns None for these, or the
            gradient of another use of the same parameter.
    """

    def __init__(self, output: Tensor, places: Mapping[int, Tensor]) -> None:
        self.places, self.written = places, set[int]()
        self.task: int | None = None
        self.root = output
        if places and output.requires_grad:
            with torch.enable_grad():
                self.root = output.view_as(output)
            node: Any = self.root.grad_fn
            node.register_prehook(self._begins)

    def __enter__(self) -> GradientTargets:
        self._before, _here.now = _here.now, self
        return self

    def __exit__(self, *failure: object) -> None:
        _here.now = self._before

    def _begins(self, gradients: tuple[Tensor, ...]) -> None:
        self.task = torch._C._current_graph_task_id()


class _Here(threading.local):  # on a CPU a backward pass runs in the calling thread
    now: GradientTargets | None = None


_here = _Here()


def claim(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The target tensors of ``parameters``, for a caller that writes all of them now and returns no
    gradients.

    None if one has no target, was written already, or has a hook. The tensors must be the parameters
    themselves, not results computed from them."""
    now = _here.now
    if now is None or now.task is None or now.task != torch._C._current_graph_task_id():
        return None
    keys = [id(parameter) for parameter in parameters]
    if len(set(keys)) < len(keys) or not now.written.isdisjoint(keys):
        return None
    found = []
    for key, parameter in zip(keys, parameters, strict=True):
        place = now.places.get(key)
        if place is None or parameter._backward_hooks or place.stride() != parameter.stride():
            return None
        found.append(place)
    now.written.update(keys)
    return found
