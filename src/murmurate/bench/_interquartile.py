"""Interquartile means with stratified bootstrap intervals (Agarwal et al. 2021, rliable), by SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from murmurate.errors import MissingExtra

_RESAMPLES = 5_000


def interquartile_mean(scores: Sequence[Sequence[float]], *, seed: int = 0) -> dict[str, Any]:
    """The mean of the middle half of all scores, and its 95% interval by bootstrap.

    scores: of each task, one a seed; seeds are drawn anew within each task. ``interval`` is None where a task
    has one seed only. Raises MissingExtra without scipy.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtra("scipy", "topics", "an interquartile mean") from error
    pooled = np.concatenate([np.asarray(task, np.float64) for task in scores])
    result: dict[str, Any] = {"iqm": float(stats.trim_mean(pooled, 0.25)), "interval": None}
    if min(len(task) for task in scores) < 2:
        return result
    rng = np.random.default_rng(seed)
    drawn = np.concatenate(
        [rng.choice(np.asarray(task, np.float64), (_RESAMPLES, len(task))) for task in scores], axis=1
    )
    low, high = np.quantile(stats.trim_mean(drawn, 0.25, axis=1), [0.025, 0.975])
    return {**result, "interval": [float(low), float(high)]}
