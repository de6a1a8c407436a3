"""Kullback-Leibler divergences ``KL(p || q)`` between policies, in nats."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.losses.checks import check_shape


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """``sum_a p(a) (log p(a) - log q(a))`` of categorical distributions.

    Source: Schulman et al. 2015 (TRPO), section 3, with p the old policy. An action that p never takes
    contributes 0, whatever its probability under q.

    Args:
        logits_p: unnormalised log-probabilities [..., A]; ``-inf`` for forbidden actions.
        logits_q: likewise [..., A].

    Returns:
        [...], at least 0; infinite where q forbids an action that p takes.
    """
    check_shape(logits_p.shape, "logits_p", logits_q=logits_q)
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    never = log_p == -torch.inf
    # both arguments are masked, so that neither the value nor the gradient becomes 0 * inf
    difference = log_p.masked_fill(never, 0.0) - log_q.masked_fill(never, 0.0)
    return (log_p.exp() * difference).sum(-1)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """KL divergence of diagonal Gaussians:
    ``sum_d (log sigma_q - log sigma_p + (sigma_p^2 + (mu_p - mu_q)^2) / (2 sigma_q^2) - 1/2)``.

    Source: Schulman et al. 2015 (TRPO), section 3, with p the old policy.

    Args:
        mean_p, log_std_p, mean_q, log_std_q: [..., D] each.

    Returns:
        [...], at least 0 up to rounding.
    """
    check_shape(mean_p.shape, "mean_p", log_std_p=log_std_p, mean_q=mean_q, log_std_q=log_std_q)
    if mean_p.dim() < 1:
        raise ValueError("mean_p must be shaped [..., D], but it is a scalar")
    log_ratio = log_std_q - log_std_p
    # the terms without means; expm1, because policies that are close to each other have log ratios near 0
    spread = 0.5 * torch.expm1(-2.0 * log_ratio) + log_ratio
    return (spread + 0.5 * ((mean_p - mean_q) * torch.exp(-log_std_q)).square()).sum(-1)
