"""Layers drawn at random, computed whole and in parts: how far apart are outputs and gradients?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.spatial import Parts, scatter
from murmurate.spatial.pixelwise import whole

GRIDS = ((2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (4, 1), (1, 5), (2, 3), (3, 2), (6, 1))
Layer = Callable[..., Any]


@dataclass(frozen=True)
class DrawnLayer:
    """A layer, its image and parameters (float64), and the grid of parts. kind: a name in ``KINDS``. text: a
    description."""

    kind: str
    text: str
    layer: Layer
    image: Tensor
    parameters: tuple[Tensor, ...]
    grid: tuple[int, int]


def in_parts(grid: tuple[int, int], function: Callable[[Parts], Any]) -> list[Any]:
    """The result of ``function`` for each part, in threads of which one runs at a time."""
    size = grid[0] * grid[1]
    fabric = SimulatedFabric(size, 0, keep_log=False, coroutines="threads")
    return fabric.run([lambda member: function(Parts.open(member, grid))] * size)


def error_in_parts(drawn: DrawnLayer) -> float | None:
    """The largest difference of output, input gradient and parameter gradients between a layer computed whole
    and in parts, relative to the largest number of each, but at least 1; None where the layer does not fit
    the image, or the parts cannot share it."""
    tensors = [t.clone().requires_grad_() for t in (drawn.image, *drawn.parameters)]
    try:
        expected = drawn.layer(*tensors)
    except RuntimeError:  # the kernel does not fit the image
        return None
    direction = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((expected * direction).sum(), tensors)

    def part(parts: Parts) -> list[Tensor]:
        image, *parameters = (t.clone().requires_grad_() for t in (drawn.image, *drawn.parameters))
        output = drawn.layer(scatter(image, parts), *parameters)
        gradients = torch.autograd.grad((output * direction).sum(), (image, *parameters))
        return [whole(output).detach(), *gradients]

    try:
        results = in_parts(drawn.grid, part)
    except Refusal as refusal:
        if "cannot share" in str(refusal) or "does not fit" in str(refusal):
            return None
        raise
    errors = [distance(result[0], expected) for result in results]
    for index, gradient in enumerate(gradients):
        # the gradient of the whole is the mean of the parts' gradients
        mean = torch.stack([result[1 + index] for result in results]).mean(0)
        errors.append(distance(mean, gradient))
    return max(errors)


def distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest number or 1; infinite if one is NaN."""
    scale = max(1.0, expected.detach().abs().max().item())
    distance = (actual - expected.detach()).abs().max().item() / scale
    return math.inf if math.isnan(distance) else distance  # ``max`` passes over a NaN that is not the first


# -- drawing --------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator) -> DrawnLayer:
    """A layer of one of ``KINDS``, and 2 to 6 parts, on an image of 6 to 64 pixels a side.

    A third of the images have up to 192 pixels along the axis that is divided most; on these, convolutions
    compute their interior while halos are exchanged.
    """
    names = list(KINDS)
    weights = np.array([KINDS[name][1] for name in names], dtype=float)
    name = str(rng.choice(names, p=weights / weights.sum()))
    channels = int(rng.choice([2, 4, 8]))
    size = [int(n) for n in rng.integers(6, rng.choice([25, 65]), 2)]
    grid = GRIDS[int(rng.integers(len(GRIDS)))]
    if rng.random() < 1 / 3:
        size[0 if grid[0] >= grid[1] else 1] = int(rng.integers(65, 193))
    image = torch.from_numpy(rng.standard_normal((int(rng.integers(1, 4)), channels, *size)))
    text, layer, parameters = KINDS[name][0](rng, channels)
    return DrawnLayer(name, f"{name} {text} of {list(image.shape)} in {grid}", layer, image, parameters, grid)


def drawn_convolution(seed: int) -> DrawnLayer:
    """A convolution that fits its image, divided into two parts along rows or columns."""
    rng = np.random.default_rng([seed, 2])
    while True:
        drawn = draw(rng)
        grid = (2, 1) if drawn.grid[0] > 1 else (1, 2)
        halved = dataclasses.replace(drawn, grid=grid)
        if halved.kind == "conv2d" and error_in_parts(halved) is not None:
            return halved


Drawn = tuple[str, Layer, tuple[Tensor, ...]]  # description, layer, parameters


def _pair(rng: np.random.Generator, low: int, high: int) -> tuple[int, int]:
    a, b = (int(n) for n in rng.integers(low, high, 2))
    return a, b


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape))


