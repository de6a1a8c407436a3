"""Q-learning on n-step transitions: targets, temporal-difference errors, and their loss.

Every function raises ``ValueError`` on a wrong rank or shape.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape
from murmurate.native import gpu


class QStep(NamedTuple):
    """loss: scalar, differentiable once, in Q(s, .) alone. error: [B], see ``td_error``; a constant."""

    loss: Tensor
    error: Tensor


def q_step(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    weight: Tensor,
    q_t: Tensor,
    q_t_selector: Tensor | None = None,
) -> QStep:
    """``q_loss`` of ``td_error`` against ``q_target``.

    The arguments are those of these three functions, which check the shapes. On a CPU, numpy computes the
    loss and its gradient (-w min(max(error, -1), 1) / B at the action taken, 0 elsewhere) in closed form: for
    so few numbers the overhead of torch's operations exceeds the arithmetic. On a CUDA device one Triton
    kernel computes both (``_triton_q``), if Triton is installed. For an action that does not exist numpy's
    raises IndexError, and the kernel's loss and error are NaN.
    """
    shape = q_tm1.shape
    batch = shape[:1]
    has_fast_path = (
        len(shape) == 2
        and shape[0] > 0
        and a_tm1.dtype == torch.int64
        and q_tm1.dtype == q_t.dtype == r_t.dtype == discount_t.dtype == weight.dtype == torch.float32
        and a_tm1.shape == r_t.shape == discount_t.shape == weight.shape == batch
        and q_t.shape == shape
        and (q_t_selector is None or (q_t_selector.shape == shape and q_t_selector.dtype == q_tm1.dtype))
    )
    if q_tm1.is_cpu and has_fast_path:
        selector = q_t if q_t_selector is None else q_t_selector
        return _closed_form(q_tm1, a_tm1, r_t, discount_t, weight, q_t, selector)
    if q_tm1.is_cuda and has_fast_path and gpu.installed():
        from murmurate.losses._triton_q import FusedStep

        selector = q_t if q_t_selector is None else q_t_selector
        return QStep(*FusedStep.apply(q_tm1, a_tm1, r_t, discount_t, weight, q_t, selector))  # type: ignore[no-untyped-call]
    error = td_error(q_tm1, a_tm1, q_target(r_t, discount_t, q_t, q_t_selector))
    return QStep(q_loss(error, weight), error.detach())


def _closed_form(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    weight: Tensor,
    q_t: Tensor,
    q_t_selector: Tensor,
) -> QStep:
    """``q_step`` on a CPU; ``_triton_q.FusedStep`` is the same on a GPU."""
    rows, taken = np.arange(len(q_tm1)), a_tm1.numpy()
    if taken.min() < 0:
        raise IndexError(f"there is no action {taken.min()}: actions are numbered from 0")
    best = q_t_selector.detach().numpy().argmax(1)
    target = r_t.detach().numpy() + discount_t.detach().numpy() * q_t.detach().numpy()[rows, best]
    q_values = q_tm1.detach().numpy()
    error = target - q_values[rows, taken]
    slope = np.minimum(np.maximum(error, np.float32(-1)), np.float32(1))
    scaled = weight.detach().numpy() * (slope / np.float32(len(rows)))
    gradient = np.zeros_like(q_values)
    gradient[rows, taken] = -scaled
    # a product whose derivative is ``gradient``, with the value of the loss written into it: less overhead
    # than an autograd function
    loss = torch.dot(q_tm1.flatten(), torch.from_numpy(gradient).flatten())
    loss.detach().fill_(float(scaled @ (error - np.float32(0.5) * slope)))
    return QStep(loss, torch.from_numpy(error))


def q_target(r_t: Tensor, discount_t: Tensor, q_t: Tensor, q_t_selector: Tensor | None = None) -> Tensor:
    """``R + d Q'(s', a*)``, where a* maximises ``Q'(s', a)``, or the values of another net.

    Source: Watkins 1989; with ``q_t_selector`` double Q-learning (van Hasselt et al. 2016, eq. 4). In SPO
    the selector is the net that the replicas last agreed on (Zhang 2022, section 5.2).

    Args:
        r_t: R [B], the return of the n steps.
        discount_t: d [B], gamma**n, and 0 where the episode was terminated.
        q_t: Q'(s', .) [B, A] of the target net.
        q_t_selector: [B, A], the values that choose the action; None: ``q_t``.

    Returns:
        [B], without a gradient.
    """
    check_rank(1, r_t=r_t)
    check_shape(r_t.shape, "r_t", discount_t=discount_t)
    check_rank(2, q_t=q_t)
    check_shape(r_t.shape, "r_t", **{"q_t[:, 0]": q_t[:, 0]})
    if q_t_selector is not None:
        check_shape(q_t.shape, "q_t", q_t_selector=q_t_selector)
    choice = (q_t if q_t_selector is None else q_t_selector).argmax(1, keepdim=True)
    return (r_t + discount_t * q_t.gather(1, choice)[:, 0]).detach()


def td_error(q_tm1: Tensor, a_tm1: Tensor, target_tm1: Tensor) -> Tensor:
    """``y - Q(s, a)`` [B]; its magnitude gives a transition's priority.

    Args:
        q_tm1: Q(s, .) [B, A].
        a_tm1: a [B], int64.
        target_tm1: y [B]; a constant here, no gradient flows into it.
    """
    check_rank(2, q_tm1=q_tm1)
    check_rank(1, a_tm1=a_tm1, target_tm1=target_tm1)
    check_shape(a_tm1.shape, "a_tm1", target_tm1=target_tm1, **{"q_tm1[:, 0]": q_tm1[:, 0]})
    return target_tm1.detach() - q_tm1.gather(1, a_tm1[:, None])[:, 0]


def q_loss(error: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of the Huber loss of the errors.

    Source: Mnih et al. 2015 clip the error to [-1, 1], which is the gradient of Huber's loss with delta = 1;
    the weights are the importance weights of Schaul et al. 2016, Algorithm 1, line 13.

    Args:
        error: [B].
        weight: [B], constants.
    """
    check_rank(1, error=error)
    check_shape(error.shape, "error", weight=weight)
    each = F.huber_loss(error, error.new_zeros(error.shape), reduction="none")
    return (weight.detach() * each).mean()
