"""Q-learning's target, error, loss and gradient in one Triton kernel; its twin is in ``q_learning``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from murmurate.native import gpu

_ROWS = 16  # of a program


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
    """error, loss: [count]; gradient: [count, actions] of the loss. WIDTH: actions, up to a power of two."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = row < count
    places = row[:, None] * actions + column[None, :]
    there = inside[:, None] & (column < actions)[None, :]
    values = tl.load(q_t_selector + places, mask=there, other=float("-inf"))
    # what is not a number is chosen, as torch does, so that it cannot go unnoticed
    best = tl.argmax(tl.where(values != values, float("inf"), values), 1)
    after = tl.load(q_t + row * actions + best, mask=inside, other=0.0)
    reward = tl.load(r_t + row, mask=inside, other=0.0)
    discount = tl.load(discount_t + row, mask=inside, other=0.0)
    taken = tl.load(a_tm1 + row, mask=inside, other=0)
    legal = (taken >= 0) & (taken < actions)
    now = tl.load(q_tm1 + row * actions + taken, mask=inside & legal, other=float("nan"))
    off = reward + discount * after - now
    slope = tl.minimum(tl.maximum(off, -1.0), 1.0)
    scaled = tl.load(weight + row, mask=inside, other=0.0) * tl.div_rn(slope, count.to(tl.float32))
    tl.store(error + row, off, mask=inside)
    tl.store(loss + row, scaled * (off - 0.5 * slope), mask=inside)
    mine = column[None, :] == taken[:, None]
    tl.store(gradient + places, tl.where(mine, -scaled[:, None], 0.0), mask=there)


class FusedStep(torch.autograd.Function):
    """(loss, error [B]) of ``q_step``'s tensors, float32 and all of its shapes. An action that does not exist
    makes both not a number."""

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
        given = [x.detach().contiguous() for x in (q_tm1, a_tm1, r_t, discount_t, weight, q_t, q_t_selector)]
        error, loss = torch.empty_like(given[2]), torch.empty_like(given[2])
        ctx.gradient = torch.empty_like(given[0])
        grid, size = gpu.block(count, _ROWS)
        width = 1 << (actions - 1).bit_length()
        # not fused: a multiplication and an addition round as they do in torch
        _step[grid](
            *given, error, loss, ctx.gradient, count, actions, WIDTH=width, BLOCK=size, enable_fp_fusion=False
        )
        ctx.mark_non_differentiable(error)
        return loss.sum(), error

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient * slope, None, None, None, None, None, None
