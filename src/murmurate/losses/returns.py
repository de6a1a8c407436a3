"""Advantages over a time-major rollout, with termination and truncation kept apart.

A *terminated* step ends the task, so its return does not bootstrap. A *truncated* step ends only the episode
(a time limit): the task would have continued, so its return bootstraps from the value of the final
observation. After either, the recursion restarts, because the next row belongs to another episode. A
step that is both counts as terminated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.losses.checks import check_bool, check_rank, check_shape


def generalized_advantages(
    r_t: Tensor,
    v_t: Tensor,
    terminated_t: Tensor,
    truncated_t: Tensor,
    last_value: Tensor,
    truncated_value: Tensor | None = None,
    *,
    discount: float,
    lambda_: float,
) -> Tensor:
    """Generalized advantage estimates: exponentially weighted sums of TD errors.

    ``A_t = delta_t + discount * lambda * A_{t+1}`` with ``delta_t = r_t + discount * V_{t+1} - V_t``.
    Source: Schulman et al. 2016, eq. 16. At a terminated step ``V_{t+1}`` is 0, at a
    truncated step it is the value of the final observation, and after either the sum restarts.
    With ``lambda_ = 1``, ``A_t + V_t`` is the n-step return up to the end of the rollout (Mnih et al. 2016,
    Algorithm S3; Differs: there a time limit counts as a terminal state); with ``lambda_ = 0``, ``A_t`` is
    the TD error.

    Args:
        r_t: rewards [T, B].
        v_t: V of the observation each step started from [T, B].
        terminated_t: bool [T, B].
        truncated_t: bool [T, B].
        last_value: V of the observation after step T [B]; any finite number where that step ended an episode.
        truncated_value: V of the final observation [T, B], read only where truncated; None if no step was
            truncated.
        discount: per step, in [0, 1].
        lambda_: weight of longer returns, in [0, 1].

    Returns:
        A [T, B], without gradient, of ``r_t``'s dtype.

    Raises:
        ValueError: on a wrong rank, shape, dtype, discount or lambda_, or a truncated step without its value.
    """
    bootstrapped, discount_t = bootstrapped_rewards(
        r_t, v_t, terminated_t, truncated_t, last_value, truncated_value, discount=discount
    )
    check_lambda(lambda_)
    with torch.no_grad():
        v_tp1 = torch.cat([v_t[1:], last_value.unsqueeze(0)])
        delta_t = torch.addcmul(bootstrapped, discount_t, v_tp1) - v_t
        return discounted_sums(delta_t, discount_t * lambda_)


def check_lambda(lambda_: float) -> None:
    """Raise ``ValueError`` unless ``lambda_`` is in [0, 1]."""
    if not 0.0 <= lambda_ <= 1.0:
        raise ValueError(f"lambda_ must be in [0, 1], but it is {lambda_}")


def bootstrapped_rewards(
    r_t: Tensor,
    v_t: Tensor,
    terminated_t: Tensor,
    truncated_t: Tensor,
    last_value: Tensor,
    truncated_value: Tensor | None,
    *,
    discount: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Rewards and discounts [T, B] with which a recursion over time needs no case distinction.

    At a truncated step the reward includes the discounted value of the final observation. Where an episode
    ends, the discount is 0. Both are without gradient. Arguments and exceptions are those of
    ``generalized_advantages``; discount may also be a tensor [T, B], whose values are not checked.
    """
    check_rank(2, r_t=r_t)
    check_shape(r_t.shape, "r_t", v_t=v_t, terminated_t=terminated_t, truncated_t=truncated_t)
    check_bool(terminated_t=terminated_t, truncated_t=truncated_t)
    check_shape(r_t.shape[1:], "a row of r_t", last_value=last_value)
    if truncated_value is not None:
        check_shape(r_t.shape, "r_t", truncated_value=truncated_value)
    elif truncated_t.any():
        raise ValueError("a step is truncated: give truncated_value, the value of its final observation")
    if isinstance(discount, Tensor):
        check_shape(r_t.shape, "r_t", discount=discount)
    elif not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount must be in [0, 1], but it is {discount}")
    with torch.no_grad():
        discount_t = torch.where(terminated_t | truncated_t, r_t.new_zeros(()), discount)
        bootstrapped = r_t
        if truncated_value is not None:
            truncated_r_t = r_t + discount * truncated_value
            bootstrapped = torch.where(truncated_t & ~terminated_t, truncated_r_t, r_t)
        return bootstrapped, discount_t


def discounted_sums(delta_t: Tensor, decay_t: Tensor) -> Tensor:
    """``x_t = delta_t + decay_t x_{t+1}`` [T, B] with x_T = 0, by one fused operation per step."""
    x = torch.zeros_like(delta_t[0])
    out = torch.empty_like(delta_t)
    rows, deltas, decays = out.unbind(0), delta_t.unbind(0), decay_t.unbind(0)
    for t in reversed(range(len(rows))):
        x = torch.addcmul(deltas[t], decays[t], x, out=rows[t])
    return out
