"""Scores of several runs: interquartile means, bootstrap intervals and probabilities of improvement.

As Agarwal et al. 2021 (rliable) recommend, computed by SciPy (extra ``topics`` or ``tune``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import MissingExtra

RESAMPLES = 5_000
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


def interquartile_mean(scores: Sequence[Sequence[float]], *, seed: int = 0) -> dict[str, Any]:
    """The mean of the middle half of all scores, and its 95% interval by a stratified bootstrap.

    scores: for each task, a score for each seed; the bootstrap draws seeds anew within each task. In the
    result, ``interval`` is None where a task has only one seed. Raises MissingExtra without SciPy.
    """
    stats, tasks = _scipy_stats(), [np.asarray(task, np.float64) for task in scores]

    def iqm(*drawn: NDArray[np.float64], axis: int = 0) -> Any:
        return stats.trim_mean(np.concatenate(drawn, axis=axis), 0.25, axis=axis)

    interval = None if min(map(len, tasks)) < 2 else _interval(tasks, iqm, seed)
    return {"iqm": float(iqm(*tasks)), "interval": None if interval is None else list(interval)}


def probability_of_improvement(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0
) -> tuple[float, Interval | None]:
    """P(X > Y) + P(X = Y) / 2 for X of ``ours`` and Y of ``theirs``, and its 95% bootstrap interval (None
    where either has only one score). Raises MissingExtra without SciPy."""
    x, y = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)

    def chance(a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1) -> Any:
        difference = np.expand_dims(a, -1) - np.expand_dims(b, -2)
        return (0.5 + 0.5 * np.sign(difference)).mean((-2, -1))

    return float(chance(x, y)), _interval([x, y], chance, seed) if min(len(x), len(y)) > 1 else None


def available() -> bool:
    """Whether SciPy is installed."""
    try:
        _scipy_stats()
    except MissingExtra:
        return False
    return True


def _interval(samples: Sequence[NDArray[np.float64]], statistic: Any, seed: int = 0) -> Interval:
    """The 95% percentile interval of ``statistic``, each sample drawn anew with replacement."""
    result = _scipy_stats().bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        batch=500,
        vectorized=True,
        axis=-1,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return float(low), float(high)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtra("scipy", "topics", "an interquartile mean") from error
    return stats
