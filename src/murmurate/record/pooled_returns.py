"""Training returns of all replicas together, as ``stop_at_return`` takes them.

The mean of each replica's last 100 episodes would be one of 100 n episodes with n replicas, and lag the more
the larger n is: runs with different numbers of replicas could not be compared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from murmurate.record.runs import Axis, RecordedRun

Array = NDArray[np.float64]
WINDOW = 100  # episodes of all replicas


def pooled_returns(run: RecordedRun, axis: Axis, *, full: bool = False) -> tuple[Array, Array] | None:
    """(x [K], mean return of the last ``WINDOW`` training episodes of all replicas together [K]), a point for
    each record with episodes; None if there are none.

    full: without the points before ``WINDOW`` episodes had ended, else the mean of all until then. Episodes
    count in the order in which their records were written. A folder whose records have no episodes (one of
    ``thin_run.py``) has the mean of ``return_mean`` over the replicas instead.
    """
    times: list[float] = []
    counts: list[int] = []  # of the episodes that ended up to each of these times
    means: list[float | None] = []
    values: list[float] = []
    for record in run.records:
        ended = [pair[0] for pair in record.get("episode_returns") or () if pair[0] is not None]
        values += ended
        # a simulated run's records are of all replicas already, and may lack some episodes
        mean = record.get("return_mean") if run.virtual else None
        if ended and (not run.virtual or mean is not None):
            times.append(float(record["time_seconds"]))
            counts.append(len(values))
            means.append(mean)
    if not times:
        return run.mean("return_mean", axis)
    ends = np.array(counts)
    if run.virtual:
        y = np.array(means, dtype=np.float64)
    else:
        sums, begins = np.cumsum([0.0, *values]), np.maximum(ends - WINDOW, 0)
        y = (sums[ends] - sums[begins]) / (ends - begins)
    seconds = np.array(times)
    along = {"total_env_steps": run.total_env_steps, "total_bytes": run.total_bytes}
    x = along[axis](seconds) if axis in along else seconds
    kept = ends >= (WINDOW if full else 1)
    return (x[kept], y[kept]) if kept.any() else None
