"""Training returns of all replicas together, as ``stop_at_return`` takes them.

The mean of each replica's last 100 episodes would be one of 100 n episodes with n replicas, and lag the more
the larger n is: runs with different numbers of replicas could not be compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.record.runs import Axis, RecordedRun

Array = NDArray[np.float64]
WINDOW = 100  # episodes of all replicas


def pooled_returns(run: RecordedRun, axis: Axis, *, full: bool = False) -> tuple[Array, Array] | None:
    """(x [K], mean return of the last ``WINDOW`` training episodes of all replicas together [K]), a point for
    each record with episodes; None if there are none.

    full: to tell whether a return was reached: episodes count in the order in which their records were
    written, as for ``stop_at_return``, and there are no points before ``WINDOW`` of them. Otherwise, for
    curves, the episodes of a record count as spread evenly over the time since the replica's record before
    it: the last hundred written may all be of one replica. A folder whose records have no episodes (one of
    ``thin_run.py``) has the mean of ``return_mean`` over the replicas instead.
    """
    times: list[float] = []
    counts: list[int] = []  # of the episodes that ended up to each of these times
    means: list[float | None] = []
    values: list[float] = []
    ended_at: list[Array] = []
    previous: dict[Any, float] = {}  # time of each replica's last record
    for record in run.records:
        time, replica = float(record["time_seconds"]), record.get("replica")
        ended = [pair[0] for pair in record.get("episode_returns") or () if pair[0] is not None]
        values += ended
        ended_at.append(np.linspace(previous.get(replica, 0.0), time, len(ended) + 1)[1:])
        previous[replica] = time
        # a simulated run's records are of all replicas already, and may lack some episodes
        mean = record.get("return_mean") if run.virtual else None
        if ended and (not run.virtual or mean is not None):
            times.append(time)
            counts.append(len(values))
            means.append(mean)
    if not times:
        return run.mean("return_mean", axis)
    seconds, ends, returns = np.array(times), np.array(counts), np.array(values, dtype=np.float64)
    if run.virtual:
        y = np.array(means, dtype=np.float64)
    else:
        if not full:
            in_order = np.concatenate(ended_at)
            order = np.argsort(in_order, kind="stable")
            seconds, returns = np.unique(seconds), returns[order]
            ends = np.searchsorted(in_order[order], seconds, side="right")
        sums, begins = np.cumsum([0.0, *returns]), np.maximum(ends - WINDOW, 0)
        y = (sums[ends] - sums[begins]) / (ends - begins)
    along = {"total_env_steps": run.total_env_steps, "total_bytes": run.total_bytes}
    x = along[axis](seconds) if axis in along else seconds
    kept = ends >= (WINDOW if full else 1)
    return (x[kept], y[kept]) if kept.any() else None
