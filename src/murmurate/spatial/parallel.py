"""Turns an ordinary module into the parts of a replica (Jin 2018, chapter 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.fabric.interface import Fabric
from murmurate.nets.batch_norm import BatchNorm
from murmurate.spatial import convolution, normalisation, pixelwise, pooling, reductions, resizing  # noqa: F401
from murmurate.spatial.own_norm import NormOverParts
from murmurate.spatial.parts import Parts, checked_grid, of_script
from murmurate.spatial.tensor import SpatialTensor, scatter

_HANDLES = "_spatial_handles"

# modules whose forward pass never has a spatial form, with what to use instead
_UNSUPPORTED: dict[type[nn.Module], str] = {
    nn.Conv1d: "Conv2d with a kernel of one row",
    nn.Conv3d: "Conv2d",
    nn.ConvTranspose1d: "ConvTranspose2d with a kernel of one row",
    nn.ConvTranspose3d: "ConvTranspose2d",
    nn.MaxUnpool2d: "Upsample or ConvTranspose2d",
    nn.FractionalMaxPool2d: "MaxPool2d",
    nn.LPPool2d: "AvgPool2d",
    nn.Unfold: "Conv2d",
    nn.Fold: "ConvTranspose2d",
    nn.LocalResponseNorm: "GroupNorm",
}


def parallelize(
    module: nn.Module,
    parts: Parts | Sequence[int] | int,
    fabric: Fabric | None = None,
    *,
    in_evaluation: bool = True,
) -> nn.Module:
    """Make the forward pass of ``module`` compute this part's share of every image; returns ``module``.

    Every part calls it with the same whole images [N, C, H, W], or with its own rectangles
    (``SpatialTensor``). Outputs that depend on all pixels (logits behind a pooling, losses) are whole on
    every part, and output images are ``SpatialTensor``. Parameters, buffers and their names stay as they
    were, so a checkpoint is that of the ordinary module. Each part computes the same loss; the gradient of a
    parameter is the mean of the parts' gradients, which ``replica.descend`` and wrapped optimizers compute.

    in_evaluation: whether images are divided in evaluation mode, too; all parts must then evaluate together.
    parts: from ``replicator.parts`` or ``Parts.open``; or a grid such as (2, 2), opened on ``fabric``, or
    without one the grid of this script's replicas (``murmurate.run(..., parts=(2, 2))``).

    Raises Refusal for another grid without ``fabric``, and one that names the layers that cannot be computed
    in parts, here or at their first call.
    """
    if not isinstance(parts, Parts):
        parts = _parts_of(checked_grid(parts), fabric)
    _check(module)
    whole_again(module)
    handles: list[Any] = [module.register_forward_pre_hook(_Scatter(parts, in_evaluation), with_kwargs=True)]
    module.__dict__[_HANDLES] = handles
    try:
        for name, layer in module.named_modules():
            if name:
                handles.append(layer.register_forward_pre_hook(_NoteLayer(parts, name)))
            if isinstance(layer, BatchNorm):
                handles.append(NormOverParts(layer, parts, name))
    except Refusal:
        whole_again(module)
        raise
    return module


def _parts_of(grid: tuple[int, int], fabric: Fabric | None) -> Parts:
    if fabric is not None:
        return Parts.open(fabric, grid)
    own = of_script.get()
    if own is not None and own.grid == grid:
        return own
    present = "" if own is None else f" (this one has {own.grid[0]} x {own.grid[1]})"
    raise Refusal(
        f"nothing connects {grid[0]} x {grid[1]} parts: in a script{present} they are those of "
        f"murmurate.run(main, parts={grid}); elsewhere give a fabric"
    )


def whole_again(module: nn.Module) -> nn.Module:
    """Undo ``parallelize``: the module computes whole images again."""
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    return module


class _Scatter:
    """Takes this part's rectangle of every image among a module's arguments."""

    def __init__(self, parts: Parts, in_evaluation: bool) -> None:
        self._parts, self._in_evaluation = parts, in_evaluation

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not (module.training or self._in_evaluation):
            return args, kwargs
        self._parts.layer = ""
        return tuple(self._scattered(a) for a in args), {k: self._scattered(a) for k, a in kwargs.items()}

    def _scattered(self, value: Any) -> Any:
        is_image = isinstance(value, Tensor) and value.dim() == 4 and not isinstance(value, SpatialTensor)
        return scatter(value, self._parts) if is_image else value


class _NoteLayer:
    """Notes which layer is computed, for error messages."""

    def __init__(self, parts: Parts, name: str) -> None:
        self._parts, self._name = parts, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._parts.layer = self._name


def _check(module: nn.Module) -> None:
    unsupported = [
        f"'{name}' ({type(layer).__name__}; use {instead})"
        for name, layer in module.named_modules()
        for kind, instead in _UNSUPPORTED.items()
        if isinstance(layer, kind)
    ]
    if unsupported:
        raise Refusal(f"these layers cannot be computed in parts: {', '.join(unsupported)}")
