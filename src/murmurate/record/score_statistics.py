"""Scores of several runs: interquartile means, bootstrap intervals and probabilities of improvement.

As Agarwal et al. 2021 (rliable) recommend, computed by SciPy (extra ``topics`` or ``tune``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import MissingExtra

RESAMPLES = 5_000
_MOST_NUMBERS = 1 << 22  # numbers of resampled scores, or of their pairs, at a time
Interval = tuple[float, float]
FEWEST_FOR_INTERVALS = 5  # bootstrap intervals of fewer runs are too narrow: of two, their least and greatest


@dataclass(frozen=True)
class Scores:
    """Statistics of the scores of several runs, one score each.

    runs: number of runs. stderr: standard error of the mean. iqm: mean of the middle half of the scores.
    mean_interval, iqm_interval: 95% bootstrap intervals of both means; None for one run, like ``stderr``.
    """

    runs: int
    mean: float
    stderr: float | None
    mean_interval: Interval | None
    iqm: float
    iqm_interval: Interval | None


def summarized(scores: Sequence[float]) -> Scores:
    """The statistics of ``scores``. Raises ValueError for no scores, MissingExtra without SciPy."""
    if not scores:
        raise ValueError("there are no scores")
    stats, values = _scipy_stats(), np.asarray(scores, np.float64)
    has_several = len(values) > 1
    return Scores(
        len(values),
        float(values.mean()),
        statistics.stdev(scores) / len(scores) ** 0.5 if has_several else None,
        _interval([values], np.mean) if has_several else None,
        float(stats.trim_mean(values, 0.25)),
        _interval([values], lambda x, axis: stats.trim_mean(x, 0.25, axis=axis)) if has_several else None,
    )


def interquartile_mean(scores: Sequence[float]) -> dict[str, Any]:
    """``iqm`` of the scores and its ``interval`` (see ``Scores``) as JSON values; None where there is none,
    or the scores are too few for one. Raises MissingExtra without SciPy."""
    if not scores:
        return {"iqm": None, "interval": None}
    summary = summarized(scores)
    interval = summary.iqm_interval if len(scores) >= FEWEST_FOR_INTERVALS else None
    return {"iqm": summary.iqm, "interval": interval and list(interval)}


def probability_of_improvement(
    ours: Sequence[float], theirs: Sequence[float]
) -> tuple[float, Interval | None]:
    """P(X > Y) + P(X = Y) / 2 for X of ``ours`` and Y of ``theirs``, and its 95% bootstrap interval (None
    where either has only one score). Raises MissingExtra without SciPy."""
    x, y = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)

    def chance(a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1) -> Any:
        difference = np.expand_dims(a, -1) - np.expand_dims(b, -2)
        return (0.5 + 0.5 * np.sign(difference)).mean((-2, -1))

    return float(chance(x, y)), _interval([x, y], chance) if min(len(x), len(y)) > 1 else None


def available() -> bool:
    """Whether SciPy is installed."""
    try:
        _scipy_stats()
    except MissingExtra:
        return False
    return True


def _interval(samples: Sequence[NDArray[np.float64]], statistic: Any) -> Interval:
    """The 95% percentile interval of ``statistic``, each sample drawn anew with replacement."""
    result = _scipy_stats().bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        batch=max(1, min(500, _MOST_NUMBERS // math.prod(map(len, samples)))),
        vectorized=True,
        axis=-1,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return float(low), float(high)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtra("scipy", "topics", "an interquartile mean") from error
    return stats
