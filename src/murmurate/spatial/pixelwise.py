"""Functions of single pixels, of channels and of shapes. They need no pixels of other parts, except for those
that gather the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.spatial.resizing import Taps, mapped
from murmurate.spatial.tensor import (
    SHARED_FORMS,
    SpatialTensor,
    aligned,
    arranged_evenly,
    found_in,
    largest_of,
    refuse,
    spatial,
    spatial_axis,
)

# functions of torch and methods of tensors whose result at a pixel depends on that pixel alone
# fmt: off
_PIXELWISE = [
    "abs", "absolute", "add", "addcdiv", "addcmul", "alias", "asin", "atan", "bfloat16", "bitwise_and",
    "bitwise_not", "bitwise_or", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone",
    "contiguous", "copysign", "cos", "detach", "div", "divide", "double", "elu", "empty_like", "eq", "erf",
    "exp", "expm1", "fill", "float", "floor", "floor_divide", "full_like", "ge", "gelu", "gt", "half",
    "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "le", "leaky_relu",
    "lerp", "log", "log1p", "logical_and", "logical_not", "logical_or", "log_sigmoid", "lt", "masked_fill",
    "maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "ne", "neg", "negative", "ones_like",
    "positive", "pow", "reciprocal", "relu", "relu6", "remainder", "requires_grad", "round",
    "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "softshrink", "softsign", "sqrt",
    "square", "sub", "subtract", "tan", "tanh", "tanhshrink", "threshold", "_threshold", "true_divide",
    "type", "where", "zero", "zeros_like", "__add__", "__and__", "__eq__", "__floordiv__", "__invert__",
    "__mod__", "__mul__", "__neg__", "__or__", "__pow__", "__radd__", "__rdiv__", "__rfloordiv__",
    "__rmod__", "__rmul__", "__rpow__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "__xor__",
]
# functions along dimensions, which need no other part unless these are rows or columns; ``dim`` is argument 1
_ALONG_DIM = [
    "softmax", "log_softmax", "softmin", "argmax", "argmin", "max", "min", "amax", "amin", "prod", "any",
    "all", "cumsum", "logsumexp", "unbind", "glu", "sort", "std", "var", "gather",
]
# fmt: on
_CHANNELWISE = {  # which argument is ``dim``, counted from 0
    **dict.fromkeys(_ALONG_DIM, 1),
    **dict.fromkeys(["chunk", "split", "topk", "normalize", "norm", "cosine_similarity"], 2),
}
_DEFAULT_DIM = {"unbind": 0, "chunk": 0, "split": 0, "normalize": 1, "glu": -1, "cosine_similarity": 1}


def _pixelwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    image = largest_of((args, kwargs))
    result = _of_locals(image, func, args, kwargs)
    return image if result is image.local else image.like(result)  # in-place functions return ``local``


def _channelwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    image = largest_of((args, kwargs))
    name, position = func.__name__, _CHANNELWISE[func.__name__]
    dim = kwargs.get("dim", args[position] if len(args) > position else _DEFAULT_DIM.get(name))
    if isinstance(dim, Tensor):  # the maximum of two images
        return _pixelwise(func, args, kwargs)
    dims = [dim] if isinstance(dim, int) else dim
    if not dims or any(spatial_axis(image, d) for d in dims):
        raise refuse(image, f"{name} over rows, columns or all dimensions")
    result = _of_locals(image, func, args, kwargs)
    if isinstance(result, Tensor):
        return image.like(result)
    wrapped = [image.like(x) for x in result]
    return type(result)(wrapped)


def _converted(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``to`` and ``type_as``: of another tensor only dtype and device matter, so it may have any shape."""

    def local(value: Any) -> Any:
        return value.local if isinstance(value, SpatialTensor) else value

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    return args[0].like(result) if isinstance(args[0], SpatialTensor) else result


SHARED_FORMS.update(dict.fromkeys(["to", "type_as"], _converted))
SHARED_FORMS.update(dict.fromkeys(_PIXELWISE, _pixelwise))
SHARED_FORMS.update({f"{name}_": _pixelwise for name in _PIXELWISE if not name.startswith("_")})
SHARED_FORMS.update(dict.fromkeys(_CHANNELWISE, _channelwise))


