"""A tensor of which each part holds one rectangle, and which torch's functions accept.

Through ``__torch_function__`` a call of a torch function with such a tensor runs the function's spatial form
in ``FORMS``. So an ordinary module needs no change; a function without a spatial form is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.spatial.layout import Layout, balanced, plan
from murmurate.spatial.parts import Parts
from murmurate.spatial.window import fetch_window

Form = Callable[..., Any]
FORMS: dict[str, Form] = {}  # by the name of torch's function
# spatial forms shared by several functions: (torch's function, arguments, keyword arguments) -> result
SHARED_FORMS: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {}

# attributes that do not depend on which pixels this part holds
_LOCAL_ATTRIBUTES = {
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "layout",
    "names",
    "itemsize",
}
_ALIASES = {"axis": "dim", "keepdims": "keepdim"}  # NumPy's names, which torch takes, too
_LOCAL_QUERIES = {"is_floating_point", "is_complex", "element_size", "get_device", "is_inference"}


class SpatialTensor(Tensor):
    """A tensor [..., H, W], of which this part holds ``local``, its rectangle of ``arrangement``.

    ``shape`` and ``size`` describe the whole tensor. ``local`` is an ordinary tensor with its autograd graph.
    """

    local: Tensor
    arrangement: Layout
    parts: Parts

    @staticmethod
    def __new__(cls, local: Tensor, arrangement: Layout, parts: Parts) -> SpatialTensor:
        shape = (*local.shape[:-2], *arrangement.sizes)
        tensor = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,  # for ``_refuse_if_cut``
        )
        tensor.local, tensor.arrangement, tensor.parts = local, arrangement, parts
        return tensor

    def __init__(self, local: Tensor, arrangement: Layout, parts: Parts) -> None:
        own_sizes = arrangement.rect(parts.rank).sizes
        if tuple(local.shape[-2:]) != own_sizes:
            raise ValueError(
                f"part {parts.rank} of {list(arrangement.sizes)} holds {list(own_sizes)} pixels, and this "
                f"tensor has {list(local.shape)}"
            )

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((*self.local.shape[:-2], *self.arrangement.sizes))

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self.local.dim()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.local.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.local.requires_grad

    def dim(self) -> int:
        return self.local.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rect = self.arrangement.rect(self.parts.rank)
        return f"SpatialTensor({list(self.shape)}, rows {rect.rows}, columns {rect.columns}, {self.dtype})"

    def like(self, local: Tensor, arrangement: Layout | None = None) -> SpatialTensor:
        """``local`` as a tensor of the same parts. arrangement: that of ``local``; None: this tensor's."""
        return SpatialTensor(local, self.arrangement if arrangement is None else arrangement, self.parts)

    def arranged(self, arrangement: Layout) -> Tensor:
        """This part's rectangle of another arrangement of the same image; a single row or column stays one,
        and is broadcast."""
        sizes = self.arrangement.sizes
        if any(own not in (1, size) for own, size in zip(sizes, arrangement.sizes, strict=True)):
            raise Refusal(
                f"images of {_text(sizes)} and {_text(arrangement.sizes)} pixels in one "
                f"operation{self.parts.where}: resize one of them first"
            )
        axes = zip(sizes, (arrangement.rows, arrangement.columns), strict=True)
        rows, columns = ((0, 1) if size == 1 else bounds for size, bounds in axes)
        return fetch_window(self.local, self.arrangement, Layout(rows, columns), self.parts)

    def whole(self) -> Tensor:
        """All pixels, gathered on every part."""
        rows, columns = self.arrangement.whole
        grid = self.arrangement.grid
        return window(self, (rows,) * grid[0], (columns,) * grid[1])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        # torch's functions in C pass names on as they were given; the forms take the first argument by place
        kwargs = {_ALIASES.get(key, key): value for key, value in (kwargs or {}).items()}
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if name == "__get__":
            return _attribute(func.__self__.__name__, args[0])
        if name in _LOCAL_QUERIES:
            return func(args[0].local)
        _refuse_if_cut((args, kwargs))
        if name in SHARED_FORMS:
            return SHARED_FORMS[name](func, args, kwargs)
        form = FORMS.get(name)
        if form is None:
            raise refuse(largest_of((args, kwargs)), name)
        return form(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Refusal(f"{func} cannot take an image that is spread over parts: gather it first")


def spatial(*names: str) -> Callable[[Form], Form]:
    """A decorator that registers the spatial form of torch's functions and methods of these names."""

    def register(form: Form) -> Form:
        FORMS.update(dict.fromkeys(names, form))
        return form

    return register


def window(x: SpatialTensor, rows: Any, columns: Any, fill: float = 0.0) -> Tensor:
    """This part's window of ``x``; rows, columns: as for ``layout.plan``."""
    window_plan = plan(x.arrangement, tuple(rows), tuple(columns), x.parts.rank)
    return fetch_window(x.local, x.arrangement, window_plan, x.parts, fill)


def scatter(x: Tensor, parts: Parts) -> SpatialTensor:
    """This part's rectangle of a whole tensor [..., H, W] that every part has.

    Raises Refusal if there are more parts than rows or columns.
    """
    arrangement = arranged_evenly((x.shape[-2], x.shape[-1]), parts)
    rect = arrangement.rect(parts.rank)
    return SpatialTensor(x[rect.slices(arrangement.whole)], arrangement, parts)


def arranged_evenly(sizes: tuple[int, int], parts: Parts) -> Layout:
    """The layout of an image of ``sizes`` in nearly equal parts. Raises Refusal, naming the layer, if there
    are more parts than rows or columns."""
    try:
        return balanced(sizes, parts.grid)
    except Refusal as refusal:
        raise Refusal(f"{refusal}{parts.where}") from None


def largest_of(nested: Any) -> SpatialTensor:
    """The spatial tensor of the largest image among nested arguments, to which the others are broadcast; of
    several the first."""
    return max(found_in(nested), key=lambda x: x.arrangement.sizes)


def found_in(nested: Any) -> Iterator[SpatialTensor]:
    """All spatial tensors among nested arguments."""
    if isinstance(nested, SpatialTensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for item in nested:
            yield from found_in(item)
    elif isinstance(nested, dict):
        yield from found_in(list(nested.values()))


def aligned(x: SpatialTensor, other: Any) -> Any:
    """What this part needs of ``other`` for an operation on each pixel of ``x``.

    other: a number, an image, or a whole tensor that every part has; the last two dimensions of both are 1 or
    equal to ``x``'s. Raises Refusal for another size.
    """
    if isinstance(other, SpatialTensor):
        return other.arranged(x.arrangement)
    if not isinstance(other, Tensor):
        return other
    rect = x.arrangement.rect(x.parts.rank)
    for dim in (-1, -2):
        if other.dim() < -dim or other.shape[dim] == 1:
            continue
        if other.shape[dim] != x.shape[dim]:
            raise Refusal(
                f"a tensor of {list(other.shape)} in one operation with an image of {list(x.shape)}"
                f"{x.parts.where}: give it as many rows and columns, or 1"
            )
        other = other.narrow(dim, rect[dim][0], rect[dim][1] - rect[dim][0])
    return other


def refuse(x: SpatialTensor, what: str) -> Refusal:
    """The refusal of an operation that has no spatial form."""
    return Refusal(
        f"{what} has no form for images that are spread over parts{x.parts.where}. Use another layer, or "
        "gather the image before it with murmurate.spatial.whole(x)"
    )


def _refuse_if_cut(nested: Any) -> None:
    """Raise Refusal for the result of an ``autograd.Function`` that was given an image in parts.

    torch connects it to the wrapper of the image and not to ``local``, so no gradient would get past it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        cut = next((x for x in found_in(nested) if x.grad_fn is not None), None)
    if cut is not None:
        raise Refusal(
            f"an autograd.Function was given an image that is spread over parts{cut.parts.where}, and would "
            "lose its gradient. Write it with torch's functions; torch.utils.checkpoint needs "
            "use_reentrant=False"
        )


def spatial_axis(x: SpatialTensor, dim: int) -> bool:
    """Whether ``dim`` is one of the two spatial dimensions."""
    return dim % x.dim() >= x.dim() - 2


def _attribute(name: str, x: SpatialTensor) -> Any:
    if name in _LOCAL_ATTRIBUTES:
        return getattr(x.local, name)
    if name == "is_leaf":
        return False
    raise Refusal(f"an image that is spread over parts has no attribute '{name}'{x.parts.where}: use x.local")


def _text(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} x {sizes[1]}"
