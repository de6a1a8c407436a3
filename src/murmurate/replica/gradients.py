"""Where the gradients of parameters are wanted: who computes them within autograd may write them there.

What goes through autograd instead has the dtype of its parameter, in memory of its own, and is copied: with a
bfloat16 copy of the parameters that rounds what was summed in float32, and passes over it twice more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Wanted:
    """``with Wanted(output, places) as wanted: torch.autograd.grad(wanted.root, ...)``.

    places: by the ``id`` of a parameter, the float32 tensor of its shape and strides that is to take its
    gradient. Only that one pass from ``output`` is served, and none that begins within it.

    Attributes:
        root: ``output``, behind a node that no other pass goes through.
        written: the ids of the parameters whose places were written; autograd gives None for them, or what
            another use of the same parameter adds.
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

    def __enter__(self) -> Wanted:
        self._before, _here.now = _here.now, self
        return self

    def __exit__(self, *failure: object) -> None:
        _here.now = self._before

    def _begins(self, gradients: tuple[Tensor, ...]) -> None:
        self.task = torch._C._current_graph_task_id()


class _Here(threading.local):  # a CPU's part of a pass runs in the thread that asked for it
    now: Wanted | None = None


_here = _Here()


def take(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The places of all of ``parameters``, for who writes them now and returns no gradients; None where they
    are not wanted, or were written already, or where a hook waits for one of the gradients. These must be the
    parameters themselves: what is computed from one, or stands for it, has a gradient of its own."""
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
