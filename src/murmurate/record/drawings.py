"""The figures of a comparison, the histogram of staleness and the strips of a timeline."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from murmurate.record.figures import (
    DASHES,
    RUN_COLOURS,
    Draw,
    Palette,
    axis_label,
    short,
    thin,
    tidy,
    time_unit,
)
from murmurate.record.groups import Curve, Group
from murmurate.record.runs import Axis
from murmurate.record.step_timer import KINDS
from murmurate.record.strips import Span, Window

EXACT_BARS = 48
_ROW = 0.78
_LABEL = 36  # characters that leave room for the bars
# Waiting is a thin line, so that not only its colour distinguishes it from work.
_HEIGHTS = {"collect": _ROW, "learn": _ROW, "exchange": _ROW, "wait": 0.22}


def lines(groups: Sequence[Group], key: str, axis: Axis, label: str, *, log_y: bool = False) -> Draw:
    """``key`` along ``axis``: each group's mean over its runs, and a band from their lowest to their highest.

    Bytes are drawn on a logarithmic axis: strategies differ in them by orders of magnitude.
    """

    def draw(axes: Axes, palette: Palette) -> None:
        curves = {g.index: c for g in groups if (c := g.curve(key, axis)) is not None}
        divisor, unit = 1.0, ""
        if axis == "time_seconds":
            divisor, unit = time_unit(max(float(c.x[-1]) for c in curves.values()))
        for group in groups:
            if group.index in curves:
                _line(axes, palette, group, curves[group.index], divisor)
        virtual = all(run.virtual for group in groups for run in group.runs)
        counted = groups[0].runs[0].unit
        tidy(axes, palette, label, axis_label(axis, unit, virtual=virtual, counted=counted))
        if axis == "total_bytes":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: size(value)))
            axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
            axes.yaxis.set_major_formatter(ticker.LogFormatterSciNotation())

    return draw


def _line(axes: Axes, palette: Palette, group: Group, curve: Curve, divisor: float) -> None:
    colour = palette.runs[group.index % RUN_COLOURS]
    dashes = DASHES[group.index // RUN_COLOURS % len(DASHES)]
    if len(group.runs) > 1:
        low, high = thin(curve.x / divisor, curve.low), thin(curve.x / divisor, curve.high)
        axes.fill_between(low[0], low[1], high[1], color=colour, alpha=0.13, linewidth=0)
    x, y = thin(curve.x / divisor, curve.mean)
    axes.plot(x, y, color=colour, linewidth=1.7, linestyle=dashes, solid_capstyle="round")


def size(value: float) -> str:
    """A tick's number of bytes: 512 B, 20 kB, 3 MB."""
    for unit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {suffix}"
    return f"{value:.3g} B"


def histogram(counts: Counter[int], largest: int, colour: int | None, title: str) -> Draw:
    """Share of updates by staleness, up to ``largest``: exact, or in classes that double every other time."""

    def draw(axes: Axes, palette: Palette) -> None:
        edges = classes(largest)
        total = counts.total()
        share = [
            sum(count for value, count in counts.items() if low <= value < high) / total
            for low, high in itertools.pairwise(edges)
        ]
        face = palette.accent if colour is None else palette.runs[colour % RUN_COLOURS]
        axes.bar(range(len(share)), share, width=0.8, color=face, linewidth=0)
        tidy(axes, palette, title, "staleness (own updates)")
        axes.set_xlim(-0.7, max(len(share), 4) - 0.3)
        axes.set_ylim(0, 1.0)
        shown = range(0, len(share), 1 + len(share) // 9)
        axes.xaxis.set_major_locator(ticker.FixedLocator(list(shown)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda at, _: _class(edges, round(at))))
        axes.yaxis.set_major_locator(ticker.FixedLocator([0, 0.25, 0.5, 0.75, 1.0]))
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))

    return draw


def classes(largest: int) -> list[int]:
    """Lower edges of the bars, and the end of the last."""
    if largest < EXACT_BARS:
        return list(range(largest + 2))
    edges = [0, 1, 2, 3, 4]
    while edges[-1] <= largest:
        edges.append(edges[-1] + edges[-1] // (2 if edges[-1] & (edges[-1] - 1) == 0 else 3))
    return edges


def _class(edges: Sequence[int], index: int) -> str:
    if not 0 <= index < len(edges) - 1:
        return ""
    low, high = edges[index], edges[index + 1] - 1
    return short(low) if low == high else f"{short(low)}\N{EN DASH}{short(high)}"


def stacked(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Draw:
    """A bar a row: the shares of the kinds of time, one after another; what lacks to 100% is other things."""

    def draw(axes: Axes, palette: Palette) -> None:
        for row, (_, shares) in enumerate(rows):
            left = 0.0
            for kind in KINDS:
                width = shares[kind]
                axes.barh(row, width, left=left, height=0.66, color=getattr(palette, kind), linewidth=0)
                left += width
            text = f"{shares['wait']:.1%} waiting, {shares['exchange']:.1%} exchanging"
            axes.text(1.02, row, text, va="center", color=palette.ink, fontsize="small", clip_on=False)
        tidy(axes, palette, "", "share of the replicas' time, sampled in bursts")
        axes.set(xlim=(0, 1.36), ylim=(len(rows) - 0.45, -0.55))
        axes.grid(visible=False)
        names = [
            name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}\N{HORIZONTAL ELLIPSIS}"
            for name, _ in rows
        ]
        axes.set_yticks(range(len(rows)), names)
        axes.yaxis.set_major_formatter(ticker.FixedFormatter(names))
        axes.tick_params(axis="y", labelcolor=palette.ink)
        axes.xaxis.set_major_locator(ticker.FixedLocator([0, 0.25, 0.5, 0.75, 1.0]))
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
        axes.spines["bottom"].set_bounds(0, 1)

    return draw


def strips(found: Window, title: str, *, virtual: bool = False) -> Draw:
    """A strip a member: what it did from the beginning of the window to its end."""

    def draw(axes: Axes, palette: Palette) -> None:
        unit, name = (
            (1e-3, "milliseconds") if found.end_seconds - found.start_seconds < 2 else (1.0, "seconds")
        )
        if found.end_seconds - found.start_seconds < 2e-3:
            unit, name = 1e-6, "microseconds"
        for row, spans in enumerate(found.members.values()):
            for kind in KINDS:
                boxes = [_box(span, found.start_seconds, unit, row) for span in spans if span.kind == kind]
                if boxes:
                    shape = Path.make_compound_path(*boxes)
                    axes.add_patch(PathPatch(shape, facecolor=getattr(palette, kind), linewidth=0))
        clock = "virtual" if virtual else "wall"
        after = f"{name} after {found.start_seconds:.3f} s of {clock} time"
        tidy(axes, palette, title, after)
        axes.grid(visible=False)
        axes.set_xlim(0, (found.end_seconds - found.start_seconds) / unit)
        axes.set_ylim(len(found.members) - 0.45, -0.55)
        axes.yaxis.set_major_locator(ticker.FixedLocator(list(range(len(found.members)))))
        axes.yaxis.set_major_formatter(ticker.FixedFormatter(list(found.members)))
        axes.tick_params(axis="y", labelcolor=palette.ink)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(10, steps=[1, 2, 5, 10]))

    return draw


def _box(span: Span, origin: float, unit: float, row: int) -> Path:
    left, right = (span.start - origin) / unit, (span.end - origin) / unit
    half = _HEIGHTS[span.kind] / 2
    corners = np.array(
        [(left, row - half), (right, row - half), (right, row + half), (left, row + half), (left, row - half)]
    )
    return Path(corners, closed=True)
