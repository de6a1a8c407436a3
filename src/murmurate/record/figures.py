"""The report's figures: one axes each, drawn by matplotlib without a display.

For the page they become inline SVG whose colours are CSS variables, so that they follow the page's
light or dark theme; ``curves.py`` draws the same axes into a PNG with fixed colours.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from murmurate.record.epsilon_ball import Ball
from murmurate.record.runs import Axis, RecordedRun

Array = NDArray[np.float64]
MAX_POINTS = 600
RUN_COLOURS = 6
# After all colours have been used once, lines come dashed; what is compared stays apart in print, too.
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.3, 1.5)), (0, (6, 1.6, 1.3, 1.6)))
MOST_LINES = 32
_WHOLE = frozenset({"staleness", "staleness_max", "heard", "rounds"})


@dataclass(frozen=True)
class Palette:
    """Colours of what is drawn; ``runs`` are cycled over what is compared.

    Both sets of run colours were searched for the largest least distance (CIELAB) of any two under
    protanopia, deuteranopia, tritanopia (Machado et al. 2009) and none, at a contrast of 2.9 and more with
    the page: at least 32, and 50 with normal sight.
    """

    ink: str
    muted: str
    rule: str
    accent: str
    warm: str
    runs: tuple[str, ...]
    collect: str
    learn: str
    exchange: str
    wait: str


PRINT = Palette(
    ink="#1c2326",
    muted="#4d585d",
    rule="#dfe5e6",
    accent="#17707c",
    warm="#b8562b",
    runs=("#0072b2", "#e27171", "#10401c", "#898900", "#6000ff", "#5d0052"),
    collect="#8cc1e6",
    learn="#14588c",
    exchange="#e59a00",
    wait="#b0312f",
)
# Colours nothing else uses, replaced by CSS variables once the SVG is written.
_MARKED = Palette(
    ink="#0a0b01",
    muted="#0a0b02",
    rule="#0a0b03",
    accent="#0a0b04",
    warm="#0a0b05",
    runs=tuple(f"#0a0c0{i}" for i in range(RUN_COLOURS)),
    collect="#0a0d01",
    learn="#0a0d02",
    exchange="#0a0d03",
    wait="#0a0d04",
)
_NAMED = ("ink", "muted", "rule", "accent", "warm", "collect", "learn", "exchange", "wait")
_VARIABLES = {
    **{getattr(_MARKED, name): f"var(--{name})" for name in _NAMED},
    **{colour: f"var(--run{i})" for i, colour in enumerate(_MARKED.runs)},
}

Draw = Callable[[Axes, Palette], None]


def svg(draw: Draw, width: float = 5.2, height: float = 2.9, name: str = "") -> str:
    """``draw`` on fresh axes of ``width`` x ``height`` inches, as an ``<svg>`` element for a page.

    ``name`` keeps the ids of several figures on one page apart, and is read out by screen readers.
    """
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 10}
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, _MARKED)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    text = re.sub(r'id="((?:figure|axes|patch|line2d|xtick|ytick|text|matplotlib\.axis)\w*)"', "", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)


def png(
    draws: Sequence[Draw],
    title: str,
    legend: Sequence[tuple[str, str]],
    width: float = 10.0,
    height: float = 4.0,
) -> Figure:
    """``draws`` side by side on white, ``title`` above, ``legend`` (label, colour) below; to be saved."""
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": 9.5}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        for column, draw in enumerate(draws):
            draw(figure.add_subplot(1, len(draws), column + 1), PRINT)
        figure.suptitle(title, x=0.012, ha="left", fontweight="bold", color=PRINT.ink, fontsize=12)
        lines = [Line2D([], [], color=colour, linewidth=2, label=label) for label, colour in legend]
        columns = min(len(lines), 3)
        figure.legend(
            handles=lines, loc="outside lower left", ncols=columns, frameon=False, labelcolor=PRINT.ink
        )
    return figure


def over(
    runs: Sequence[RecordedRun],
    key: str,
    axis: Axis,
    label: str,
    *,
    from_zero: bool = False,
) -> Draw:
    """``key`` along ``axis``: each replica thin, their mean bold; several runs in a colour each.

    A replica that died ends in a cross.
    """

    def draw(axes: Axes, palette: Palette) -> None:
        seconds = max(s.time_seconds[-1] for run in runs for s in run.series(key).values())
        divisor, unit = time_unit(seconds) if axis == "time_seconds" else (1.0, "")
        for index, run in enumerate(runs):
            colour = palette.accent if len(runs) == 1 else palette.runs[index % RUN_COLOURS]
            _one_run(axes, run, key, axis, colour, divisor)
        shown = axis_label(axis, unit, virtual=runs[0].virtual, counted=runs[0].unit)
        tidy(axes, palette, label, shown)
        if key in _WHOLE:
            axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        if from_zero:
            top = max(float(one.value.max()) for run in runs for one in run.series(key).values())
            axes.set_ylim(bottom=0, top=None if top > 0 else 1.0)

    return draw


def _one_run(axes: Axes, run: RecordedRun, key: str, axis: Axis, colour: str, divisor: float) -> None:
    series = run.series(key)
    several = len(series) > 1
    chosen = np.linspace(0, len(series) - 1, min(len(series), MOST_LINES)).round().astype(int)
    for replica, one in [list(series.items())[i] for i in chosen]:
        x, y = thin(one.x(axis) / divisor, one.value)
        width, alpha = (0.8, 0.35) if several else (1.6, 1.0)
        axes.plot(x, y, color=colour, linewidth=width, alpha=alpha, solid_capstyle="round")
        if replica in run.deaths:
            axes.plot(x[-1], y[-1], "x", color=colour, markersize=5, markeredgewidth=1.4)
    mean = run.mean(key, axis)
    if several and mean is not None:
        axes.plot(mean[0] / divisor, mean[1], color=colour, linewidth=1.9, solid_capstyle="round")


def ball(found: Ball) -> Draw:
    """Recorded distance from consensus and the indicator's band, from just after to just before a mixing."""

    def draw(axes: Axes, palette: Palette) -> None:
        x = found.total_env_steps
        axes.fill_between(x, found.after, found.before, color=palette.warm, alpha=0.18, linewidth=0)
        axes.plot(x, found.before, color=palette.warm, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.plot(x, found.recorded, color=palette.accent, linewidth=1.7)
        tidy(
            axes,
            palette,
            "distance from consensus ‖X − mean‖ (Frobenius)",
            axis_label("total_env_steps", ""),
        )
        axes.set_ylim(bottom=0)

    return draw


def heat_map(matrix: Array, peers: NDArray[np.bool_] | None) -> Draw:
    """Cosines [n, n] (nan: unknown): deeper is larger, scaled to the largest between two replicas, but
    to at least 0.1, so that mere noise stays pale."""

    def draw(axes: Axes, palette: Palette) -> None:
        size = len(matrix)
        apart = matrix[~np.eye(size, dtype=bool)]
        top = max(float(np.nanmax(np.abs(apart))), 0.1)
        for i in range(size):
            for j in range(size):
                value = float(matrix[i, j])
                _cell(axes, palette, (i, j), value, top, named=size <= 10)
                if peers is not None and peers[i, j] and size <= 10:
                    axes.text(j, i + 0.28, "peer", ha="center", va="center", fontsize=8, color=palette.ink)
        axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        axes.set_xlabel("gradient of replica", color=palette.muted)
        axes.set_ylabel("gradient of replica", color=palette.muted)
        axes.tick_params(length=0, colors=palette.muted)
        for spine in axes.spines.values():
            spine.set_visible(False)

    return draw


def _cell(
    axes: Axes, palette: Palette, at: tuple[int, int], value: float, top: float, *, named: bool
) -> None:
    i, j = at
    if i == j:
        face, alpha = palette.rule, 0.6
    elif np.isnan(value):
        face, alpha = palette.rule, 0.15
    else:
        face = palette.accent if value >= 0 else palette.warm
        alpha = 0.06 + 0.54 * min(1.0, abs(value) / top)
    axes.add_patch(Rectangle((j - 0.48, i - 0.48), 0.96, 0.96, facecolor=face, alpha=alpha, linewidth=0))
    if named:
        text = "?" if np.isnan(value) else f"{round(value, 2) + 0.0:.2f}"
        axes.text(j, i - 0.04, text, ha="center", va="center", color=palette.ink, fontsize=10)


def tidy(axes: Axes, palette: Palette, y_label: str, x_label: str) -> None:
    """The look all curves share: the y label as a heading, a light grid, no box."""
    axes.set_title(y_label, loc="left", fontsize="medium", color=palette.ink, pad=8)
    axes.set_xlabel(x_label, color=palette.muted)
    axes.grid(axis="y", color=palette.rule, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=palette.muted, labelcolor=palette.muted)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette.muted)
        spine.set_linewidth(0.8)
    axes.margins(x=0.01, y=0.08)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(value)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    """A tick's number: 0, 0.02, 250, 1.5k, 2M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if suffix == "k" else 1):
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}".replace("-", "−")


def number(value: float | int | None) -> str:
    """A number for people: 1,234,567, 18.40, 0.00213, or a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}".replace("-", "−")
    return (f"{value:.2f}" if size >= 10 else f"{value:.3g}").replace("-", "−")


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """(seconds in one, name) of the unit that suits a run of ``longest_seconds``."""
    if longest_seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest_seconds < 3 * 3600 else (3600.0, "hours")


def thin(x: Array, y: Array) -> tuple[Array, Array]:
    """At most ``MAX_POINTS`` of the points, evenly chosen, first and last among them."""
    if len(x) <= MAX_POINTS:
        return x, y
    chosen = np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)
    return x[chosen], y[chosen]


def axis_label(axis: Axis, unit: str, *, virtual: bool = False, counted: str = "env steps") -> str:
    if axis == "time_seconds":
        return f"{'virtual' if virtual else 'wall'} time ({unit})"
    return f"{counted} of all replicas" if axis == "total_env_steps" else "bytes exchanged by all members"
