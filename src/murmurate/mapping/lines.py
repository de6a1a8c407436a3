"""Fits t = a + b n to measured times, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES, _CONFIDENCE = 400, 0.95


@dataclass(frozen=True)
class Line:
    """Seconds of a call of size n: a + b n.

    low, high: lower and upper bounds of the 95 % confidence intervals of (a, b). sizes: the least and the
    greatest size that was measured. width: half the width of the 95 % confidence interval of the seconds at
    the greatest size, relative to them; None in profiles before 2026-11-26.
    """

    a: float
    b: float
    low: tuple[float, float]
    high: tuple[float, float]
    sizes: tuple[int, int]
    width: float | None = None

    def seconds(self, size: float) -> float:
        return max(0.0, self.a + self.b * size)


def fit(samples: Sequence[tuple[int, float]]) -> Line:
    """The line through samples (size, seconds), each of them the mean of a window of calls.

    Relative errors are minimised, so that small sizes count as much as large ones; neither a nor b may be
    negative. Confidence intervals come from bootstrap resamples within each size.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("a line needs at least one sample")
    sizes = np.array([float(n) for n, _ in samples])
    seconds = np.array([max(t, 1e-9) for _, t in samples])
    best = _least_squares(sizes, seconds)
    generator = np.random.default_rng(0)
    groups = [np.flatnonzero(sizes == n) for n in np.unique(sizes)]
    drawn = []
    for _ in range(_RESAMPLES):
        chosen = np.concatenate([generator.choice(group, len(group)) for group in groups])
        drawn.append(_least_squares(sizes[chosen], seconds[chosen]))
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(np.array(drawn), [tail, 100 - tail], axis=0)
    # a and b are anti-correlated, so their sum has a narrower interval than their two intervals together
    largest = float(sizes.max())
    least, greatest = np.percentile([a + b * largest for a, b in drawn], [tail, 100 - tail])
    return Line(
        float(best[0]),
        float(best[1]),
        (float(low[0]), float(low[1])),
        (float(high[0]), float(high[1])),
        (int(sizes.min()), int(sizes.max())),
        float(greatest - least) / (2 * (best[0] + best[1] * largest)),
    )


def _least_squares(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(a, b), both at least 0, with the least sum of squared relative errors."""
    weights = 1.0 / seconds
    constant = float(np.sum(weights) / np.sum(weights**2))  # the best a if b is 0
    if np.ptp(sizes) == 0:
        return constant, 0.0
    design = np.stack([weights, sizes * weights], axis=1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)
    if a >= 0 and b >= 0:
        return float(a), float(b)
    through_zero = float(np.sum(sizes * weights) / np.sum((sizes * weights) ** 2))
    candidates = ((constant, 0.0), (0.0, through_zero))
    return min(candidates, key=lambda ab: float(np.sum(((ab[0] + ab[1] * sizes) * weights - 1) ** 2)))


def relative_width(line: Line) -> float:
    """``line.width``; where it was not kept, an upper bound of it, from the intervals of a and b."""
    if line.width is not None:
        return line.width
    size = line.sizes[1]
    seconds = line.seconds(size)
    if not seconds:
        return math.inf
    return ((line.high[0] - line.low[0]) + (line.high[1] - line.low[1]) * size) / (2 * seconds)
