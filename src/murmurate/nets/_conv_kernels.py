"""The compiled torso of ``nets/conv.py``: rearranges frames into blocks, and computes both passes in bfloat16
on processors that have matrix products for it (AMX, or AVX-512's BF16).

``native/torso.hpp`` explains the kernels. Where they do not run, ``conv.py`` computes the same in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from murmurate import native

BITS = {torch.bfloat16: 16, torch.float32: 32}
_PLAIN = (Tensor, nn.Parameter)  # a subclass may have no memory that the kernels can read
_MOST_CHANNELS = 1024  # the kernels' limit for a frame (native/blocks.hpp)


class Layer(NamedTuple):
    """A convolution over blocks of ``block`` x ``block`` pixels (``native/torso.hpp``).

    height, width: size of its input, in blocks. channels: values in a block. kernel: the side of a filter, in
    blocks. filters: number of filters."""

    height: int
    width: int
    channels: int
    kernel: int
    filters: int
    block: int


def to_blocks(observation: Tensor, dtype: torch.dtype) -> Tensor | None:
    """uint8 [B, C, H, W], H and W multiples of 4, to ``dtype`` [B, 16 C, H / 4, W / 4], channels last; None
    if the kernel cannot do it."""
    kernels = native.kernels
    if kernels is None or dtype not in BITS or is_traced() or not is_readable(observation):
        return None
    batch, channels, height, width = observation.shape
    if channels > _MOST_CHANNELS:
        return None
    rows = rows_of(observation)
    out = torch.empty((batch, height // 4, width // 4, 16 * channels), dtype=dtype, device=rows.device)
    shape = (channels, height, width)
    kernels.lay_frames(rows.data_ptr(), rows.stride(0), shape, batch, BITS[dtype], out.data_ptr())
    return out.permute(0, 3, 1, 2)


def rows_of(observation: Tensor) -> Tensor:
    """[B, ...] to [B, N] with contiguous rows; copies only if they are not contiguous already."""
    rows = observation.flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def has_kernels_for(dtype: torch.dtype) -> bool:
    """Whether ``run`` may have kernels for parameters of this dtype."""
    return dtype == torch.bfloat16 and bool(_kernel_names()) and not is_traced()


def run(layers: tuple[Layer, ...], blocks: Tensor, parameters: Sequence[Tensor]) -> Tensor | None:
    """Frames in blocks [B, C, height, width], values from 0 to 255, to features [B, F]; None if the kernels
    cannot do it. ``parameters``: weight and bias of each convolution and of the fully connected layer. Frames
    get no gradient; a second derivative is refused."""
    names = _kernel_names()
    if not names or is_traced() or not _is_supported(blocks, parameters):
        return None
    size = parameters[-1].shape[0]
    torso = _torso(names[0], layers, size)
    if torso is None or tuple([p.shape for p in parameters]) != _shapes(layers, size):
        return None
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        features: Tensor = _Passes.apply(torso, blocks, *parameters)  # type: ignore[no-untyped-call]
        return features
    return _forward(torso, blocks, parameters)[1]


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` computes what ``kind`` does: it is no subclass, and has no hooks."""
    return (
        type(module) is kind  # a parametrized module has another type
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    )


def _kernel_names() -> list[str]:
    """The names of the kernels that run on this processor, the fastest first."""
    return [] if native.kernels is None else native.kernels.torso_kernels()


def is_traced() -> bool:
    """Whether torch records, fakes or transforms operations, which does not work for kernels that read memory
    by its address."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # jit.trace
        or torch._C._len_torch_dispatch_stack() > 0  # fake tensors, make_fx, counters of operations
        or torch._C._functorch.peek_interpreter_stack() is not None  # torch.func
        or forward_ad._current_level >= 0
    )


def is_readable(x: Tensor) -> bool:
    """Whether the kernels can read ``x`` at its address."""
    return type(x) in _PLAIN and x.is_cpu


def _checked(x: Tensor) -> Tensor:
    """``x``, a saved tensor, in the layout that the kernels read, which a hook on it may have changed."""
    if x.dtype != torch.bfloat16 or not is_readable(x):
        raise RuntimeError(
            f"a hook on saved tensors returned {x.dtype} on {x.device} for torch.bfloat16 on the CPU: let it "
            "keep dtype and device, or set MURMURATE_NATIVE=off"
        )
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format)


def _is_supported(blocks: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether all tensors have the dtype and layout that the kernels read."""
    if blocks.dtype != torch.bfloat16 or blocks.requires_grad or not len(blocks):
        return False
    for x in (blocks, *parameters):
        if x.dtype != torch.bfloat16 or not is_readable(x):
            return False
        if not (x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.is_contiguous()):
            return False
    return True


@lru_cache
def _torso(name: str, layers: tuple[Layer, ...], features: int) -> Any:
    """The kernels' description of a torso; None where their tiles do not fit it."""
    assert native.kernels is not None
    return native.kernels.torso(name, layers, features)


@lru_cache
def _shapes(layers: tuple[Layer, ...], features: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of ``run``'s parameters for these layers and this number of features."""
    shapes: list[tuple[int, ...]] = []
    for x in layers:
        side = x.kernel * x.block
        shapes += [(x.filters, x.channels // x.block**2, side, side), (x.filters,)]
    flat = x.filters * (x.height - x.kernel + 1) * (x.width - x.kernel + 1)
    return (*shapes, (features, flat), (features,))


def _forward(torso: Any, blocks: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(outputs of the convolutions, features)."""
    kernels = native.kernels
    assert kernels is not None
    batch = len(blocks)
    inner = torch.empty(kernels.torso_inner(torso, batch), dtype=torch.bfloat16, device=blocks.device)
    features = torch.empty((batch, parameters[-1].shape[0]), dtype=torch.bfloat16, device=blocks.device)
    addresses = tuple([p.data_ptr() for p in parameters])
    kernels.torso_forward(torso, batch, blocks.data_ptr(), addresses, inner.data_ptr(), features.data_ptr())
    return inner, features


class _Passes(torch.autograd.Function):
    """The forward and the backward pass in the kernels."""

    @staticmethod
    def forward(ctx: Any, torso: Any, blocks: Tensor, *parameters: Tensor) -> Tensor:
        inner, features = _forward(torso, blocks, parameters)
        ctx.torso = torso
        ctx.save_for_backward(blocks, inner, features, *parameters)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kernels = native.kernels
        assert kernels is not None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "the compiled torso computes no batches of gradients (is_grads_batched, vmap): set "
                "MURMURATE_NATIVE=off for them"
            )
        blocks, inner, features, *parameters = map(_checked, ctx.saved_tensors)
        is_needed = ctx.needs_input_grad[2:]
        # index of the first layer that is not frozen
        first = next(i for i, needed in enumerate(is_needed) if needed) // 2
        gradients = [torch.empty_like(p) for p in parameters]  # each has its parameter's layout
        gradient = gradient.contiguous()  # referenced, as the kernels read its memory by address
        kernels.torso_backward(
            ctx.torso,
            len(blocks),
            blocks.data_ptr(),
            inner.data_ptr(),
            features.data_ptr(),
            gradient.data_ptr(),
            tuple([p.data_ptr() for p in parameters]),
            tuple([g.data_ptr() for g in gradients]),
            first,
        )
        return None, None, *(g if needed else None for g, needed in zip(gradients, is_needed, strict=True))
