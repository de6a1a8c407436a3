"""Convolution over the parts of a replica (Jin 2018, section 4.3), and transposed convolution.

Differs from the paper: while halos are being sent, each part computes all its outputs from its own pixels,
and afterwards computes again only those that need a halo; so no padded copy of the image is made or kept.
Where that is not possible or many need one, and in transposed convolution, all are computed once the halos
have arrived. Strides, uneven sizes, and halos wider than a part are allowed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from murmurate.spatial.layout import Interval, Layout, Plan, Rect, common, plan
from murmurate.spatial.parts import Parts
from murmurate.spatial.sliding import Kernel, Pair, Sliding, needed_inputs, outputs_of, pair
from murmurate.spatial.tensor import SpatialTensor, arranged_evenly, spatial, window
from murmurate.spatial.window import (
    Pieces,
    add_halo_gradients,
    assemble,
    format_of,
    own_gradient,
    receive_halos,
    send_halos,
)

NeedsGrad = tuple[bool, bool, bool]  # whether input, weight and bias need a gradient
_MOST_REPEATED = 0.125  # share of the outputs; if more need a halo, all are computed only once it has arrived


@dataclass(frozen=True)
class Strip:
    """Outputs that need a halo.

    outputs: their rectangle in the whole output. inputs: the rectangle of the whole input that they need.
    halo: the rectangle of ``inputs`` that other parts hold.
    """

    outputs: Rect
    inputs: Rect
    halo: Rect


@dataclass(frozen=True)
class Geometry:
    """How one part computes its outputs.

    padding: the padding with which the part's own pixels give an output at every place; those in ``strips``
    are computed again once their halos have arrived. None: all outputs are computed once the whole window has
    arrived.
    """

    kernel: Kernel
    outputs: Rect
    plan: Plan
    padding: Pair | None
    strips: tuple[Strip, ...]
    stride: Pair
    dilation: Pair


@spatial("conv2d")
def conv2d(
    x: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> SpatialTensor:
    """``torch.nn.functional.conv2d`` for x [N, C, H, W] or [C, H, W]; weight and bias are the same on all
    parts."""
    if x.dim() == 3:  # for which torch's backward pass has no function of its own
        image = x.like(x.local[None])
        y: SpatialTensor = conv2d(image, weight, bias, stride, padding, dilation, groups)
        return y.like(y.local[0])
    kernel = _kernel(weight, pair(stride), padding, pair(dilation))
    outputs = outputs_of(kernel, x.arrangement, x.parts)
    geometry = _geometry(kernel, x.arrangement, outputs, x.parts.rank)
    local, weight, bias = cast(x.local, weight, bias)
    own: Tensor = _Conv2d.apply(local, weight, bias, x.parts, geometry, groups)  # type: ignore[no-untyped-call]
    return x.like(own, outputs)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts, g: Geometry, groups: int
    ) -> Tensor:
        number = send_halos(x, g.plan, parts)
        if g.padding is not None:
            y = functional.conv2d(x, weight, bias, g.stride, g.padding, g.dilation, groups)
            pieces = receive_halos(number, x, g.plan, parts)
            for strip in g.strips:
                strip_x = assemble(strip.inputs, [(g.plan.own, x), *pieces], x)
                strip_y = functional.conv2d(strip_x, weight, bias, g.stride, 0, g.dilation, groups)
                y[strip.outputs.slices(g.outputs)] = strip_y
        else:
            pieces = receive_halos(number, x, g.plan, parts)
            window_x = assemble(g.plan.window, [(g.plan.own, x), *pieces], x)
            y = functional.conv2d(window_x, weight, bias, g.stride, 0, g.dilation, groups)
        # copies: messages are views of a queue's memory, which stays in use as long as they exist
        ctx.save_for_backward(x, weight, *(pixels.clone() for _, pixels in pieces))
        ctx.rects = [rect for rect, _ in pieces]
        ctx.parts, ctx.geometry, ctx.groups = parts, g, groups
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, *pixels = ctx.saved_tensors
        pieces = list(zip(ctx.rects, pixels, strict=True))
        needs_grad = ctx.needs_input_grad[:3]
        compute = _backward_with_strips if ctx.geometry.padding is not None else _backward_of_window
        gradients = compute(ctx, gradient, x, weight, pieces, needs_grad)
        return (*gradients, None, None, None)


def _backward_with_strips(
    ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, pieces: Pieces, needs_grad: NeedsGrad
) -> list[Tensor | None]:
    """Compute the halos' gradients, and send them before the own pixels' gradients are computed."""
    g, parts = ctx.geometry, ctx.parts
    weight_gradients: list[Tensor] = []
    halo_gradients: list[tuple[Rect, Tensor]] = []
    for strip in g.strips:
        # without the part's own pixels, whose share of the gradients is computed below
        halo_alone = [
            (rect.intersection(strip.halo), _crop(pixels, rect, strip.halo)) for rect, pixels in pieces
        ]
        strip_x = assemble(strip.inputs, [p for p in halo_alone if not p[0].is_empty], x)
        strip_gradient = gradient[strip.outputs.slices(g.outputs)]
        strip_needs = (needs_grad[0], needs_grad[1], False)
        gradients = _gradients(
            strip_gradient, strip_x, weight, g.stride, (0, 0), g.dilation, ctx.groups, strip_needs
        )
        if gradients[0] is not None:
            halo_gradients.append((strip.halo, _crop(gradients[0], strip.inputs, strip.halo)))
        if gradients[1] is not None:
            weight_gradients.append(gradients[1])
    number = 0
    if needs_grad[0]:
        messages = []
        for q, rect in g.plan.incoming:
            halo, pixels = next(h for h in halo_gradients if h[0].contains(rect))
            messages.append((q, pixels[rect.slices(halo)]))
        number = parts.send(messages)
    own_gradients = _gradients(gradient, x, weight, g.stride, g.padding, g.dilation, ctx.groups, needs_grad)
    if own_gradients[1] is not None:
        for addend in weight_gradients:
            own_gradients[1] += addend
    if own_gradients[0] is not None:
        add_halo_gradients(own_gradients[0], number, g.plan, parts)
    return own_gradients


def _backward_of_window(
    ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, pieces: Pieces, needs_grad: NeedsGrad
) -> list[Tensor | None]:
    """Compute the gradients of the whole window, and then send those of its halo."""
    g = ctx.geometry
    window_x = assemble(g.plan.window, [(g.plan.own, x), *pieces], x)
    gradients = _gradients(gradient, window_x, weight, g.stride, (0, 0), g.dilation, ctx.groups, needs_grad)
    window_gradient = gradients[0]
    if window_gradient is not None:
        gradients[0] = own_gradient(window_gradient, g.plan, ctx.parts)
    return gradients


def _gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    needs_grad: NeedsGrad,
) -> list[Tensor | None]:
    """The gradients with respect to input, weight and bias; None where none is needed."""
    if not any(needs_grad):
        return [None, None, None]
    bias_sizes = [weight.shape[0]] if needs_grad[2] else None
    gradients = torch.ops.aten.convolution_backward(
        gradient, x, weight, bias_sizes, stride, padding, dilation, False, (0, 0), groups, list(needs_grad)
    )
    return [each if required else None for each, required in zip(gradients, needs_grad, strict=True)]


def _crop(pixels: Tensor, frame: Rect, rect: Rect) -> Tensor:
    """Of the pixels of ``frame`` those in ``rect``; all of them if none are."""
    shared = frame.intersection(rect)
    return pixels if shared.is_empty else pixels[shared.slices(frame)]


# -- geometry -----------------------------------------------------------------------------------------


def _kernel(weight: Tensor, stride: Pair, padding: Any, dilation: Pair) -> Kernel:
    sizes = weight.shape[-2], weight.shape[-1]
    if padding == "same":  # if the total is odd, torch pads one more pixel after the image
        total = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in pair(0 if padding == "valid" else padding)]
    rows, columns = (
        Sliding(k, s, d, *side) for k, s, d, side in zip(sizes, stride, dilation, sides, strict=True)
    )
    return rows, columns


@functools.lru_cache(maxsize=1 << 12)
def _geometry(kernel: Kernel, arrangement: Layout, outputs: Layout, part: int) -> Geometry:
    window_plan = plan(arrangement, *needed_inputs(kernel, outputs), part)
    own_outputs = outputs.rect(part)
    stride = kernel[0].stride, kernel[1].stride
    dilation = kernel[0].dilation, kernel[1].dilation
    padding = [_padding(*axis) for axis in zip(kernel, own_outputs, window_plan.own, strict=True)]
    if padding[0] is not None and padding[1] is not None:
        strips = _strips(kernel, own_outputs, window_plan)
        repeated = sum(s.outputs.sizes[0] * s.outputs.sizes[1] for s in strips)
        if repeated <= _MOST_REPEATED * own_outputs.sizes[0] * own_outputs.sizes[1]:
            sides = padding[0], padding[1]
            return Geometry(kernel, own_outputs, window_plan, sides, tuple(strips), stride, dilation)
    return Geometry(kernel, own_outputs, window_plan, None, (), stride, dilation)


def _padding(axis: Sliding, outputs: Interval, own: Interval) -> int | None:
    """The padding with which the own pixels give outputs in the right places; None if no padding does."""
    padding = own[0] - axis.inputs(outputs)[0]
    size = own[1] - own[0] + 2 * padding
    fits = padding >= 0 and size >= axis.reach
    return padding if fits and (size - axis.reach) // axis.stride + 1 == outputs[1] - outputs[0] else None


def _strips(kernel: Kernel, outputs: Rect, window_plan: Plan) -> list[Strip]:
    """The strips above, below, left and right; the halo's corners belong to those above and below."""
    within = Rect(*(common(w, i) for w, i in zip(window_plan.window, window_plan.image, strict=True)))
    middle = Rect(common(window_plan.own.rows, within.rows), within.columns)
    strips = []
    for halo, affected in _sides(kernel[0], outputs.rows, window_plan.own.rows, within.rows):
        strips.append((Rect(affected, outputs.columns), Rect(halo, within.columns)))
    for halo, affected in _sides(kernel[1], outputs.columns, window_plan.own.columns, within.columns):
        strips.append((Rect(outputs.rows, affected), Rect(middle.rows, halo)))
    return [
        Strip(affected, Rect(kernel[0].inputs(affected.rows), kernel[1].inputs(affected.columns)), halo)
        for affected, halo in strips
    ]


