"""Returns and advantages of a time-major rollout, with termination and truncation kept apart.

A *terminated* step ends the task, so its return does not bootstrap. A *truncated* step ends the episode
alone (a time limit): the task would have continued, so its return bootstraps from the value of the final
observation. After either, the recursion restarts, because the next row belongs to another episode. A
step that is both is terminated.

The results carry no gradient, whether or not the arguments do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.losses.checks import check_bool, check_rank, check_shape


def n_step_returns(
    r_t: Tensor,
    terminated_t: Tensor,
    truncated_t: Tensor,
    last_value: Tensor,
    truncated_value: Tensor | None = None,
    *,
    discount: float,
) -> Tensor:
    """The return of each step up to the end of the rollout, bootstrapped there.

    ``G_t = r_t + discount * G_{t+1}`` with ``G_T = V(s_T)``; a terminated step has ``G_t = r_t``, a
    truncated one ``G_t = r_t + discount * V(final observation of t)``.
    Source: Mnih et al. 2016, Algorithm S3 (R at the end of the rollout, then backwards).
    Differs: there a time limit counts as a terminal state; here it bootstraps.

    Args:
        r_t: rewards [T, B].
        terminated_t: bool [T, B].
        truncated_t: bool [T, B].
        last_value: V of the observation after step T [B]; ignored where the
            last step ended an episode.
        truncated_value: V of the final observation [T, B], read only where truncated; None if no
            step is.
        discount: per step, in [0, 1].

    Returns:
        G [T, B], without gradient, of ``r_t``'s dtype.

    Raises:
        ValueError: on a wrong rank, shape or dtype, or a truncated step without its value.
    """
    _check(r_t, terminated_t, truncated_t, last_value, truncated_value, discount)
    with torch.no_grad():
        base, discount_t = _ends(r_t, terminated_t, truncated_t, truncated_value, discount)
        return _backwards(base, discount_t, last_value)


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
    truncated one the value of its final observation, and after either the sum restarts.
    With ``lambda_ = 1``, ``A + V`` is ``n_step_returns``; with ``lambda_ = 0``, ``A`` is the TD error.

    Args:
        r_t: rewards [T, B].
        v_t: V of the observation each step started from [T, B].
        terminated_t: bool [T, B].
        truncated_t: bool [T, B].
        last_value: V of the observation after step T [B]; ignored where the
            last step ended an episode.
        truncated_value: V of the final observation [T, B], read only where truncated; None if no
            step is.
        discount: per step, in [0, 1].
        lambda_: weight of longer returns, in [0, 1].

    Returns:
        A [T, B], without gradient, of ``r_t``'s dtype.

    Raises:
        ValueError: on a wrong rank, shape or dtype, or a truncated step without its value.
    """
    _check(r_t, terminated_t, truncated_t, last_value, truncated_value, discount)
    check_shape(r_t.shape, "r_t", v_t=v_t)
    if not 0.0 <= lambda_ <= 1.0:
        raise ValueError(f"lambda_ must be in [0, 1], but it is {lambda_}")
    with torch.no_grad():
        base, discount_t = _ends(r_t, terminated_t, truncated_t, truncated_value, discount)
        v_tp1 = torch.cat([v_t[1:], last_value.unsqueeze(0)])
        delta_t = torch.addcmul(base, discount_t, v_tp1) - v_t
        return _backwards(delta_t, discount_t * lambda_, torch.zeros_like(last_value))


def _ends(
    r_t: Tensor,
    terminated_t: Tensor,
    truncated_t: Tensor,
    truncated_value: Tensor | None,
    discount: float,
) -> tuple[Tensor, Tensor]:
    """Rewards [T, B] with truncated bootstraps folded in, and discounts [T, B] that are 0 across an end."""
    discount_t = torch.where(terminated_t | truncated_t, r_t.new_zeros(()), discount)
    if truncated_value is None:
        return r_t, discount_t
    bootstrapped = torch.add(r_t, truncated_value, alpha=discount)
    return torch.where(truncated_t & ~terminated_t, bootstrapped, r_t), discount_t


def _backwards(base: Tensor, discount_t: Tensor, after: Tensor) -> Tensor:
    """x_t = base_t + discount_t * x_{t+1} with x_T = ``after``: one fused operation a step."""
    x = after.to(base.dtype)
    out = torch.empty_like(base)
    rows = out.unbind(0)
    bases, discounts = base.unbind(0), discount_t.unbind(0)
    for t in range(len(rows) - 1, -1, -1):
        x = torch.addcmul(bases[t], discounts[t], x, out=rows[t])
    return out


def _check(
    r_t: Tensor,
    terminated_t: Tensor,
    truncated_t: Tensor,
    last_value: Tensor,
    truncated_value: Tensor | None,
    discount: float,
) -> None:
    check_rank(2, r_t=r_t)
    check_shape(r_t.shape, "r_t", terminated_t=terminated_t, truncated_t=truncated_t)
    check_bool(terminated_t=terminated_t, truncated_t=truncated_t)
    check_shape(r_t.shape[1:], "a row of r_t", last_value=last_value)
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount must be in [0, 1], but it is {discount}")
    if truncated_value is not None:
        check_shape(r_t.shape, "r_t", truncated_value=truncated_value)
    elif truncated_t.any():
        raise ValueError("a step is truncated: give truncated_value, the value of its final observation")
