"""The positions and strides of parameters in the flat vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class ParameterSlice(NamedTuple):
    """A parameter's position in the vector: ``vector[start:stop]``, with ``shape`` and ``stride``."""

    name: str
    owner: nn.Module
    attribute: str
    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...]


def place_of(x: Tensor) -> int:
    """A number that is equal for tensors that begin at the same place in memory.

    It is the address; for tensors on XLA devices, which have none, it is that of their storage's record.
    """
    return x.untyped_storage()._cdata if x.device.type == "xla" else x.data_ptr()


def view(vector: Tensor, part: ParameterSlice, origin: int = 0) -> Tensor:
    """The view of a parameter into ``vector``, which holds the flat vector from position ``origin`` on."""
    offset = vector.storage_offset() + part.start - origin
    return vector.as_strided(part.shape, part.stride, offset)


def grouping(
    module: nn.Module, groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None
) -> list[dict[str, Any]]:
    """The parameter groups of the optimizer, with trainable parameters only. Raises ValueError if a parameter
    is not in exactly one group, or if parameters differ in dtype or device."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient")
    made_groups = [{"params": trainable}] if groups is None else [dict(g) for g in groups(module)]
    for group in made_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    listed = [id(p) for group in made_groups for p in group["params"]]
    if len(set(listed)) != len(listed) or set(listed) != {id(p) for p in trainable}:
        raise ValueError("each trainable parameter must be in exactly one parameter group")
    pairs = {(p.dtype, p.device) for p in trainable}
    if len(pairs) > 1:
        raise ValueError(
            f"one vector has one dtype and one device, but these parameters have {sorted(map(str, pairs))}. "
            "Make one replica per device, and keep one dtype."
        )
    return made_groups


def lay_out(
    module: nn.Module, grouping: list[dict[str, Any]]
) -> tuple[list[ParameterSlice], list[tuple[int, int]]]:
    """The slice of the vector for each parameter, and the (start, stop) of each group."""
    names: dict[int, tuple[str, nn.Module, str]] = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            names.setdefault(id(parameter), (f"{prefix}.{attribute}".lstrip("."), owner, attribute))
    parts: list[ParameterSlice] = []
    bounds: list[tuple[int, int]] = []
    stop = 0
    for group in grouping:
        group_start = stop
        for parameter in group["params"]:
            name, owner, attribute = names[id(parameter)]
            start, stop = stop, stop + parameter.numel()
            stride = torch.empty_like(parameter, device="meta").stride()  # the parameter's, if it is dense
            parts.append(ParameterSlice(name, owner, attribute, start, stop, parameter.shape, stride))
        bounds.append((group_start, stop))
    return parts, bounds


def merge(parts: Sequence[ParameterSlice]) -> list[tuple[int, int]]:
    """The slices, with adjacent ones merged: (start, stop) of each."""
    merged: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda p: p.start):
        if merged and merged[-1][1] == part.start:
            merged[-1] = (merged[-1][0], part.stop)
        else:
            merged.append((part.start, part.stop))
    return merged


def refuse_late_hooks(parts: Sequence[ParameterSlice]) -> None:
    """Raise RuntimeError, naming the parameter, for a hook that would never be called."""
    for part in parts:
        if getattr(getattr(part.owner, part.attribute), "_post_accumulate_grad_hooks", None):
            raise RuntimeError(
                f"parameter '{part.name}' has a post-accumulate-grad hook, which is never called: descend "
                "does not accumulate gradients. Use register_hook, which is called with the gradient."
            )


def check_views(
    name: str,
    parts: Sequence[ParameterSlice],
    storage: Tensor,
    gradient: Tensor,
    low_precision: Mapping[str, Tensor | None],
) -> None:
    """Raise RuntimeError, naming the parameter, if one is no longer a view into replica ``name``'s vectors.

    low_precision: for each parameter that is instead a view of a low-precision copy, this copy; the parameter
        then has no gradient.
    """
    for part in parts:
        if part.start == part.stop:  # a tensor without elements has no address
            continue
        parameter = getattr(part.owner, part.attribute)
        expected = [("values", parameter, storage), ("gradient", parameter.grad, gradient)]
        if (copy := low_precision.get(part.name)) is not None:
            expected = [("values", parameter, copy)]
        for label, tensor, base in expected:
            if tensor is None or place_of(tensor) != place_of(base[part.start :]):
                raise RuntimeError(
                    f"the {label} of parameter '{part.name}' is no longer a view of the vector of replica "
                    f"'{name}'. Call .to() and .half() before replicate, never call zero_grad, and end each "
                    "loss with replica.descend(loss)."
                )


def check_gradients(
    name: str, pieces: Sequence[Tensor], gradient: Tensor, bounds: Sequence[tuple[int, int]]
) -> None:
    """Raise RuntimeError unless the gradients of ``pieces``, the parameters of replica ``name``'s optimizer,
    are the slices of ``gradient`` [N] within ``bounds``."""
    for piece, (start, stop) in zip(pieces, bounds, strict=True):
        if piece.grad is None or place_of(piece.grad) != place_of(gradient[start:stop]):
            raise RuntimeError(
                f"the optimizer of replica '{name}' lost its gradient, so its step would do nothing. Never "
                "call its zero_grad: descend clears the gradient."
            )


def lower_frozen(module: nn.Module, in_compute: Callable[[str], bool], dtype: torch.dtype) -> None:
    """Round the frozen parameters whose names ``in_compute`` accepts to ``dtype``, as they are factors of the
    same products as those that are learned."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point() and in_compute(name):
            parameter.data = parameter.data.to(dtype)


def disable_rnn_flattening(module: nn.Module) -> None:
    """Prevent cuDNN's weight flattening, which would move recurrent weights out of the vector."""
    for inner in module.modules():
        if isinstance(inner, nn.RNNBase):
            inner.flatten_parameters = _leave_in_place  # type: ignore[method-assign]


def _leave_in_place() -> None:
    """In place of ``flatten_parameters``; a function of the module, as pickle cannot store a lambda."""