def _sides(
    axis: Sliding, outputs: Interval, own: Interval, within: Interval
) -> list[tuple[Interval, Interval]]:
    """(halo, the outputs that need it), on either side along one axis."""
    sides = []
    if within[0] < own[0]:
        stop = min(outputs[1], -(-(own[0] + axis.before) // axis.stride))
        sides.append(((within[0], own[0]), (outputs[0], stop)))
    if within[1] > own[1]:
        begin = max(outputs[0], -(-(own[1] + axis.before - axis.reach + 1) // axis.stride))
        sides.append(((own[1], within[1]), (begin, outputs[1])))
    return sides


# -- transposed ---------------------------------------------------------------------------------------


@spatial("conv_transpose2d")
def conv_transpose2d(
    x: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> SpatialTensor:
    """``torch.nn.functional.conv_transpose2d`` for x [N, C, H, W] over the parts."""
    stride, padding, dilation = pair(stride), pair(padding), pair(dilation)
    extras = pair(output_padding)
    kernel = [Sliding(weight.shape[2 + i], stride[i], dilation[i], padding[i], padding[i]) for i in (0, 1)]
    sizes = [
        (size - 1) * k.stride - 2 * k.before + k.reach + extra
        for size, k, extra in zip(x.arrangement.sizes, kernel, extras, strict=True)
    ]
    outputs = arranged_evenly((sizes[0], sizes[1]), x.parts)
    needs = [
        tuple(_sources(k, interval, size) for interval in intervals)
        for k, intervals, size in zip(kernel, outputs.intervals(), x.arrangement.sizes, strict=True)
    ]
    local, weight, bias = cast(window(x, needs[0], needs[1]), weight, bias)
    y = functional.conv_transpose2d(local, weight, None, stride, 0, 0, groups, dilation)
    grid_place = divmod(x.parts.rank, x.parts.grid[1])
    for axis, i in enumerate(grid_place):
        first = needs[axis][i][0] * stride[axis] - padding[axis]
        y = _placed(y, axis - 2, first, outputs.intervals()[axis][i])
    y = y.contiguous(memory_format=format_of(local))
    return x.like(y if bias is None else y + bias[:, None, None], outputs)


def _sources(kernel: Sliding, outputs: Interval, size: int) -> Interval:
    """The input pixels that ``outputs`` of a transposed convolution depend on; at least one."""
    first = -(-(outputs[0] + kernel.before - kernel.reach + 1) // kernel.stride)
    stop = (outputs[1] - 1 + kernel.before) // kernel.stride + 1
    first = min(max(first, 0), size - 1)
    return first, max(min(stop, size), first + 1)


def _placed(y: Tensor, dim: int, first: int, outputs: Interval) -> Tensor:
    """``y``, whose first entry along ``dim`` is output ``first``, cut or extended to ``outputs``."""
    begin, stop = max(outputs[0] - first, 0), min(outputs[1] - first, y.shape[dim])
    stop = max(begin, stop)
    before = min(max(first - outputs[0], 0), outputs[1] - outputs[0])
    after = outputs[1] - outputs[0] - before - max(stop - begin, 0)
    if begin >= y.shape[dim] or stop <= begin:
        begin = stop = 0
    if (begin, stop) != (0, y.shape[dim]):
        y = y.narrow(dim, begin, stop - begin)
    if before or after:
        y = functional.pad(y, (0, 0, before, after) if dim == -2 else (before, after))
    return y


def cast(*tensors: Tensor | None) -> Any:
    """``tensors`` in autocast's dtype if autocast is on, as torch's own convolution would cast them: all but
    float64."""
    first = tensors[0]
    if first is None or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