def _convolution(rng: np.random.Generator, channels: int) -> Drawn:
    kernel, stride, dilation = _pair(rng, 1, 8), _pair(rng, 1, 4), _pair(rng, 1, 5)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding: Any = tuple(int(rng.integers(0, r + 2)) for r in reach)
    if rng.random() < 0.5:  # the usual padding in nets
        padding = tuple(r // 2 for r in reach)
    elif stride == (1, 1):
        padding = "same"
    groups, outputs = int(rng.choice([1, 2, channels])), channels * int(rng.integers(1, 3))
    weight, bias = _normal(rng, outputs, channels // groups, *kernel), _normal(rng, outputs)
    text = f"kernel {kernel} stride {stride} padding {padding} dilation {dilation} groups {groups}"
    return text, lambda x, w, b: functional.conv2d(x, w, b, stride, padding, dilation, groups), (weight, bias)


def _transposed(rng: np.random.Generator, channels: int) -> Drawn:
    kernel, stride, dilation = _pair(rng, 1, 8), _pair(rng, 1, 4), _pair(rng, 1, 5)
    padding = tuple(int(rng.integers(0, d * (k - 1) + 1)) for d, k in zip(dilation, kernel, strict=True))
    output_padding = tuple(int(rng.integers(0, max(s, d))) for s, d in zip(stride, dilation, strict=True))
    groups, outputs = int(rng.choice([1, 2, channels])), int(rng.integers(1, 3))
    weight, bias = _normal(rng, channels, outputs, *kernel), _normal(rng, groups * outputs)

    def layer(x: Any, w: Tensor, b: Tensor) -> Any:
        return functional.conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation)

    text = (
        f"kernel {kernel} stride {stride} padding {padding} + {output_padding} "
        f"dilation {dilation} groups {groups}"
    )
    return text, layer, (weight, bias)


def _max_pool(rng: np.random.Generator, channels: int) -> Drawn:
    kernel, stride, dilation = _pair(rng, 1, 5), _pair(rng, 1, 4), _pair(rng, 1, 3)
    padding = tuple(int(rng.integers(0, k // 2 + 1)) for k in kernel)
    ceil = bool(rng.random() < 0.5)
    text = f"kernel {kernel} stride {stride} padding {padding} dilation {dilation} ceil {ceil}"
    return text, lambda x: functional.max_pool2d(x, kernel, stride, padding, dilation, ceil), ()


def _average_pool(rng: np.random.Generator, channels: int) -> Drawn:
    kernel, stride = _pair(rng, 1, 5), _pair(rng, 1, 4)
    padding = tuple(int(rng.integers(0, k // 2 + 1)) for k in kernel)
    ceil, count_include_pad = bool(rng.random() < 0.5), bool(rng.random() < 0.5)
    text = f"kernel {kernel} stride {stride} padding {padding} ceil {ceil} include {count_include_pad}"
    return text, lambda x: functional.avg_pool2d(x, kernel, stride, padding, ceil, count_include_pad), ()


def _adaptive(rng: np.random.Generator, channels: int) -> Drawn:
    size, largest = _pair(rng, 1, 8), bool(rng.random() < 0.5)
    pool = functional.adaptive_max_pool2d if largest else functional.adaptive_avg_pool2d
    return f"{'max' if largest else 'mean'} to {size}", lambda x: pool(x, size), ()


def _norm(rng: np.random.Generator, channels: int) -> Drawn:
    kind = str(rng.choice(["batch", "group", "instance"]))
    parameters = _normal(rng, channels), _normal(rng, channels)
    if kind == "batch":
        return kind, lambda x, w, b: functional.batch_norm(x, None, None, w, b, True), parameters
    if kind == "group":
        return kind, lambda x, w, b: functional.group_norm(x, 2, w, b), parameters
    return kind, lambda x, w, b: functional.instance_norm(x, None, None, w, b), parameters


def _layer_norm(rng: np.random.Generator, channels: int) -> Drawn:
    return "channels, rows and columns", lambda x: functional.layer_norm(x, list(x.shape[1:])), ()


def _resize(rng: np.random.Generator, channels: int) -> Drawn:
    mode = str(rng.choice(["nearest", "nearest-exact", "bilinear", "bicubic", "area"]))
    align_corners = bool(rng.random() < 0.5) if mode in ("bilinear", "bicubic") else None
    if rng.random() < 0.5 or mode == "area":
        size = _pair(rng, 6, 60)
        return f"{mode} to {size}", lambda x: functional.interpolate(x, size, None, mode, align_corners), ()
    factor = float(rng.choice([0.5, 0.75, 1.5, 2.0, 3.0]))
    text = f"{mode} by {factor}, corners {align_corners}"
    return text, lambda x: functional.interpolate(x, None, factor, mode, align_corners), ()


def _pad(rng: np.random.Generator, channels: int) -> Drawn:
    mode = str(rng.choice(["constant", "reflect", "replicate", "circular"]))
    sides = [int(n) for n in rng.integers(0, 6, 4)]
    return f"{mode} {sides}", lambda x: functional.pad(x, sides, mode), ()


def _loss(rng: np.random.Generator, channels: int) -> Drawn:
    seed = int(rng.integers(1 << 31))

    def layer(x: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(0, channels, (x.shape[0], *x.shape[2:]), generator=generator)
        weight = torch.rand(channels, dtype=torch.float64, generator=generator)
        return functional.cross_entropy(x, target, weight, ignore_index=1, label_smoothing=0.1)

    return "cross entropy", layer, ()


# kind -> the function that draws it, and its relative frequency
KINDS: dict[str, tuple[Callable[[np.random.Generator, int], Drawn], int]] = {
    "conv2d": (_convolution, 50),
    "conv_transpose2d": (_transposed, 14),
    "max_pool2d": (_max_pool, 6),
    "avg_pool2d": (_average_pool, 6),
    "adaptive pool": (_adaptive, 5),
    "norm": (_norm, 6),
    "layer_norm": (_layer_norm, 2),
    "interpolate": (_resize, 6),
    "pad": (_pad, 3),
    "loss": (_loss, 2),
}


def drawn_layers(count: int, seed: int = 0) -> Sequence[tuple[DrawnLayer, float]]:
    """``count`` layers that fit their images, each with its ``error_in_parts``."""
    rng = np.random.default_rng(seed)
    results: list[tuple[DrawnLayer, float]] = []
    while len(results) < count:
        drawn = draw(rng)
        error = error_in_parts(drawn)
        if error is not None:
            results.append((drawn, error))
    return results
