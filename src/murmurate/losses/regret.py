"""Regret matching and the regression targets of advantage-based regret minimization (ARM).

Source: Jin 2018, *Learning to Navigate in Visual Environments*, chapter 2 (equations 2.x below).
"""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.losses.checks import check_bool, check_rank, check_shape


def regret_matching(advantage: Tensor, legal: Tensor | None = None) -> Tensor:
    """The policy in proportion to the positive part of each action's cumulative advantage.

    Source: eq. 2.10. It is uniform where no action's advantage is positive, which eq. 2.10 leaves open (as
    in CFR: Zinkevich et al. 2007, eq. 8).

    Args:
        advantage: A+(o, .), the cumulative clipped advantages [..., A].
        legal: bool [..., A], whether an action may be chosen, at least one of each A; None: all may.

    Returns:
        Probabilities [..., A], without gradient.

    Raises:
        ValueError: if there is no action, or on a wrong shape.
    """
    if advantage.dim() < 1 or advantage.shape[-1] < 1:
        raise ValueError(f"advantage must be shaped [..., A], but it is {list(advantage.shape)}")
    with torch.no_grad():
        positive = advantage.clamp(min=0)
        uniform = torch.full_like(positive, 1.0 / advantage.shape[-1])
        if legal is not None:
            check_bool(legal=legal)
            check_shape(advantage.shape, "advantage", legal=legal)
            positive = positive * legal
            uniform = legal / legal.sum(-1, keepdim=True)
        total = positive.sum(-1, keepdim=True)
        return torch.where(total > 0, positive / total, uniform)


def importance_weights(pi_t: Tensor, mu_t: Tensor, *, clip: float) -> Tensor:
    """Truncated importance weights ``w = min(c, pi(a|o) / mu(a|o))``.

    Source: eq. 2.24.

    Args:
        pi_t: probabilities of the actions under the present policy [n, B].
        mu_t: probabilities with which they were chosen [n, B], above 0.
        clip: c, at least 0.

    Returns:
        w [n, B], without gradient.

    Raises:
        ValueError: on a wrong rank, shape or clip.
    """
    check_rank(2, pi_t=pi_t)
    check_shape(pi_t.shape, "pi_t", mu_t=mu_t)
    if not clip >= 0:  # also NaN
        raise ValueError(f"clip must be at least 0, but it is {clip}")
    return (pi_t / mu_t).clamp(max=clip).detach()


def sequence_returns(
    r_t: Tensor,
    length: Tensor,
    terminated: Tensor,
    last_value: Tensor,
    w_t: Tensor | None = None,
    *,
    discount: float,
) -> Tensor:
    """n-step returns g of B sequences, each with its own number of steps.

    ``g = sum_{i < m} discount^i (w_0 .. w_i) r_i + discount^m (1 - terminated) V'(o_m)``. Source: eq. 2.23,
    with delta of Algorithm 1; without weights, the return of eq. 2.11. Differs: a sequence ends after
    m <= n steps where its episode or the data do.

    Args:
        r_t: rewards [n, B].
        length: m, int64 [B], from 1 to n; later rewards and weights are ignored.
        terminated: bool [B]: the task ended with step m.
        last_value: V' of the observation after step m [B].
        w_t: importance weights [n, B]; None: 1.
        discount: per step, in [0, 1].

    Returns:
        g [B], without gradient.

    Raises:
        ValueError: on a wrong rank, shape, dtype or discount.
    """
    check_rank(2, r_t=r_t)
    check_shape(r_t.shape[1:], "a row of r_t", length=length, terminated=terminated, last_value=last_value)
    check_bool(terminated=terminated)
    if w_t is not None:
        check_shape(r_t.shape, "r_t", w_t=w_t)
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount must be in [0, 1], but it is {discount}")
    with torch.no_grad():
        power = torch.arange(len(r_t), device=r_t.device, dtype=r_t.dtype)[:, None]
        weighted = r_t if w_t is None else r_t * w_t.cumprod(0)
        discounted = (discount**power * weighted).masked_fill(power >= length, 0.0).sum(0)
        return discounted + (discount ** length.to(r_t.dtype) * last_value).masked_fill(terminated, 0.0)


def cumulative_target(
    g_t: Tensor, advantage_tm1: Tensor, r_t: Tensor | None = None, w_t: Tensor | None = None
) -> Tensor:
    """Targets ``q+ = max(0, phi) + q`` of the cumulative clipped action value Q+.

    Source: eq. 2.12-2.14. There q = r + discount g^{n-1}, which is the return g itself. With importance
    weights q = (1 - w) r + g (eq. 2.26): the chosen action's own reward counts in full.

    Args:
        g_t: returns [B] (``sequence_returns``).
        advantage_tm1: phi, the cumulative advantage A+ of the previous iteration for the chosen action [B].
        r_t: first reward of each sequence [B]; read only with w_t, which needs it.
        w_t: importance weight of each sequence's first step [B]; None: 1.

    Returns:
        q+ [B], without gradient.

    Raises:
        ValueError: on a wrong rank or shape, or for weights without rewards.
    """
    check_rank(1, g_t=g_t)
    check_shape(g_t.shape, "g_t", advantage_tm1=advantage_tm1)
    bonus = advantage_tm1.detach().clamp(min=0)
    if w_t is None:
        return bonus + g_t.detach()
    if r_t is None:
        raise ValueError("importance weights w_t need the rewards r_t of the same steps")
    check_shape(g_t.shape, "g_t", r_t=r_t, w_t=w_t)
    return bonus + ((1 - w_t) * r_t + g_t).detach()
