"""Policy gradients, and the log-probabilities and entropies of the two usual action distributions.

Logits may be ``-inf`` for forbidden actions: these have probability 0, contribute nothing to the entropy and
get no gradient. Every function raises ``ValueError`` on a wrong rank or shape.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def policy_gradient(log_prob_t: Tensor, advantage_t: Tensor) -> Tensor:
    """The policy-gradient loss ``-mean(log pi(a_t|s_t) * A_t)``.

    Source: Williams 1992 (REINFORCE with a baseline); Mnih et al. 2016, section 4.
    Differs: the mean over steps and simulators, where the paper sums.

    Args:
        log_prob_t: log pi(a_t | s_t) [T, B].
        advantage_t: A_t [T, B]; a constant here, no gradient flows into it.
    """
    check_rank(2, log_prob_t=log_prob_t)
    check_shape(log_prob_t.shape, "log_prob_t", advantage_t=advantage_t)
    return -(log_prob_t * advantage_t.detach()).mean()


def categorical_log_prob_and_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """``log pi(a)`` and ``H = -sum_a pi(a) log pi(a)`` of a categorical distribution, from one normalisation.

    Args:
        logits: unnormalised log-probabilities [..., A].
        action: the actions taken [...], int64.

    Returns:
        log pi(a) [...] and H [...] in nats, between 0 and log A.
    """
    check_shape(logits.shape[:-1], "logits without its last dimension", action=action)
    log_pi = logits.log_softmax(-1)
    # The clamp makes 0 * -inf equal to its limit, 0, in the value and in the gradient.
    finite = log_pi.clamp(min=torch.finfo(log_pi.dtype).min)
    return log_pi.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_pi.exp() * finite).sum(-1)


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian: the sum over D of independent normal log-densities.

    Args:
        mean: mu [..., D].
        log_std: log sigma, [D] or [..., D].
        action: a [..., D].

    Returns:
        [...].
    """
    _check_gaussian(mean, log_std)
    check_shape(mean.shape, "mean", action=action)
    z = (action - mean) * torch.exp(-log_std)
    return -(0.5 * z.square() + log_std + _HALF_LOG_2PI).sum(-1)


def gaussian_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Differential entropy of a diagonal Gaussian, ``sum_d (1/2 + 1/2 log 2 pi + log sigma_d)``, in nats.

    Args:
        mean: mu [..., D]; only its shape matters.
        log_std: log sigma, [D] or [..., D].

    Returns:
        [...].
    """
    _check_gaussian(mean, log_std)
    return (log_std + (0.5 + _HALF_LOG_2PI)).sum(-1).expand(mean.shape[:-1])


def _check_gaussian(mean: Tensor, log_std: Tensor) -> None:
    if mean.dim() < 1:
        raise ValueError("mean must be shaped [..., D], but it is a scalar")
    # comparing shapes of different numbers of dimensions would make an export fix the batch size
    if log_std.shape != (mean.shape[-1:] if log_std.dim() == 1 else mean.shape):
        raise ValueError(
            f"log_std must be shaped {list(mean.shape[-1:])} or {list(mean.shape)} to go with mean, "
            f"but it is {list(log_std.shape)}"
        )