def _of_locals(image: SpatialTensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func`` of what this part needs of each argument. Raises Refusal if it would write to a whole tensor,
    of which each part would then change another rectangle."""
    name = func.__name__
    in_place = bool(args) and name.endswith("_") and not name.endswith("__")
    written = args[0] if in_place else kwargs.get("out")
    if isinstance(written, Tensor) and not isinstance(written, SpatialTensor):
        raise refuse(image, f"{name} that writes to a whole tensor")
    return func(
        *(aligned(image, value) for value in args),
        **{key: aligned(image, value) for key, value in kwargs.items()},
    )


@spatial("prelu")
def prelu(x: SpatialTensor, weight: Tensor) -> SpatialTensor:
    """``torch.nn.functional.prelu``; weight: one number, or one for each channel."""
    return x.like(torch.prelu(x.local, weight))


# -- several images -------------------------------------------------------------------------------------


@spatial("cat", "concat", "concatenate")
def cat(tensors: Sequence[Any], dim: int = 0) -> SpatialTensor:
    """Images joined along batch or channels; all must have the same rows and columns."""
    image = largest_of(tensors)
    if spatial_axis(image, dim):
        raise refuse(image, "cat along rows or columns")
    return image.like(torch.cat([aligned(image, x) for x in tensors], dim))


@spatial("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> SpatialTensor:
    """Images stacked along a new dimension before rows and columns."""
    image = largest_of(tensors)
    dim = dim % (image.dim() + 1)
    if dim > image.dim() - 2:
        raise refuse(image, "stack along rows or columns")
    return image.like(torch.stack([aligned(image, x) for x in tensors], dim))


# -- shapes ---------------------------------------------------------------------------------------------


@spatial("flatten")
def flatten(x: SpatialTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flattened. If rows or columns are flattened, the result is a whole tensor on every part."""
    if end_dim % x.dim() < x.dim() - 2:
        return x.like(x.local.flatten(start_dim, end_dim))
    return x.whole().flatten(start_dim, end_dim)


@spatial("view", "reshape")
def reshape(x: SpatialTensor, *shape: Any) -> Any:
    """Another shape. Unless the last two dimensions keep their sizes, the result is a whole tensor on every
    part."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype):
        raise refuse(x, "view as another dtype")
    if list(sizes[-2:]) == list(x.shape[-2:]):
        return x.like(x.local.reshape(*sizes[:-2], *x.local.shape[-2:]))
    return x.whole().reshape(sizes)


@spatial("unsqueeze")
def unsqueeze(x: SpatialTensor, dim: int) -> SpatialTensor:
    """One more dimension, before rows and columns."""
    dim = dim % (x.dim() + 1)
    if dim > x.dim() - 2:
        raise refuse(x, "unsqueeze behind rows or columns")
    return x.like(x.local.unsqueeze(dim))


@spatial("squeeze")
def squeeze(x: SpatialTensor, dim: Any = None) -> SpatialTensor:
    """``x`` without ``dim`` if its size is 1; ``dim`` must not be rows or columns."""
    if not isinstance(dim, int) or spatial_axis(x, dim):
        raise refuse(x, "squeeze of rows, columns or all dimensions")
    return x.like(x.local.squeeze(dim))


def _indexed_dims(entry: Any) -> int:
    """The number of dimensions that an entry of an index stands for: a mask stands for all of its own."""
    if entry is None or entry is Ellipsis:
        return 0
    if getattr(entry, "dtype", None) in (torch.bool, torch.uint8, np.bool_):
        return int(entry.ndim)
    return 1


@spatial("__getitem__")
def getitem(x: SpatialTensor, index: Any) -> SpatialTensor:
    """``x[index]``: any index of images and channels, but only slices of rows and columns, of steps 1 or
    more."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(entry, SpatialTensor) for entry in entries):
        raise refuse(x, "indexing with an image")
    indexed_dims = sum(_indexed_dims(entry) for entry in entries)
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    entries[at : at + 1] = [slice(None)] * (x.dim() - indexed_dims)
    *leading, rows, columns = entries if len(entries) > 1 else [entries[0]] * 2  # one mask of all dimensions
    if not isinstance(rows, slice) or not isinstance(columns, slice):
        raise refuse(x, "indexing of rows and columns by anything but slices")
    keeps_all = all(isinstance(entry, slice) and entry == slice(None) for entry in leading)
    local = x.local if keeps_all else x.local[(*leading, slice(None), slice(None))]
    selected = x.like(local)
    if rows == columns == slice(None):
        return selected
    taps = [
        Taps(torch.arange(size)[cut][None], None)
        for size, cut in zip(x.arrangement.sizes, (rows, columns), strict=True)
    ]
    sizes = taps[0].pixels.shape[1], taps[1].pixels.shape[1]
    return mapped(selected, taps[0], taps[1], arranged_evenly(sizes, x.parts))


# -- dropout --------------------------------------------------------------------------------------------


@spatial("dropout")
def dropout(x: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> SpatialTensor:
    """Dropout, with independent noise on each part."""
    if not training or p == 0:
        return x
    return _dropped(x, x.local.shape, p, x.parts.own_noise)


@spatial("dropout2d", "feature_dropout")
def dropout2d(
    x: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> SpatialTensor:
    """Dropout of whole channels: the same ones on all parts."""
    if not training or p == 0:
        return x
    return _dropped(x, torch.Size([*x.shape[:2], 1, 1]), p, x.parts.common_noise)


def _dropped(x: SpatialTensor, shape: torch.Size, p: float, noise: torch.Generator) -> SpatialTensor:
    if torch._C._current_graph_task_id() != -1:  # within a backward pass, whose gradients would be wrong
        raise refuse(x, "dropout that is computed again (torch.utils.checkpoint), which draws other noise,")
    kept = torch.rand(shape, generator=noise, device=noise.device) >= p
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x.like(x.local * (kept.to(x.device, x.dtype) * scale))


def whole(x: Any) -> Any:
    """``x`` with every spatial tensor in it gathered: all pixels on every part."""
    if isinstance(x, SpatialTensor):
        return x.whole()
    if isinstance(x, list | tuple) and any(True for _ in found_in(x)):
        values = [whole(item) for item in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    if isinstance(x, dict):
        return type(x)((key, whole(value)) for key, value in x.items())
    return x
