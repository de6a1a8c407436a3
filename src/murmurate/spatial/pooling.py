"""Max, average and adaptive pooling over the parts of a replica."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from murmurate.spatial.layout import Interval, Layout, Plan, plan
from murmurate.spatial.parts import Parts
from murmurate.spatial.reductions import sum_dtype, summed
from murmurate.spatial.sliding import Kernel, Sliding, needed_inputs, outputs_of, pair
from murmurate.spatial.tensor import SpatialTensor, arranged_evenly, refuse, spatial, window
from murmurate.spatial.window import assemble, own_gradient, receive_halos, send_halos


@spatial("max_pool2d")
def max_pool2d(
    x: SpatialTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> SpatialTensor:
    """``torch.nn.functional.max_pool2d`` for x [N, C, H, W] over the parts."""
    kernel = _kernel(x, kernel_size, stride, padding, dilation, ceil_mode)
    outputs = outputs_of(kernel, x.arrangement, x.parts)
    window_plan = plan(x.arrangement, *needed_inputs(kernel, outputs), x.parts.rank)
    y: Tensor = _MaxPool.apply(x.local, x.parts, window_plan, kernel)  # type: ignore[no-untyped-call]
    return x.like(y, outputs)


class _MaxPool(torch.autograd.Function):
    """Saves for the backward pass only the positions of the maxima, not the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts, window_plan: Plan, kernel: Kernel) -> Tensor:
        window_x = x
        if not window_plan.is_trivial:
            pieces = receive_halos(send_halos(x, window_plan, parts), x, window_plan, parts)
            lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
            window_x = assemble(window_plan.window, [(window_plan.own, x), *pieces], x, lowest)
        sizes, strides, dilations = _as_pairs(kernel)
        y, positions = functional.max_pool2d_with_indices(window_x, sizes, strides, (0, 0), dilations)
        ctx.save_for_backward(positions)
        ctx.parts, ctx.plan, ctx.kernel, ctx.shape = parts, window_plan, kernel, window_x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        sizes, strides, dilations = _as_pairs(ctx.kernel)
        like = gradient.new_empty(1).expand(ctx.shape)  # only its shape matters
        window_gradient = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient.contiguous(), like, sizes, strides, (0, 0), dilations, False, positions
        )
        if ctx.plan.is_trivial:
            return window_gradient, None, None, None
        return own_gradient(window_gradient, ctx.plan, ctx.parts), None, None, None


