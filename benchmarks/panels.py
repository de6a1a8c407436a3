"""Figures of several panels on white, shared by the scripts that draw pictures."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from murmurate.record.figures import COLOURS, Draw


def panels(
    draws: Sequence[Draw],
    title: str,
    legend: Sequence[tuple[str, str]],
    width: float = 10.0,
    height: float = 4.0,
) -> Figure:
    """``draws`` side by side on white, ``title`` above, ``legend`` (label, colour) below."""
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": 9.5}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        for column, draw in enumerate(draws):
            draw(figure.add_subplot(1, len(draws), column + 1))
        figure.suptitle(title, x=0.012, ha="left", fontweight="bold", color=COLOURS["ink"], fontsize=12)
        lines = [Line2D([], [], color=colour, linewidth=2, label=label) for label, colour in legend]
        columns = min(len(lines), 3)
        figure.legend(
            handles=lines, loc="outside lower left", ncols=columns, frameon=False, labelcolor=COLOURS["ink"]
        )
    return figure
