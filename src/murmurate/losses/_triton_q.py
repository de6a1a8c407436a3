"""Q-learning's target, error, loss and gradient in one Triton kernel: ``q_learning.q_step`` on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from murmurate.native import gpu

_ROWS = 16  # rows that one program handles


@triton.jit(do_not_specialize=["count"])
def _step(
    q_tm1,
    a_tm1,
    r_t,
    discount_t,
    weight,
    q_t,
    q_t_selector,
    error,
    loss,
    gradient,
    count,
    actions,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write error and loss [count], and the loss's gradient [count, actions].

    WIDTH: ``actions`` rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    row_valid = row < count
    offsets = row[:, None] * actions + column[None, :]
    valid = row_valid[:, None] & (column < actions)[None, :]
    values = tl.load(q_t_selector + offsets, mask=valid, other=float("-inf"))
    # a NaN counts as the maximum, as in torch's argmax, so that it cannot go unnoticed
    best = tl.argmax(tl.where(values != values, float("inf"), values), 1)
    next_value = tl.load(q_t + row * actions + best, mask=row_valid, other=0.0)
    reward = tl.load(r_t + row, mask=row_valid, other=0.0)
    discount = tl.load(discount_t + row, mask=row_valid, other=0.0)
    taken = tl.load(a_tm1 + row, mask=row_valid, other=0)
    legal = (taken >= 0) & (taken < actions)
    value = tl.load(q_tm1 + row * actions + taken, mask=row_valid & legal, other=float("nan"))
    difference = reward + discount * next_value - value
    slope = tl.clamp(difference, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)  # NaN stays, as in torch
    scaled = tl.load(weight + row, mask=row_valid, other=0.0) * tl.div_rn(slope, count.to(tl.float32))
    tl.store(error + row, difference, mask=row_valid)
    tl.store(loss + row, scaled * (difference - 0.5 * slope), mask=row_valid)
    is_taken = column[None, :] == taken[:, None]
    tl.store(gradient + offsets, tl.where(is_taken, -scaled[:, None], 0.0), mask=valid)


class FusedStep(torch.autograd.Function):
    """(loss, error [B]) of ``q_step``, which has checked dtypes and shapes. An action that does not exist
    makes both NaN."""

    @staticmethod
    def forward(
        ctx: Any,
        q_tm1: Tensor,
        a_tm1: Tensor,
        r_t: Tensor,
        discount_t: Tensor,
        weight: Tensor,
        q_t: Tensor,
        q_t_selector: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count, actions = q_tm1.shape
        tensors = [
            x.detach().contiguous() for x in (q_tm1, a_tm1, r_t, discount_t, weight, q_t, q_t_selector)
        ]
        error, loss = torch.empty_like(tensors[2]), torch.empty_like(tensors[2])
        ctx.gradient = torch.empty_like(tensors[0])
        grid, size = gpu.block(count, _ROWS)
        width = 1 << (actions - 1).bit_length()
        with gpu.on(q_tm1.device):
            # without fused multiply-add, so that every operation rounds as in torch
            _step[grid](
                *tensors, error, loss, ctx.gradient, count, actions,
                WIDTH=width, BLOCK=size, enable_fp_fusion=False,
            )  # fmt: skip
        ctx.mark_non_differentiable(error)
        return loss.sum(), error

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient * slope, None, None, None, None, None, None
