"""V-trace: value targets and advantages of one policy from the steps of another, older policy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.losses.checks import check_shape
from murmurate.losses.returns import bootstrapped_rewards, check_lambda, discounted_sums


class VTrace(NamedTuple):
    """target_t: v_t, the targets of the values [T, B]. advantage_t: the advantages of the policy gradient,
    times their importance weights [T, B]."""

    target_t: Tensor
    advantage_t: Tensor


def vtrace(
    rho_t: Tensor,
    r_t: Tensor,
    v_t: Tensor,
    terminated_t: Tensor,
    truncated_t: Tensor,
    last_value: Tensor,
    truncated_value: Tensor | None = None,
    *,
    discount: float | Tensor,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    policy_rho_bar: float = 1.0,
) -> VTrace:
    """V-trace targets, and the advantages of the policy gradient.

    Source: Espeholt et al. 2018, eq. 1, in the recursive form of its Remark 1,

        v_s = V(x_s) + delta_s V + gamma c_s (v_{s+1} - V(x_{s+1}))
        delta_s V = min(rho_bar, rho_s) (r_s + gamma V(x_{s+1}) - V(x_s)),  c_s = lambda min(c_bar, rho_s)

    and section 4.2: the advantage is ``min(policy_rho_bar, rho_s) (q_s - V(x_s))`` with q_s = r_s + gamma
    v_{s+1}. Differs: for lambda below 1 q_s bootstraps from lambda v_{s+1} + (1 - lambda) V(x_{s+1}), so that
    the advantage of steps by the same policy (all rho 1) equals ``generalized_advantages``. Terminated
    and truncated steps are treated as in that function.

    Args:
        rho_t: pi(a_t | x_t) / mu(a_t | x_t), the learner's probability over the actor's [T, B].
        r_t: rewards [T, B].
        v_t: V of the observation each step started from [T, B].
        terminated_t: bool [T, B].
        truncated_t: bool [T, B].
        last_value: V of the observation after step T [B]; any finite number where that step ended an episode.
        truncated_value: V of the final observation [T, B], read only where truncated; None if no step was
            truncated.
        discount: per step, in [0, 1] (checked only for a number); a number, or [T, B].
        lambda_: weight of longer returns, in [0, 1].
        rho_bar: largest weight of a TD error; decides which policy's values are learned.
        c_bar: largest weight of later TD errors; affects only the speed of learning. The paper assumes
            c_bar <= rho_bar.
        policy_rho_bar: largest weight of an advantage.

    Returns:
        ``VTrace``, without gradient, of ``r_t``'s dtype.

    Raises:
        ValueError: on a wrong rank, shape, dtype or range, or a truncated step without its value.
    """
    bootstrapped, discount_t = bootstrapped_rewards(
        r_t, v_t, terminated_t, truncated_t, last_value, truncated_value, discount=discount
    )
    check_shape(r_t.shape, "r_t", rho_t=rho_t)
    check_lambda(lambda_)
    for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar), ("policy_rho_bar", policy_rho_bar)):
        if not bar >= 0.0:  # also NaN
            raise ValueError(f"{name} must be at least 0, but it is {bar}")
    with torch.no_grad():
        v_tp1 = torch.cat([v_t[1:], last_value.unsqueeze(0)])
        error_t = torch.addcmul(bootstrapped, discount_t, v_tp1) - v_t
        decay_t = discount_t * lambda_
        correction_t = discounted_sums(
            rho_t.clamp(max=rho_bar) * error_t, decay_t * rho_t.clamp(max=c_bar)
        )  # v_t - V(x_t)
        correction_tp1 = torch.cat([correction_t[1:], torch.zeros_like(last_value).unsqueeze(0)])
        advantage_t = rho_t.clamp(max=policy_rho_bar) * torch.addcmul(error_t, decay_t, correction_tp1)
        return VTrace(v_t + correction_t, advantage_t)
