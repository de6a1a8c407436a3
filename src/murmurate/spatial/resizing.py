"""Resizing, padding and cutting images over the parts of a replica.

All but a few special cases work along one axis after the other: along each, a pixel of the result is a
weighted sum of a few pixels of the source, its taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from murmurate.spatial.layout import Layout
from murmurate.spatial.pooling import adaptive_avg_pool2d
from murmurate.spatial.reductions import sum_dtype
from murmurate.spatial.tensor import SpatialTensor, arranged_evenly, refuse, spatial, window

# ratios of the sizes of result and source at which torch, on a CPU, ignores the ``scale_factor``, such as
# 1.05 for 9 pixels
_EXACT_RATIOS = {"nearest": (1, 2), "bilinear": (1,)}


class Taps(NamedTuple):
    """The taps along one axis. pixels: [taps, outputs] int64, positions in the source. weights: of the same
    shape, float64; None: all 1."""

    pixels: Tensor
    weights: Tensor | None


@spatial("interpolate", "upsample")
def interpolate(
    x: SpatialTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """``torch.nn.functional.interpolate`` for x [N, C, H, W], in all its modes for images; raises Refusal for
    ``antialias``."""
    sizes, factors = _sizes(x, size, scale_factor, bool(recompute_scale_factor))
    if mode == "area":
        return adaptive_avg_pool2d(x, sizes)
    if antialias or mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        raise refuse(x, f"interpolate with mode {mode}{' and antialias' * antialias}")
    times = _whole_factors(x.arrangement.sizes, sizes, factors, mode)
    if times is not None and not align_corners:
        return _enlarged(x, times, mode)
    if not (mode.startswith("nearest") or x.dtype.is_floating_point):
        raise refuse(x, f"interpolate with mode {mode} of {x.dtype}")
    taps = []
    for old, new, factor in zip(x.arrangement.sizes, sizes, factors, strict=True):
        if x.device.type == "cpu" and any(new == r * old for r in _EXACT_RATIOS.get(mode, ())):
            factor = old / new
        outputs = torch.arange(new, dtype=torch.float64)
        if mode.startswith("nearest"):
            offset = 0.5 if mode == "nearest-exact" else 0.0
            source = (outputs.float() + offset) * factor  # torch computes these positions in single precision
            taps.append(_nearest(source, old))
        else:
            if align_corners:
                source = outputs * ((old - 1) / (new - 1) if new > 1 else 0.0)
            else:
                source = (outputs + 0.5) * factor - 0.5
            taps.append(_linear(source, old) if mode == "bilinear" else _cubic(source, old))
    return mapped(x, taps[0], taps[1], arranged_evenly(sizes, x.parts))


def _whole_factors(
    old: tuple[int, int], new: tuple[int, int], factors: tuple[float, float], mode: str
) -> tuple[int, int] | None:
    """The factors by which rows and columns grow, if they are whole numbers for which torch's own function
    rounds on a part as on the whole image; else None."""
    times = new[0] // old[0], new[1] // old[1]
    exact = (2, 4, 8) if mode.startswith("nearest") else range(1, 17)
    if all(
        t in exact and t * o == n and f == 1 / t for t, o, n, f in zip(times, old, new, factors, strict=True)
    ):
        return times
    return None


def _enlarged(x: SpatialTensor, times: tuple[int, int], mode: str) -> SpatialTensor:
    """``x`` enlarged by whole factors: torch's own function, applied to this part's window."""
    halo = {"bilinear": 1, "bicubic": 2}.get(mode, 0)
    needs = [
        [(max(0, first - halo), min(size, stop + halo)) for first, stop in intervals]
        for intervals, size in zip(x.arrangement.intervals(), x.arrangement.sizes, strict=True)
    ]
    scale = [float(t) for t in times]
    y = functional.interpolate(window(x, needs[0], needs[1]), scale_factor=scale, mode=mode)
    for dim, own in zip((-2, -1), x.arrangement.rect(x.parts.rank), strict=True):
        begin = needs[dim][divmod(x.parts.rank, x.parts.grid[1])[dim]][0]
        y = y.narrow(dim, times[dim] * (own[0] - begin), times[dim] * (own[1] - own[0]))
    bounds = x.arrangement.rows, x.arrangement.columns
    rows, columns = (tuple(t * b for b in axis) for t, axis in zip(times, bounds, strict=True))
    return x.like(y, Layout(rows, columns))


@spatial("pad")
def pad(x: SpatialTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """``torch.nn.functional.pad`` in all its modes. Raises Refusal for other dimensions than rows and columns
    where the mode is not constant, for a circular mode that crops one side and pads the other, and for a
    reflection of as many pixels as there are, or more."""
    left, right, above, below = (*pad, 0, 0, 0, 0)[:4]
    other_dims = list(pad[4:])
    if mode != "constant" and any(other_dims):
        raise refuse(x, f"pad with mode {mode} along other dimensions than rows and columns")
    rows, columns = x.arrangement.sizes
    outputs = arranged_evenly((rows + above + below, columns + left + right), x.parts)
    if mode == "constant":
        own_rows, own_columns = outputs.intervals()
        y = window(
            x,
            [(first - above, stop - above) for first, stop in own_rows],
            [(first - left, stop - left) for first, stop in own_columns],
            float(value or 0.0),
        )
        if other_dims:
            y = functional.pad(y, [0, 0, 0, 0, *other_dims], value=value)
        return x.like(y, outputs)
    taps = []
    for size, before, after in ((rows, above, below), (columns, left, right)):
        if mode == "circular" and min(before, after) < 0 < max(before, after):
            raise refuse(x, "pad with mode circular that crops one side and adds to the other")
        if mode == "reflect" and max(before, after) >= size:
            raise refuse(x, f"reflecting {max(before, after)} of {size} pixels")
        taps.append(Taps(_outside(torch.arange(-before, size + after), size, mode)[None], None))
    return mapped(x, taps[0], taps[1], outputs)


@spatial("pixel_shuffle")
def pixel_shuffle(x: SpatialTensor, upscale_factor: int) -> SpatialTensor:
    """``torch.nn.functional.pixel_shuffle`` for x [N, C, H, W]."""
    bounds = (tuple(b * upscale_factor for b in axis) for axis in (x.arrangement.rows, x.arrangement.columns))
    return x.like(functional.pixel_shuffle(x.local, upscale_factor), Layout(*bounds))


def mapped(x: SpatialTensor, rows: Taps, columns: Taps, outputs: Layout) -> SpatialTensor:
    """The image [N, C, *outputs.sizes] whose pixels are sums over the taps ``rows`` and then ``columns``."""
    needs, own_taps = [], []
    for axis, (taps, intervals) in enumerate(zip((rows, columns), outputs.intervals(), strict=True)):
        spans = [taps.pixels[:, first:stop] for first, stop in intervals]
        needs.append([(int(s.min()), int(s.max()) + 1) for s in spans])
        i = divmod(x.parts.rank, x.parts.grid[1])[axis]  # this part's row or column of the grid
        weights = None if taps.weights is None else taps.weights[:, slice(*intervals[i])]
        own_taps.append(Taps(spans[i] - needs[axis][i][0], weights))
    y = window(x, needs[0], needs[1])
    if any(taps.weights is not None for taps in own_taps):
        y = y.to(sum_dtype(y))  # as torch, which rounds the result alone to half precision
    return x.like(_along(_along(y, -2, own_taps[0]), -1, own_taps[1]).to(x.dtype), outputs)


def _along(x: Tensor, dim: int, taps: Taps) -> Tensor:
    """The weighted sums over ``taps`` along ``dim``."""
    # compared in host memory: on a GPU the comparison would wait for the device
    if taps.weights is None and torch.equal(taps.pixels[0], torch.arange(x.shape[dim])):
        return x
    pixels = taps.pixels.to(x.device)
    if taps.weights is None:
        return x.index_select(dim, pixels[0])
    weights = taps.weights.to(x.device, x.dtype)
    if dim == -2:
        weights = weights[..., None]
    total = x.index_select(dim, pixels[0]) * weights[0]
    for tap, weight in zip(pixels[1:], weights[1:], strict=True):
        total = total + x.index_select(dim, tap) * weight
    return total


def _nearest(source: Tensor, size: int) -> Taps:
    return Taps(source.floor().long().clamp(max=size - 1)[None], None)


def _linear(source: Tensor, size: int) -> Taps:
    source = source.clamp(min=0)
    first = source.floor().long().clamp(max=size - 1)
    fraction = (source - first).clamp(0, 1)
    pixels = torch.stack([first, (first + 1).clamp(max=size - 1)])
    return Taps(pixels, torch.stack([1 - fraction, fraction]))


def _cubic(source: Tensor, size: int) -> Taps:
    """Cubic convolution (Keys 1981) with a = -0.75, as in torch."""
    a = -0.75
    first = source.floor()
    fraction = source - first
    distances = torch.stack([fraction + 1, fraction, 1 - fraction, 2 - fraction])
    near = ((a + 2) * distances - (a + 3)) * distances * distances + 1
    far = ((a * distances - 5 * a) * distances + 8 * a) * distances - 4 * a
    weights = torch.stack([far[0], near[1], near[2], far[3]])
    pixels = torch.stack([first - 1, first, first + 1, first + 2]).long().clamp(0, size - 1)
    return Taps(pixels, weights)


def _outside(positions: Tensor, size: int, mode: str) -> Tensor:
    """The pixels whose values padding takes for ``positions`` outside of an axis of ``size`` pixels."""
    if mode == "replicate":
        return positions.clamp(0, size - 1)
    if mode == "circular":
        return positions.remainder(size)
    return size - 1 - (positions.abs() - (size - 1)).abs()


def _sizes(
    x: SpatialTensor, size: Any, scale_factor: Any, recompute: bool
) -> tuple[tuple[int, int], tuple[float, float]]:
    """(rows, columns) of the result, and along each the factor from its positions to positions in the
    source."""
    old = x.arrangement.sizes
    if size is not None:
        new = (size, size) if isinstance(size, int) else tuple(size)
        return (new[0], new[1]), (old[0] / new[0], old[1] / new[1])
    scales = (scale_factor,) * 2 if isinstance(scale_factor, int | float) else tuple(scale_factor)
    new = tuple(math.floor(length * float(s)) for length, s in zip(old, scales, strict=True))
    if recompute:
        return (new[0], new[1]), (old[0] / new[0], old[1] / new[1])
    return (new[0], new[1]), (1 / scales[0], 1 / scales[1])
