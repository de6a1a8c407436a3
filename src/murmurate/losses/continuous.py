"""Losses for vector actions: twin critics, deterministic policies and squashed Gaussian policies.

Gradients are computed in closed form, because recording an update of two small critics for autograd would be
a good part of its time. The tests compare these gradients with autograd's. All functions raise ValueError on
a wrong rank or shape.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_LOG_TWO = math.log(2.0)


class SquaredError(NamedTuple):
    """loss: scalar. slope: [E, B], its gradient with respect to the values. error: [E, B], y - Q_e(s, a)."""

    loss: Tensor
    slope: Tensor
    error: Tensor


def clipped_target(r_t: Tensor, discount_t: Tensor, q_t: Tensor) -> Tensor:
    """``R + d min_e Q'_e(s', a')``: the target of all critics (clipped double Q-learning).

    Source: Fujimoto et al. 2018, Algorithm 1 and eq. 10; with one critic, Lillicrap et al. 2016, Algorithm 1.

    Args:
        r_t: R [B], the return of the n steps.
        discount_t: d [B], gamma**n, and 0 where the episode was terminated.
        q_t: Q'_e(s', a') [E, B] of the E target critics.

    Returns:
        [B].
    """
    _check_critics(r_t, discount_t, q_t)
    return torch.addcmul(r_t, discount_t, q_t.amin(0))


def soft_target(
    r_t: Tensor, discount_t: Tensor, q_t: Tensor, log_probability_t: Tensor, alpha: Tensor
) -> Tensor:
    """``R + d (min_e Q'_e(s', a') - alpha log pi(a' | s'))``.

    Source: Haarnoja et al. 2018b, eq. 3 and 5, with the smaller of two critics.

    Args:
        r_t, discount_t, q_t: as in ``clipped_target``.
        log_probability_t: log pi(a' | s') [B].
        alpha: the temperature, a scalar.

    Returns:
        [B].
    """
    _check_critics(r_t, discount_t, q_t)
    check_shape(r_t.shape, "r_t", log_probability_t=log_probability_t)
    soft_value = torch.addcmul(q_t.amin(0), alpha, log_probability_t, value=-1)
    return torch.addcmul(r_t, discount_t, soft_value)


def squared_error(q_tm1: Tensor, target_tm1: Tensor, weight: Tensor) -> SquaredError:
    """``sum_e mean_b w_b (y_b - Q_e(s_b, a_b))**2``.

    Source: Fujimoto et al. 2018, Algorithm 1; the weights are the importance weights of Schaul et al. 2016.

    Args:
        q_tm1: Q_e(s, a) [E, B].
        target_tm1: y [B], a constant.
        weight: [B], constants.
    """
    check_rank(2, q_tm1=q_tm1)
    check_shape(q_tm1.shape[1:], "q_tm1[0]", target_tm1=target_tm1, weight=weight)
    error = target_tm1 - q_tm1
    slope = error * (weight * (-2.0 / q_tm1.shape[1]))
    loss = torch.dot(slope.view(-1), error.view(-1)) * -0.5  # as slope is -2 w error / B
    return SquaredError(loss, slope, error)


class Squashed(NamedTuple):
    """An action of a squashed Gaussian. action: [B, D] in (-1, 1). log_probability: [B]."""

    action: Tensor
    log_probability: Tensor


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> Squashed:
    """``a = tanh(u)``, ``u = mean + std noise``, and its log-probability.

    ``log pi(a) = sum_i log N(u_i; mean_i, std_i**2) - log(1 - a_i**2)`` (Haarnoja et al. 2018b, eq. 26). The
    last logarithm is computed as ``2 (log 2 - u - softplus(-2 u))``, which is exact where 1 - a**2 rounds
    to 0.

    Args:
        mean, log_std: [B, D].
        noise: [B, D], standard normal.
    """
    check_rank(2, mean=mean)
    check_shape(mean.shape, "mean", log_std=log_std, noise=noise)
    u = torch.addcmul(mean, log_std.exp(), noise)
    gaussian = torch.addcmul(log_std, noise, noise, value=0.5)  # its negative, without the constant
    # with beta = -2, softplus is -softplus(-2 u) / 2
    squashing = torch.sub(u, F.softplus(u, beta=-2.0), alpha=2.0)  # without the factor 2 and the constant
    constant = mean.shape[1] * (-_HALF_LOG_TWO_PI - 2.0 * _LOG_TWO)
    log_probability = squashing.mul_(2.0).sub_(gaussian).sum(1).add_(constant)
    return Squashed(torch.tanh(u), log_probability)


class GaussianSlope(NamedTuple):
    """Gradients [B, D] with respect to the mean and log_std of a squashed Gaussian."""

    mean: Tensor
    log_std: Tensor


def soft_policy_slope(
    action: Tensor, log_std: Tensor, noise: Tensor, q_slope: Tensor, alpha: Tensor
) -> GaussianSlope:
    """The gradient of ``mean_b alpha log pi(a_b | s_b) - Q(s_b, a_b)`` for ``a = tanh(mean + std noise)``.

    Source: Haarnoja et al. 2018b, eq. 9 and 10. With ``d log pi / du = 2 a``:

        slope_u = (2 alpha a - dQ/da (1 - a**2)) / B
        slope_mean = slope_u
        slope_log_std = slope_u std noise - alpha / B

    Args:
        action, log_std, noise: [B, D], of ``squashed_gaussian``.
        q_slope: dQ/da [B, D], of each row's own value (not of a mean over rows).
        alpha: the temperature, a scalar.
    """
    check_rank(2, action=action)
    check_shape(action.shape, "action", log_std=log_std, noise=noise, q_slope=q_slope)
    share = 1.0 / action.shape[0]
    alpha_share = alpha * share
    squashed = torch.addcmul(q_slope, q_slope * action, action, value=-1)  # dQ/da (1 - a**2)
    slope_u = torch.addcmul(squashed.mul_(-share), action, alpha_share, value=2)
    return GaussianSlope(slope_u, (slope_u * log_std.exp()).mul_(noise).sub_(alpha_share))


def temperature_slope(log_probability: Tensor, target_entropy: float) -> Tensor:
    """The gradient of ``-log(alpha) mean_b(log pi(a_b | s_b) + H)`` with respect to log(alpha), a scalar.

    Source: Haarnoja et al. 2018b, eq. 18. Differs: the factor is log(alpha) instead of alpha, as in the
    authors' code; both gradients are zero at the same policies.

    Args:
        log_probability: log pi(a | s) [B].
        target_entropy: H, usually -D.
    """
    check_rank(1, log_probability=log_probability)
    return -target_entropy - log_probability.mean()


def _check_critics(r_t: Tensor, discount_t: Tensor, q_t: Tensor) -> None:
    check_rank(1, r_t=r_t)
    check_rank(2, q_t=q_t)
    check_shape(r_t.shape, "r_t", discount_t=discount_t)
    check_shape(r_t.shape, "r_t", **{"q_t[0]": q_t[0]})
