"""The curves of a comparison as numbers, run by run: for figures and statistics of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from murmurate.record.groups import RunGroup, exchanges
from murmurate.record.runs import Axis

_METRICS = ("return_mean", "success_rate", "env_steps_per_second", "disagreement")


def curve_numbers(groups: Sequence[RunGroup], more: Sequence[str] = ()) -> dict[str, Any]:
    """Of each metric that the page draws, ``more`` among them, along each axis, the "curves" of each group;
    the "evaluations" of each run that was evaluated while it learned."""
    first = groups[0].runs[0]
    metrics = dict.fromkeys((*_METRICS, *(curve["metric"] for curve in first.curves), *more))
    curves = [
        {
            "group": group.label,
            "metric": metric,
            "axis": axis,
            "folders": [str(run.folder) for run in curve.runs],
            "x": curve.x.tolist(),
            "y": curve.y.tolist(),
        }
        for metric in metrics
        for axis in get_args(Axis)
        for group in groups
        if axis != "total_bytes" or any(map(exchanges, group.runs))
        if (curve := group.curve(metric, axis)) is not None
    ]
    evaluations = [
        {
            "group": group.label,
            "metric": run.run["headline"]["metric"],
            "folder": str(run.folder),
            "total_env_steps": evaluated.env_steps.tolist(),
            "time_seconds": evaluated.time_seconds.tolist(),
            "mean": evaluated.mean.tolist(),
            "stderr": evaluated.error.tolist(),
        }
        for group in groups
        for run in group.runs
        if (evaluated := run.evaluations) is not None
    ]
    return {"curves": curves, "evaluations": evaluations}
