"""Slow oracles of action distributions: probabilities enumerated or integrated, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence


def categorical(logits: Sequence[float]) -> list[float]:
    """pi(a) = exp(z_a) / sum_b exp(z_b)."""
    largest = max(logits)
    weights = [math.exp(z - largest) for z in logits]
    return [w / sum(weights) for w in weights]


def entropy(probabilities: Sequence[float]) -> float:
    """H = -sum_a pi(a) log pi(a), where 0 log 0 = 0."""
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def gaussian_density(action: Sequence[float], mean: Sequence[float], std: Sequence[float]) -> float:
    """prod_d exp(-(a_d - mu_d)^2 / (2 sigma_d^2)) / (sigma_d sqrt(2 pi))."""
    density = 1.0
    for a, mu, sigma in zip(action, mean, std, strict=True):
        density *= math.exp(-((a - mu) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    return density


def gaussian_entropy(std: Sequence[float], points: int = 4001) -> float:
    """-integral p log p, by the trapezoid rule over 12 standard deviations each side, summed over d."""
    total = 0.0
    for sigma in std:
        step = 24 * sigma / (points - 1)
        for i in range(points):
            p = gaussian_density([-12 * sigma + i * step], [0.0], [sigma])
            total -= p * math.log(p) * step
    return total