@spatial("avg_pool2d")
def avg_pool2d(
    x: SpatialTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> SpatialTensor:
    """``torch.nn.functional.avg_pool2d`` for x [N, C, H, W] over the parts."""
    kernel = _kernel(x, kernel_size, stride, padding, 1, ceil_mode)
    outputs = outputs_of(kernel, x.arrangement, x.parts)
    local = window(x, *needed_inputs(kernel, outputs))
    sizes, strides, _ = _as_pairs(kernel)
    sums = functional.avg_pool2d(local.to(sum_dtype(local)), sizes, strides, divisor_override=1)
    if divisor_override is not None:
        return x.like((sums / divisor_override).to(local.dtype), outputs)
    counts = [
        _counts(axis, own, size, count_include_pad)
        for axis, own, size in zip(kernel, outputs.rect(x.parts.rank), x.arrangement.sizes, strict=True)
    ]
    divisor = torch.tensor(counts[0], dtype=sums.dtype)[:, None] * torch.tensor(counts[1], dtype=sums.dtype)
    return x.like((sums / divisor.to(sums.device)).to(local.dtype), outputs)


def _counts(axis: Sliding, outputs: Interval, size: int, include_padding: bool) -> list[int]:
    """The number of pixels along one axis by which each output is divided."""
    padding, counts = axis.before, []
    for output in range(*outputs):
        first = output * axis.stride - padding
        stop = min(first + axis.kernel, size + padding)
        counts.append(stop - first if include_padding else min(stop, size) - max(first, 0))
    return counts


@spatial("adaptive_avg_pool2d")
def adaptive_avg_pool2d(x: SpatialTensor, output_size: Any) -> SpatialTensor | Tensor:
    """``torch.nn.functional.adaptive_avg_pool2d``. With more parts than outputs along an axis, the result is
    an ordinary tensor, whole on every part."""
    if not x.dtype.is_floating_point:
        raise refuse(x, f"adaptive_avg_pool2d of {x.dtype}")
    sizes = _output_sizes(x, output_size)
    bins = [_bins(size, count) for size, count in zip(x.arrangement.sizes, sizes, strict=True)]
    if any(count < parts for count, parts in zip(sizes, x.parts.grid, strict=True)):
        own = x.arrangement.rect(x.parts.rank)
        return summed(_means(x.local, bins, own), x.parts).to(x.dtype)
    outputs = arranged_evenly(sizes, x.parts)
    return x.like(_means(*_adaptive_window(x, bins, outputs)).to(x.dtype), outputs)


@spatial("adaptive_max_pool2d")
def adaptive_max_pool2d(
    x: SpatialTensor, output_size: Any, return_indices: bool = False
) -> SpatialTensor | Tensor:
    """``torch.nn.functional.adaptive_max_pool2d``. With more parts than outputs along an axis, it is computed
    on the gathered image, and whole on every part."""
    sizes = _output_sizes(x, output_size)
    if any(count < parts for count, parts in zip(sizes, x.parts.grid, strict=True)):
        return functional.adaptive_max_pool2d(x.whole(), sizes)
    bins = [_bins(size, count) for size, count in zip(x.arrangement.sizes, sizes, strict=True)]
    outputs = arranged_evenly(sizes, x.parts)
    local, (rows, columns), frame = _adaptive_window(x, bins, outputs)
    (top, _), (left, _) = frame
    y = [
        [
            local[..., r[0] - top : r[1] - top, c[0] - left : c[1] - left].flatten(-2).max(-1)[0]
            for c in columns
        ]
        for r in rows
    ]
    return x.like(torch.stack([torch.stack(row, -1) for row in y], -2), outputs)


def _adaptive_window(
    x: SpatialTensor, bins: list[list[Interval]], outputs: Layout
) -> tuple[Tensor, list[list[Interval]], tuple[Interval, ...]]:
    """(this part's window, its bins along rows and columns, the window's rows and columns)."""
    needs = [
        tuple((b[first][0], b[stop - 1][1]) for first, stop in intervals)
        for b, intervals in zip(bins, outputs.intervals(), strict=True)
    ]
    own = outputs.rect(x.parts.rank)
    i, j = divmod(x.parts.rank, x.parts.grid[1])
    own_bins = [b[first:stop] for b, (first, stop) in zip(bins, own, strict=True)]
    return window(x, needs[0], needs[1]), own_bins, (needs[0][i], needs[1][j])


def _bins(size: int, count: int) -> list[Interval]:
    """The pixels along an axis of which each of ``count`` outputs is the mean or maximum, as in torch."""
    return [(o * size // count, -(-(o + 1) * size // count)) for o in range(count)]


def _means(x: Tensor, bins: list[list[Interval]], held: tuple[Interval, ...]) -> Tensor:
    """The mean of each bin over the pixels of ``x``, which has the rows and columns ``held``; in float32 or
    more, as the weight of a pixel, such as 1/7, is far from exact in half precision."""
    x = x.to(sum_dtype(x))
    rows, columns = (_averaging(b, i, x) for b, i in zip(bins, held, strict=True))
    with torch.autocast(x.device.type, enabled=False):  # it would compute the products in its own dtype
        return rows @ x @ columns.T


def _averaging(bins: list[Interval], held: Interval, like: Tensor) -> Tensor:
    """[bins, pixels of ``held``]: the weight of each pixel in the mean of each bin."""
    weights = torch.zeros(len(bins), held[1] - held[0], dtype=like.dtype, device=like.device)
    for row, (first, stop) in enumerate(bins):
        begin, end = max(first, held[0]), min(stop, held[1])
        if begin < end:
            weights[row, begin - held[0] : end - held[0]] = 1 / (stop - first)
    return weights


def _output_sizes(x: SpatialTensor, output_size: Any) -> tuple[int, int]:
    given = (output_size, output_size) if isinstance(output_size, int) or output_size is None else output_size
    rows, columns = (size if s is None else s for s, size in zip(given, x.arrangement.sizes, strict=True))
    return rows, columns


def _kernel(x: SpatialTensor, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Kernel:
    sizes, paddings, dilations = pair(size), pair(padding), pair(dilation)
    strides = sizes if stride is None or stride == [] else pair(stride)
    if any(2 * p > k for p, k in zip(paddings, sizes, strict=True)):
        raise refuse(x, f"pooling with padding {paddings}, more than half the kernel {sizes},")
    axes = []
    for i, length in enumerate(x.arrangement.sizes):
        axis = Sliding(sizes[i], strides[i], dilations[i], paddings[i], paddings[i])
        if ceil:
            axis = _with_partial_windows(axis, length)
        axes.append(axis)
    return axes[0], axes[1]


def _with_partial_windows(axis: Sliding, size: int) -> Sliding:
    """``ceil_mode``: one more output if its window begins within the image or the padding before it."""
    rest = size + 2 * axis.before - axis.reach
    count = -(-rest // axis.stride) + 1
    if (count - 1) * axis.stride >= size + axis.before:
        count -= 1
    after = (count - 1) * axis.stride + axis.reach - size - axis.before
    return Sliding(axis.kernel, axis.stride, axis.dilation, axis.before, max(after, axis.after))


def _as_pairs(kernel: Kernel) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Sizes, strides and dilations, each (along rows, along columns)."""
    rows, columns = kernel
    return (rows.kernel, columns.kernel), (rows.stride, columns.stride), (rows.dilation, columns.dilation)
