"""The section of a report about evaluations that were made while the runs learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from murmurate.record.figures import (
    COLOURS,
    Draw,
    axis_label,
    run_colour,
    run_dashes,
    style_axes,
    svg,
    time_unit,
)
from murmurate.record.groups import RunGroup, only_run
from murmurate.record.runs import Axis, Evaluations
from murmurate.record.sections import TIME_AXES, LegendKey, Section, legend


def evaluations(groups: Sequence[RunGroup]) -> list[Section]:
    """The headline figure of each evaluation against env steps and time; empty if no run was evaluated."""
    evaluated = [group for group in groups if any(run.evaluations for run in group.runs)]
    if not evaluated:
        return []
    single = only_run(groups)
    evaluated_runs = [run for group in evaluated for run in group.runs if run.evaluations]
    curve = evaluated_runs[0].run["headline"]
    has_games = any(run.evaluations and run.evaluations.low is not None for run in evaluated_runs)
    text = "Each point evaluates the parameters of that moment; the band is the standard error"
    keys = legend(evaluated)
    if single:
        keys = [LegendKey("mean", "accent"), LegendKey("± standard error", "accent", "block")]
        if has_games:
            keys.append(LegendKey("lowest to highest game", "accent", "thin"))
    svgs = [
        svg(_draw(evaluated, axis, curve["label"]), name=f"evaluations by {axis}") for axis, _ in TIME_AXES
    ]
    return [Section(f"{curve['title']} while it learned", f"{curve['text']} {text}.".strip(), keys, svgs)]


def _draw(groups: Sequence[RunGroup], axis: Axis, label: str) -> Draw:
    single = only_run(groups)

    def draw(axes: Axes) -> None:
        runs = [run for group in groups for run in group.runs]
        longest = max(float(run.evaluations.time_seconds[-1]) for run in runs if run.evaluations)
        divisor, unit = time_unit(longest) if axis == "time_seconds" else (1.0, "")
        for group in groups:
            colour = COLOURS["accent"] if single else run_colour(group.index)
            dashes = run_dashes(group.index)
            for run in group.runs:
                if run.evaluations:
                    _line(axes, run.evaluations, axis, divisor, colour, dashes, with_games=single is not None)
        style_axes(axes, label, axis_label(axis, unit, counted=runs[0].unit))

    return draw


def _line(
    axes: Axes,
    points: Evaluations,
    axis: Axis,
    divisor: float,
    colour: str,
    dashes: Any,
    *,
    with_games: bool,
) -> None:
    x = (points.time_seconds if axis == "time_seconds" else points.env_steps) / divisor
    error = np.nan_to_num(points.error)
    axes.fill_between(x, points.mean - error, points.mean + error, color=colour, alpha=0.2, linewidth=0)
    if with_games and points.low is not None and points.high is not None:
        axes.vlines(x, points.low, points.high, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(x, points.mean, color=colour, linewidth=1.7, linestyle=dashes, marker="o", markersize=3.5)
