"""Negative log-likelihood of diagonal Gaussians with softly bounded log variances; a priority by entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape


class NLLGradient(NamedTuple):
    """The losses [E] of E models, and the gradients of their sum with respect to output [E, B, 2 D], low [D]
    and high [D]."""

    loss: Tensor
    output: Tensor
    low: Tensor
    high: Tensor


def soft_bounds(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``x`` [..., D] moved smoothly to between ``low`` and ``high`` [D].

    Source: Chua et al. 2018, appendix A.1: first ``high - softplus(high - x)``, then ``low + softplus(. -
    low)``. The result may exceed ``high`` by up to ``softplus(low - high)``. Raises ValueError on a wrong
    shape.
    """
    check_shape(x.shape[-1:], "x[..., :]", low=low, high=high)
    x = high - F.softplus(high - x)
    return low + F.softplus(x - low)


def gaussian_nll(mean: Tensor, log_variance: Tensor, target: Tensor) -> Tensor:
    """The mean of ``(mu - y)^2 exp(-l) + l`` over examples and dimensions: twice the negative log-likelihood
    per dimension, without its constant log(2 pi).

    Source: Chua et al. 2018, eq. 1; the mean over dimensions is from the code of Janner et al. 2019.

    Args:
        mean, log_variance: mu, l [..., B, D].
        target: y [..., B, D]; constants.

    Returns:
        [...], one loss for each model.

    Raises:
        ValueError: on a wrong shape.
    """
    check_shape(mean.shape, "mean", log_variance=log_variance, target=target)
    square = (mean - target.detach()).square()
    return (square * torch.exp(-log_variance) + log_variance).mean((-2, -1))


def bounded_nll_gradient(output: Tensor, target: Tensor, low: Tensor, high: Tensor) -> NLLGradient:
    """``gaussian_nll`` of E models with ``soft_bounds``, and its gradient in closed form: for so few numbers
    the overhead of autograd exceeds the arithmetic.

    Args:
        output: [E, B, 2 D], means and then log variances before they are bounded.
        target: [E, B, D].
        low, high: [D], the bounds, which are learned too.

    Raises:
        ValueError: on a wrong rank or shape.
    """
    check_rank(3, output=output, target=target)
    dimensions = target.shape[-1]
    check_shape(torch.Size((*target.shape[:2], 2 * dimensions)), "[E, B, 2 D]", output=output)
    check_shape(target.shape[-1:], "target[0, 0]", low=low, high=high)
    error = output[..., :dimensions] - target
    to_high = high - output[..., dimensions:]
    to_low = high - F.softplus(to_high) - low
    log_variance = low + F.softplus(to_low)
    precision = torch.exp(-log_variance)
    scaled = error * precision
    square = error * scaled
    loss = (square + log_variance).mean((1, 2))
    size = target.shape[1] * dimensions
    # the chain rule, from log_variance back through the lower and then the upper of the soft bounds
    log_variance_gradient = (1 - square).div_(size)
    slope_low, slope_high = torch.sigmoid(to_low), torch.sigmoid(to_high)
    upper_gradient = log_variance_gradient * slope_low
    raw_gradient = upper_gradient * slope_high
    gradient = torch.cat((scaled.mul_(2 / size), raw_gradient), -1)
    low_gradient = (log_variance_gradient - upper_gradient).sum((0, 1))
    high_gradient = (upper_gradient - raw_gradient).sum((0, 1))
    return NLLGradient(loss, gradient, low_gradient, high_gradient)


def entropy_priority(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """``-log(sqrt(2 pi) pi(a|s) sigma)`` [B], averaged over an action's dimensions.

    Source: Zhang 2022, eq. 3.7 and theorem 3.2.1: where it is greatest, the action adds most to the entropy
    of a set of states and actions whose conditional distribution is the Gaussian pi. For one dimension it is
    ``z^2 / 2``, at least 0, where z is the standardised action. With a diagonal covariance the dimensions
    add up; their mean differs from this sum by a constant factor, on which eq. 3.6 does not depend.

    Args:
        action, mean, log_std: [B, D].

    Raises:
        ValueError: on a wrong rank or shape.
    """
    check_rank(2, action=action)
    check_shape(action.shape, "action", mean=mean, log_std=log_std)
    return ((action - mean) * torch.exp(-log_std)).square().mean(-1) / 2
