"""The figures of a study's page: functions that return a ``Draw``, which draws on matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from murmurate.record.drawings import label_rows, plain_ticks
from murmurate.record.figures import COLOURS, Draw, percent_axis, style_axes, tick_text
from murmurate.tuning.objective import Objective
from murmurate.tuning.space import Dimension


def short_word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def history(trials: Sequence[Any], objective: Objective) -> Draw:
    """The value of each finished trial by its number, the last value of each pruned one (a cross), and the
    best finished value so far."""

    def draw(axes: Axes) -> None:
        done = [trial for trial in trials if trial.state.name == "COMPLETE"]
        pruned = [trial for trial in trials if trial.state.name == "PRUNED" and trial.value is not None]
        axes.plot(
            [t.number for t in pruned], [t.value for t in pruned], "x", color=COLOURS["muted"], markersize=5
        )
        x, y = [t.number for t in done], np.array([t.value for t in done])
        axes.plot(x, y, "o", color=COLOURS["accent"], markersize=5, alpha=0.8)
        best = np.minimum.accumulate(y) if objective.minimize else np.maximum.accumulate(y)
        axes.step(x, best, color=COLOURS["warm"], linewidth=1.7, where="post")
        style_axes(axes, objective.name, "trial")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))

    return draw


def bars(rows: Sequence[tuple[str, float]]) -> Draw:
    """A bar for each (name, share), the first on top."""

    def draw(axes: Axes) -> None:
        for row, (_, share) in enumerate(rows):
            axes.barh(row, share, height=0.6, color=COLOURS["accent"], linewidth=0)
            axes.text(share + 0.01, row, f"{share:.0%}", va="center", color=COLOURS["ink"], fontsize="small")
        style_axes(axes, "", "share of the importance")
        label_rows(axes, [name for name, _ in rows])
        axes.set_xlim(0, 1.06)
        percent_axis(axes.xaxis)
        axes.spines["bottom"].set_bounds(0, 1)

    return draw


def slice_of(finished: Sequence[Any], objective: Objective, dimension: Dimension) -> Draw:
    """The objective against one field; a ring marks the best trial."""

    def draw(axes: Axes) -> None:
        values = [trial.params[dimension.name] for trial in finished]
        x = (
            [dimension.choices.index(value) for value in values]
            if dimension.choices
            else [float(v) for v in values]
        )
        y = [trial.value for trial in finished]
        axes.plot(x, y, "o", color=COLOURS["accent"], markersize=4.5, alpha=0.6)
        best = (np.argmin if objective.minimize else np.argmax)(y)
        axes.plot(
            x[best], y[best], "o", color=COLOURS["warm"], markersize=9, fillstyle="none", markeredgewidth=1.6
        )
        style_axes(axes, dimension.name, "")
        if dimension.choices:
            axes.set_xticks(range(len(dimension.choices)), dimension.choices)
            axes.set_xlim(-0.5, len(dimension.choices) - 0.5)
        elif dimension.log:
            axes.set_xscale("log")
            axes.set_xlim(dimension.low / 1.15, dimension.high * 1.15)
            plain_ticks(axes.xaxis, tick_text, most=40.0)  # the figure is narrow
        else:
            axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
            margin = 0.04 * (dimension.high - dimension.low)
            axes.set_xlim(dimension.low - margin, dimension.high + margin)

    return draw


def coordinates(finished: Sequence[Any], objective: Objective, space: Sequence[Dimension]) -> Draw:
    """An axis for each field, and one for the objective; a line for each trial, stronger the better it is."""

    def draw(axes: Axes) -> None:
        y = np.array([trial.value for trial in finished], dtype=float)
        order = y.argsort() if not objective.minimize else (-y).argsort()
        quality = np.empty(len(y))
        quality[order] = np.linspace(0, 1, len(y))
        low, high = float(y.min()), float(y.max())
        for i in order:  # the best is drawn last
            heights = [_height(dimension, finished[i].params[dimension.name]) for dimension in space]
            heights.append((y[i] - low) / (high - low) if high > low else 0.5)
            best = i == order[-1]
            axes.plot(
                range(len(heights)),
                heights,
                color=COLOURS["warm" if best else "accent"],
                linewidth=2.0 if best else 1.1,
                alpha=1.0 if best else 0.08 + 0.6 * float(quality[i]) ** 2,
            )
        names = [dimension.name.rpartition(".")[2] for dimension in space]
        style_axes(axes, "", "")
        axes.grid(visible=False)
        axes.set_xticks(range(len(space) + 1), [*names, objective.name])
        axes.tick_params(axis="x", labelcolor=COLOURS["ink"])
        axes.set(yticks=[], ylim=(-0.1, 1.1), xlim=(-0.25, len(space) + 0.4))
        axes.spines["bottom"].set_visible(False)
        for k, dimension in enumerate(space):
            axes.axvline(k, color=COLOURS["muted"], linewidth=0.8)
            for height, text in _ticks(dimension):
                axes.text(k + 0.03, height, text, va="center", color=COLOURS["muted"], fontsize="small")
        axes.axvline(len(space), color=COLOURS["muted"], linewidth=0.8)
        for height, value in ((0.0, low), (1.0, high)):
            text = tick_text(value)
            axes.text(len(space) + 0.03, height, text, va="center", color=COLOURS["muted"], fontsize="small")

    return draw


def _height(dimension: Dimension, value: Any) -> float:
    """Where a field's value is on its axis, from 0 to 1."""
    if dimension.choices:
        return (
            dimension.choices.index(value) / (len(dimension.choices) - 1)
            if len(dimension.choices) > 1
            else 0.5
        )
    low, high, at = (np.log(x) if dimension.log else x for x in (dimension.low, dimension.high, float(value)))
    return float((at - low) / (high - low))


def _ticks(dimension: Dimension) -> list[tuple[float, str]]:
    if dimension.choices:
        return [(_height(dimension, choice), choice) for choice in dimension.choices]
    return [(0.0, tick_text(dimension.low)), (1.0, tick_text(dimension.high))]
