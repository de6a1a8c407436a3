"""Q-learning on n-step transitions: targets, temporal-difference errors, and their loss."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape


class QStep(NamedTuple):
    """loss: scalar. error: [B], see ``td_error``. gradient: [B, A], of the loss by Q(s, .)."""

    loss: Tensor
    error: Tensor
    gradient: Tensor


def q_step(
    value: Tensor,
    action: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    next_value: Tensor,
    next_selector: Tensor | None = None,
) -> QStep:
    """``q_loss`` of ``td_error`` against ``q_target``, and its gradient; none of it is recorded.

    The arguments are those of the three; shapes that do not fit raise what these raise. On a CPU the gradient
    is written down as it is, -w min(max(error, -1), 1) / B at the action and 0 elsewhere: a handful of
    numbers, and torch takes longer to record what is done with them than to do it.
    """
    table = value.shape
    row = table[:1]
    fits = (
        len(table) == 2
        and table[0] > 0
        and action.dtype == torch.int64
        and value.dtype == next_value.dtype == reward.dtype == discount.dtype == weight.dtype == torch.float32
        and action.shape == reward.shape == discount.shape == weight.shape == row
        and next_value.shape == table
        and (next_selector is None or (next_selector.shape == table and next_selector.dtype == value.dtype))
    )
    if value.is_cpu and fits:
        return _written_down(value, action, reward, discount, weight, next_value, next_selector)
    with torch.enable_grad():
        leaf = value.detach().requires_grad_()
        error = td_error(leaf, action, q_target(reward, discount, next_value, next_selector))
        loss = q_loss(error, weight)
        (gradient,) = torch.autograd.grad(loss, [leaf])
    return QStep(loss.detach(), error.detach(), gradient)


def _written_down(
    value: Tensor,
    action: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    next_value: Tensor,
    next_selector: Tensor | None,
) -> QStep:
    rows, taken = np.arange(len(value)), action.numpy()
    if taken.min() < 0:
        raise IndexError(f"there is no action {taken.min()}: they are numbered from 0")
    following = next_value.detach().numpy()
    best = (following if next_selector is None else next_selector.detach().numpy()).argmax(1)
    target = reward.detach().numpy() + discount.detach().numpy() * following[rows, best]
    now = value.detach().numpy()
    error = target - now[rows, taken]
    slope = np.minimum(np.maximum(error, np.float32(-1)), np.float32(1))
    scaled = weight.detach().numpy() * (slope / np.float32(len(rows)))
    gradient = np.zeros_like(now)
    gradient[rows, taken] = -scaled
    loss = scaled @ (error - np.float32(0.5) * slope)
    return QStep(torch.from_numpy(np.asarray(loss)), torch.from_numpy(error), torch.from_numpy(gradient))


def q_target(
    reward: Tensor, discount: Tensor, next_value: Tensor, next_selector: Tensor | None = None
) -> Tensor:
    """``R + d Q'(s', a*)`` with ``a* = argmax_a Q'(s', a)``, or of another net's values.

    Source: Watkins 1989; with ``next_selector`` double Q-learning (van Hasselt et al. 2016, eq. 4). In SPO
    the selector is the net that the replicas last agreed on (Zhang, section 5.2).

    Args:
        reward: R [B], the return of the n steps.
        discount: d [B], gamma**n, and 0 where the episode was terminated.
        next_value: Q'(s', .) [B, A] of the target net.
        next_selector: [B, A], the values that choose the action; None takes ``next_value``.

    Returns:
        [B], without a gradient.

    Raises:
        ValueError: on a wrong rank or shape.
    """
    check_rank(1, reward=reward)
    check_shape(reward.shape, "reward", discount=discount)
    check_rank(2, next_value=next_value)
    check_shape(reward.shape, "reward", **{"next_value[:, 0]": next_value[:, 0]})
    if next_selector is not None:
        check_shape(next_value.shape, "next_value", next_selector=next_selector)
    choice = (next_value if next_selector is None else next_selector).argmax(1, keepdim=True)
    return (reward + discount * next_value.gather(1, choice)[:, 0]).detach()


def td_error(value: Tensor, action: Tensor, target: Tensor) -> Tensor:
    """``y - Q(s, a)`` [B]; its magnitude is what a transition's priority is made of.

    Args:
        value: Q(s, .) [B, A].
        action: a [B], int64.
        target: y [B]; a constant here, no gradient flows into it.

    Raises:
        ValueError: on a wrong rank or shape.
    """
    check_rank(2, value=value)
    check_rank(1, action=action, target=target)
    check_shape(action.shape, "action", target=target, **{"value[:, 0]": value[:, 0]})
    return target.detach() - value.gather(1, action[:, None])[:, 0]


def q_loss(error: Tensor, weight: Tensor | None = None, *, delta: float | None = 1.0) -> Tensor:
    """Weighted mean of the Huber loss of the errors (half the square where ``delta`` is None).

    Source: Mnih et al. 2015 clip the error to [-1, 1], which is the gradient of Huber's loss with delta = 1;
    the weights are the importance weights of Schaul et al. 2016, Algorithm 1, line 13.

    Args:
        error: [B].
        weight: [B], constants; None is 1 for all.

    Returns:
        A scalar.

    Raises:
        ValueError: on a wrong rank or shape, or a delta that is not positive.
    """
    check_rank(1, error=error)
    if delta is not None and not delta > 0:
        raise ValueError(f"delta is where the loss turns linear, and above 0, not {delta}")
    if delta is None:
        each = 0.5 * error.square()
    else:
        each = F.huber_loss(error, error.new_zeros(error.shape), reduction="none", delta=delta)
    if weight is None:
        return each.mean()
    check_shape(error.shape, "error", weight=weight)
    return (weight.detach() * each).mean()
