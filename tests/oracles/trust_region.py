"""Slow oracles of TRPO and PPO: one step at a time, and divergences enumerated or integrated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracles.policy import gaussian_density


def categorical_kl(p: Sequence[float], q: Sequence[float]) -> float:
    """D_KL(p || q) = sum_a p(a) log (p(a) / q(a)), where 0 log 0 = 0."""
    return sum(pa * math.log(pa / qa) for pa, qa in zip(p, q, strict=True) if pa > 0)


def gaussian_kl(
    mean_p: Sequence[float],
    std_p: Sequence[float],
    mean_q: Sequence[float],
    std_q: Sequence[float],
    points: int = 4001,
) -> float:
    """integral p log (p / q) by the trapezoid rule over 8 of p's standard deviations, summed over d."""
    total = 0.0
    for mp, sp, mq, sq in zip(mean_p, std_p, mean_q, std_q, strict=True):
        step = 16 * sp / (points - 1)
        for i in range(points):
            x = [mp - 8 * sp + i * step]
            p, q = gaussian_density(x, [mp], [sp]), gaussian_density(x, [mq], [sq])
            if p > 0:
                total += p * math.log(p / q) * step
    return total


def l_clip(pi: Sequence[float], pi_old: Sequence[float], a_hat: Sequence[float], epsilon: float) -> float:
    """L^CLIP = E_t[min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon) A_t)] (PPO, eq. 7)."""
    total = 0.0
    for new, old, a in zip(pi, pi_old, a_hat, strict=True):
        r = new / old
        total += min(r * a, min(max(r, 1 - epsilon), 1 + epsilon) * a)
    return total / len(pi)


def l_cpi(pi: Sequence[float], pi_old: Sequence[float], a_hat: Sequence[float]) -> float:
    """L^CPI = E_t[r_t A_t] (PPO, eq. 6)."""
    return sum(new / old * a for new, old, a in zip(pi, pi_old, a_hat, strict=True)) / len(pi)
