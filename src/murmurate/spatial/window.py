"""Halo exchange: every part gets the rectangle it needs, its window (Jin 2018, eq. 4.1, 4.2, 4.7, 4.8).

Its backward pass is the adjoint: the gradient of a window goes back to the parts that hold its pixels, and is
added there, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.spatial.layout import Layout, Plan, Rect, plan
from murmurate.spatial.parts import Expected, Parts

Pieces = Sequence[tuple[Rect, Tensor]]


def fetch_window(x: Tensor, layout: Layout, window: Layout | Plan, parts: Parts, fill: float = 0.0) -> Tensor:
    """This part's window, [..., rows, columns], from ``x``, this part's rectangle of ``layout``.

    window: a plan, or a layout that the result is to have. fill: the value of pixels beyond the image.
    Differentiable once. All parts must call it.
    """
    window_plan = plan(layout, *window.intervals(), parts.rank) if isinstance(window, Layout) else window
    if window_plan.is_trivial:
        return x
    result: Tensor = _Fetch.apply(x, parts, window_plan, fill)  # type: ignore[no-untyped-call]
    return result


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts, window_plan: Plan, fill: float) -> Tensor:
        ctx.parts, ctx.plan = parts, window_plan
        pieces = receive_halos(send_halos(x, window_plan, parts), x, window_plan, parts)
        return assemble(window_plan.window, [(window_plan.own, x), *pieces], x, fill)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return own_gradient(gradient, ctx.plan, ctx.parts), None, None, None


def send_halos(x: Tensor, window_plan: Plan, parts: Parts) -> int:
    """Send the other parts what they need of ``x``; returns the number of the exchange."""
    return parts.send([(q, x[rect.slices(window_plan.own)]) for q, rect in window_plan.outgoing])


def receive_halos(number: int, x: Tensor, window_plan: Plan, parts: Parts) -> list[tuple[Rect, Tensor]]:
    """(rectangle, pixels) from every other part that holds pixels which this part needs."""
    expected = [Expected(q, (*x.shape[:-2], *rect.sizes), x.dtype) for q, rect in window_plan.incoming]
    tensors = parts.receive(number, expected)
    return [
        (rect, pixels.to(x.device)) for (_, rect), pixels in zip(window_plan.incoming, tensors, strict=True)
    ]


def own_gradient(window_gradient: Tensor, window_plan: Plan, parts: Parts) -> Tensor:
    """The gradient of this part's rectangle from those of all parts' windows."""
    number = parts.send(
        [(q, window_gradient[rect.slices(window_plan.window)]) for q, rect in window_plan.incoming]
    )
    gradient = empty(window_plan.own, window_gradient).zero_()
    shared = window_plan.own.intersection(window_plan.window)
    if not shared.is_empty:
        gradient[shared.slices(window_plan.own)] = window_gradient[shared.slices(window_plan.window)]
    add_halo_gradients(gradient, number, window_plan, parts)
    return gradient


def add_halo_gradients(gradient: Tensor, number: int, window_plan: Plan, parts: Parts) -> None:
    """Add to ``gradient``, that of this part's rectangle, the gradients that the parts which used its pixels
    send back (eq. 4.7, 4.8)."""
    leading = gradient.shape[:-2]
    expected = [Expected(q, (*leading, *rect.sizes), gradient.dtype) for q, rect in window_plan.outgoing]
    for (_, rect), addend in zip(window_plan.outgoing, parts.receive(number, expected), strict=True):
        gradient[rect.slices(window_plan.own)] += addend.to(gradient.device)


def assemble(frame: Rect, pieces: Pieces, like: Tensor, fill: float = 0.0) -> Tensor:
    """A tensor of the rectangle ``frame`` with the pixels of ``pieces``, which are disjoint, and ``fill``
    elsewhere. like: has the result's leading dimensions, dtype, device and memory format."""
    result = empty(frame, like)
    if sum(_area(frame.intersection(rect)) for rect, _ in pieces) < _area(frame):
        result.fill_(fill)
    for rect, pixels in pieces:
        shared = frame.intersection(rect)
        if not shared.is_empty:
            result[shared.slices(frame)] = pixels[shared.slices(rect)]
    return result


def empty(frame: Rect, like: Tensor) -> Tensor:
    """A tensor of a rectangle, with the leading dimensions and the memory format of ``like``."""
    shape = (*like.shape[:-2], *frame.sizes)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=format_of(like))


def format_of(x: Tensor) -> torch.memory_format:
    """The memory format of ``x``: channels last, unless ``x`` is contiguous as well."""
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _area(rect: Rect) -> int:
    return 0 if rect.is_empty else rect.sizes[0] * rect.sizes[1]
