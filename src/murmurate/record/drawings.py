"""The report's figures: each function here returns one that draws on matplotlib axes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from numpy.typing import NDArray

from murmurate.record.epsilon_ball import Ball
from murmurate.record.figures import (
    COLOURS,
    Draw,
    axis_label,
    byte_size,
    percent_axis,
    run_colour,
    run_dashes,
    style_axes,
    thinned,
    tick_text,
    time_unit,
)
from murmurate.record.groups import RunGroup, only_run
from murmurate.record.runs import Axis, RecordedRun
from murmurate.record.step_timer import KINDS
from murmurate.record.timelines import Timeline, TimelineSpan
from murmurate.record.window_bound import WindowBound

MOST_LINES = 32
EXACT_BARS = 48  # up to this staleness, each value has a bar of its own
_INTEGER_METRICS = frozenset({"staleness", "heard"})
_SPAN_HEIGHT = 0.78  # height of a span in a timeline whose rows are 1 apart
_MOST_LETTERS = 36  # of a row's label, so that room is left for the bars
# waiting is a thin line, so that more than its colour distinguishes it from work
_HEIGHT_BY_KIND = {"collect": _SPAN_HEIGHT, "learn": _SPAN_HEIGHT, "exchange": _SPAN_HEIGHT, "wait": 0.22}


def curves(
    groups: Sequence[RunGroup],
    key: str,
    axis: Axis,
    label: str,
    *,
    from_zero: bool = False,
    log_y: bool = False,
) -> Draw:
    """The metric ``key`` along ``axis``.

    For a single run, each replica is a thin line (at most ``MOST_LINES`` are drawn), which ends in a cross if
    the replica died, and their mean a bold one. For several runs, there is a line for each group's mean over
    its runs, and a band from the group's lowest to its highest run. Bytes have a logarithmic axis: strategies
    differ in them by orders of magnitude.
    """

    def draw(axes: Axes) -> None:
        runs = [run for group in groups for run in group.runs]
        series = [series for run in runs for series in run.series(key).values()]
        longest = max(float(each.time_seconds[-1]) for each in series)
        divisor, unit = time_unit(longest) if axis == "time_seconds" else (1.0, "")
        if (run := only_run(groups)) is not None:
            _replica_lines(axes, run, key, axis, COLOURS["accent"], divisor)
        else:
            for group in groups:
                _group_line(axes, group, key, axis, divisor)
        clocks = {"virtual" if run.virtual else "wall" for run in runs}
        style_axes(axes, label, axis_label(axis, unit, clocks=clocks, counted=runs[0].unit))
        if key in _INTEGER_METRICS:
            axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        if from_zero:
            axes.set_ylim(bottom=0, top=None if max(each.value.max() for each in series) > 0 else 1.0)
        if axis == "total_bytes":
            axes.set_xscale("log")
            plain_ticks(axes.xaxis, byte_size)
        if log_y:
            axes.set_yscale("log")
            plain_ticks(axes.yaxis, tick_text)

    return draw


def plain_ticks(axis: DrawnAxis, text: Callable[[float], str], most: float = 300.0) -> None:
    """Label a logarithmic axis with ``text`` instead of powers of ten; if its end is at most ``most`` times
    its beginning, it may hold few powers of ten, so also their double and fivefold values."""
    low, high = axis.get_view_interval()
    multiples = (1.0, 2.0, 5.0) if high <= most * low else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=multiples, numticks=8))
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def _replica_lines(axes: Axes, run: RecordedRun, key: str, axis: Axis, colour: str, divisor: float) -> None:
    series = run.series(key)
    chosen = np.linspace(0, len(series) - 1, min(len(series), MOST_LINES)).round().astype(int)
    for replica, points in [list(series.items())[i] for i in chosen]:
        x, y = thinned(points.x(axis) / divisor, points.value)
        width, alpha = (0.8, 0.35) if len(series) > 1 else (1.6, 1.0)
        axes.plot(x, y, color=colour, linewidth=width, alpha=alpha, solid_capstyle="round")
        if replica in run.deaths:
            axes.plot(x[-1], y[-1], "x", color=colour, markersize=5, markeredgewidth=1.4)
    mean = run.mean(key, axis)
    if len(series) > 1 and mean is not None:
        axes.plot(mean[0] / divisor, mean[1], color=colour, linewidth=1.9, solid_capstyle="round")


def _group_line(axes: Axes, group: RunGroup, key: str, axis: Axis, divisor: float) -> None:
    curve = group.curve(key, axis)
    if curve is None:
        return
    colour = run_colour(group.index)
    if len(group.runs) > 1:
        (x, low), (_, high) = thinned(curve.x / divisor, curve.low), thinned(curve.x / divisor, curve.high)
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    x, y = thinned(curve.x / divisor, curve.mean)
    axes.plot(x, y, color=colour, linewidth=1.7, linestyle=run_dashes(group.index), solid_capstyle="round")


def draw_ball(indicator: Ball) -> Draw:
    """The recorded distance from consensus; a band from the indicator just after a mixing to just before."""

    def draw(axes: Axes) -> None:
        x = indicator.total_env_steps
        axes.fill_between(
            x, indicator.after, indicator.before, color=COLOURS["warm"], alpha=0.18, linewidth=0
        )
        axes.plot(x, indicator.before, color=COLOURS["warm"], linewidth=1.0, linestyle=(0, (4, 2)))
        axes.plot(x, indicator.recorded, color=COLOURS["accent"], linewidth=1.7)
        label = "distance from consensus ‖X − mean‖ (Frobenius)"
        style_axes(axes, label, axis_label("total_env_steps", ""))
        axes.set_ylim(bottom=0)

    return draw


def draw_windows(comparisons: Sequence[WindowBound]) -> Draw:
    """The distance of each comparison and, above it, the bound of Proposition 1, joined by a line."""

    def draw(axes: Axes) -> None:
        x = [each.total_env_steps for each in comparisons]
        distance, bound = ([getattr(each, name) for each in comparisons] for name in ("distance", "bound"))
        axes.vlines(x, distance, bound, color=COLOURS["rule"], linewidth=1.2)
        axes.plot(x, bound, "_", color=COLOURS["warm"], markersize=9, markeredgewidth=1.8)
        axes.plot(x, distance, "o", color=COLOURS["accent"], markersize=4)
        axes.set_yscale("log")
        label = "distance from consensus ‖X − mean‖ (Frobenius)"
        style_axes(axes, label, axis_label("total_env_steps", ""))
        plain_ticks(axes.yaxis, tick_text)
        axes.set_xlim(left=0)

    return draw


def heat_map(matrix: NDArray[np.float64], peers: NDArray[np.bool_] | None) -> Draw:
    """Cosines [n, n] (nan: unknown), larger ones in a deeper colour.

    The scale ends at the largest cosine of two replicas, but not below 0.1, so that mere noise stays pale.
    peers: pairs [n, n] to mark.
    """

    def draw(axes: Axes) -> None:
        size = len(matrix)
        top = max(float(np.nanmax(np.abs(matrix[~np.eye(size, dtype=bool)]))), 0.1)
        for (i, j), value in np.ndenumerate(matrix):
            face, alpha = (
                COLOURS["accent"] if value >= 0 else COLOURS["warm"],
                0.06 + 0.54 * min(1, abs(value) / top),
            )
            if i == j or np.isnan(value):
                face, alpha = COLOURS["rule"], 0.6 if i == j else 0.15
            corner = (j - 0.48, i - 0.48)
            axes.add_patch(Rectangle(corner, 0.96, 0.96, facecolor=face, alpha=alpha, linewidth=0))
            if size <= 10:
                text = "?" if np.isnan(value) else f"{round(value, 2) + 0.0:.2f}"
                axes.text(j, i - 0.04, text, ha="center", va="center", color=COLOURS["ink"], fontsize=10)
                if peers is not None and peers[i, j]:
                    axes.text(j, i + 0.28, "peer", ha="center", va="center", fontsize=8, color=COLOURS["ink"])
        axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        axes.set_xlabel("gradient of replica", color=COLOURS["muted"])
        axes.set_ylabel("gradient of replica", color=COLOURS["muted"])
        axes.tick_params(length=0, colors=COLOURS["muted"])
        axes.spines[:].set_visible(False)

    return draw


def histogram(counts: Counter[int], largest: int, colour: int | None, title: str) -> Draw:
    """Share of updates by staleness, up to ``largest``: a bar for each value, or for classes that widen.

    colour: index of a group, which selects its colour; None for a single run.
    """

    def draw(axes: Axes) -> None:
        edges = classes(largest)
        share = [
            sum(count for value, count in counts.items() if low <= value < high) / counts.total()
            for low, high in itertools.pairwise(edges)
        ]
        face = COLOURS["accent"] if colour is None else run_colour(colour)
        axes.bar(range(len(share)), share, width=0.8, color=face, linewidth=0)
        style_axes(axes, title, "staleness (own updates)")
        axes.set(xlim=(-0.7, max(len(share), 4) - 0.3), ylim=(0, 1.0))
        ticks = range(0, len(share), 1 + len(share) // 9)
        axes.set_xticks(ticks, [_class_label(edges[i], edges[i + 1] - 1) for i in ticks])
        percent_axis(axes.yaxis)

    return draw


def classes(largest: int) -> list[int]:
    """Lower edges of the bars, and the upper edge of the last."""
    if largest < EXACT_BARS:
        return list(range(largest + 2))
    edges = [0, 1, 2, 3, 4]  # then 6, 8, 12, 16, 24, ...: powers of two, and the middles between them
    while edges[-1] <= largest:
        edges.append(edges[-1] + edges[-1] // (2 if edges[-1] & (edges[-1] - 1) == 0 else 3))
    return edges


def _class_label(low: int, high: int) -> str:
    return tick_text(low) if low == high else f"{tick_text(low)}\N{EN DASH}{tick_text(high)}"


def stacked(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Draw:
    """A bar for each row: the shares of the kinds of time, end to end; the rest to 100% is other work."""

    def draw(axes: Axes) -> None:
        for row, (_, shares) in enumerate(rows):
            left = 0.0
            for kind in KINDS:
                axes.barh(row, shares[kind], left=left, height=0.66, color=COLOURS[kind], linewidth=0)
                left += shares[kind]
            text = f"{shares['wait']:.1%} waiting, {shares['exchange']:.1%} exchanging"
            axes.text(1.02, row, text, va="center", color=COLOURS["ink"], fontsize="small", clip_on=False)
        style_axes(axes, "", "share of the replicas' time")
        axes.set(xlim=(0, 1.36))
        names = [
            name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
            for name, _ in rows
        ]
        label_rows(axes, names)
        percent_axis(axes.xaxis)
        axes.spines["bottom"].set_bounds(0, 1)

    return draw


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """A row for each name, from top to bottom."""
    axes.grid(visible=False)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=COLOURS["ink"])


def timeline(shown: Timeline, title: str, *, virtual: bool = False) -> Draw:
    """A row for each member, with its spans in the window, coloured by kind."""

    def draw(axes: Axes) -> None:
        length = shown.end_seconds - shown.start_seconds
        unit, name = (1e-3, "milliseconds") if length < 2 else (1.0, "seconds")
        if length < 2e-3:
            unit, name = 1e-6, "microseconds"
        for row, spans in enumerate(shown.members.values()):
            for kind in KINDS:
                boxes = [_box(span, shown.start_seconds, unit, row) for span in spans if span.kind == kind]
                if boxes:
                    shape = Path.make_compound_path(*boxes)
                    axes.add_patch(PathPatch(shape, facecolor=COLOURS[kind], linewidth=0))
        clock = "virtual" if virtual else "wall"
        style_axes(axes, title, f"{name} after {shown.start_seconds:.3f} s of {clock} time")
        axes.set_xlim(0, length / unit)
        label_rows(axes, list(shown.members))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(10, steps=[1, 2, 5, 10]))

    return draw


def _box(span: TimelineSpan, origin: float, unit: float, row: int) -> Path:
    left, right = (span.start - origin) / unit, (span.end - origin) / unit
    low, high = row - _HEIGHT_BY_KIND[span.kind] / 2, row + _HEIGHT_BY_KIND[span.kind] / 2
    return Path([(left, low), (right, low), (right, high), (left, high), (left, low)], closed=True)
