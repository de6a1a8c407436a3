"""Where the gradients of parameters are wanted: who computes them within autograd may write them there.

What goes through autograd instead has the dtype of its parameter, in memory of its own, and is copied: with a
bfloat16 copy of the parameters that rounds what was summed in float32, and passes over it twice more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor


class _Wanted(threading.local):  # a CPU's part of a backward pass runs in the thread that asked for it
    def __init__(self) -> None:
        self.places: Mapping[int, Tensor] = {}
        self.written: set[int] = set()


_here = _Wanted()


def want(places: Mapping[int, Tensor]) -> None:
    """From now on, in this thread: ``places`` has, by the address of a parameter, the float32 tensor of its
    shape and strides that is to take its gradient."""
    _here.places, _here.written = places, set()


def written() -> set[int]:
    """The addresses of the parameters whose places were written since ``want``, and an end to it."""
    found = _here.written
    _here.places, _here.written = {}, set()
    return found


def take(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The places of all of ``parameters``, for who writes them now and returns no gradients; None where they
    are not wanted, or were written already, or where somebody looks at one of the gradients on its way."""
    if not _here.places:
        return None
    found = []
    for parameter in parameters:
        place = _here.places.get(parameter.data_ptr())
        if place is None or parameter._backward_hooks or place.stride() != parameter.stride():
            return None
        found.append(place)
    addresses = [parameter.data_ptr() for parameter in parameters]
    if not _here.written.isdisjoint(addresses):
        return None
    _here.written.update(addresses)
    return found
