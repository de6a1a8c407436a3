"""Colours, axes and number formats of the report's figures, and their conversion to inline SVG.

The SVG's colours are CSS variables, so that figures follow the page's light or dark theme.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Collection
from typing import Any

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from murmurate.record.runs import Axis

Array = NDArray[np.float64]
MAX_POINTS = 600
RUN_COLOURS = 6  # run0 to run5
# once all colours are used, further lines are dashed
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.3, 1.5)), (0, (6, 1.6, 1.3, 1.6)))


# Colours by use, in the page's light theme (``report_template.html.j2`` has the dark one); run0 to run5 are
# cycled over the groups of a comparison. In each theme a search maximised the smallest distance (CIELAB)
# between two run colours for protanopia, deuteranopia, tritanopia (Machado et al. 2009) and normal sight, at
# a contrast of at least 2.9 with the page. That distance is at least 32, and 50 for normal sight.
COLOURS = {
    "ink": "#1c2326",
    "muted": "#4d585d",
    "rule": "#dfe5e6",
    "accent": "#17707c",
    "warm": "#b8562b",
    "run0": "#0072b2",
    "run1": "#e27171",
    "run2": "#10401c",
    "run3": "#898900",
    "run4": "#6000ff",
    "run5": "#5d0052",
    "collect": "#8cc1e6",
    "learn": "#14588c",
    "exchange": "#e59a00",
    "wait": "#b0312f",
}


def run_colour(index: int) -> str:
    """The colour of a comparison's group."""
    return COLOURS[f"run{index % RUN_COLOURS}"]


def run_dashes(index: int) -> Any:
    """The dashes of the lines of a comparison's group."""
    return DASHES[index // RUN_COLOURS % len(DASHES)]


Draw = Callable[[Axes], None]


def svg(draw: Draw, width: float = 5.2, height: float = 2.9, name: str = "") -> str:
    """What ``draw`` draws on axes of ``width`` x ``height`` inches, as an ``<svg>`` element.

    name: makes the ids of this figure unique on the page; screen readers read it out.
    """
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,
            "font.family": "sans-serif",
            "font.size": 10,
            "text.parse_math": False,  # a label may be anybody's text
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    for _ in ("width", "height"):  # the page sets the size
        text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    # only the ids of clip paths and markers are referred to
    text = re.sub(r'id="((?:figure|axes|patch|line2d|xtick|ytick|text|matplotlib\.axis)\w*)"', "", text)
    for colour_name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{colour_name})")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(name)}"', 1)


def style_axes(axes: Axes, y_label: str, x_label: str) -> None:
    """The common style: the y label as a heading, a light grid, no box."""
    axes.set_title(y_label, loc="left", fontsize="medium", color=COLOURS["ink"], pad=8)
    axes.set_xlabel(x_label, color=COLOURS["muted"])
    axes.grid(axis="y", color=COLOURS["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=COLOURS["muted"], labelcolor=COLOURS["muted"])
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(COLOURS["muted"])
        spine.set_linewidth(0.8)
    axes.margins(x=0.01, y=0.08)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: tick_text(value)))


def percent_axis(axis: Any) -> None:
    """Ticks at quarters from 0% to 100%."""
    axis.set_major_locator(ticker.FixedLocator([0, 0.25, 0.5, 0.75, 1.0]))
    axis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))


def tick_text(value: float) -> str:
    """A number at a tick of an axis: 0, 0.02, 250, 1.5k, 2M."""
    value = float(f"{value:.4g}")  # before the unit is chosen: 9999.7 is 10k
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
    unit, suffix = next(((unit, letter) for least, unit, letter in units if abs(value) >= least), (1.0, ""))
    return f"{value / unit:.4g}{suffix}".replace("-", "−")


def number_text(value: float | int | None) -> str:
    """A number in a table: 1,234,567, 18.40, 0.00213, or a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}".replace("-", "−")
    return (f"{value:.2f}" if size >= 10 else f"{value:.3g}").replace("-", "−")


def byte_size(value: float) -> str:
    """A number of bytes as text: 512 B, 20 kB, 3 MB."""
    value = float(f"{value:.3g}")  # before the unit is chosen: 999,700 B are 1 MB
    for unit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {suffix}"
    return f"{value:.3g} B"


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """(seconds, name) of the unit of time that suits an axis up to ``longest_seconds``."""
    if longest_seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest_seconds < 3 * 3600 else (3600.0, "hours")


def thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """At most ``MAX_POINTS`` of the points, evenly chosen, with the first and the last."""
    if len(x) <= MAX_POINTS:
        return x, y
    chosen = np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)
    return x[chosen], y[chosen]


def axis_label(
    axis: Axis, unit: str, *, clocks: Collection[str] = ("wall",), counted: str = "env steps"
) -> str:
    """The label of ``axis``. unit: unit of time. clocks: what time it is, ``wall`` or ``virtual``, or both.
    counted: the run's unit of ``env_steps``."""
    if axis == "time_seconds":
        return f"{' or '.join(sorted(clocks))} time ({unit})"
    return f"{counted} of all replicas" if axis == "total_env_steps" else "bytes exchanged by all members"
