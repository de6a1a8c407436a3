"""Draws Mohamad et al.'s Fig. 1 to 3 from a result: ``python benchmarks/draw_topics_speedup.py RESULT.json``.

The picture is ``figures/topics-speedup.png``: speed-up by threads, by workers, and by both for each B, with
the paper's claims (linear up to 8 threads and up to 14 workers; slower from 6 nodes of 6 threads on).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from panels import panels

from murmurate.record.figures import COLOURS, Draw, run_colour, style_axes

HERE = Path(__file__).parent
SHOWN = {"paper": "solid", "average": (0, (4, 2))}


def panel(result: dict[str, Any], name: str, count: str, label: str, linear_to: int, power: int) -> Draw:
    """Speed-up over the panel's first case of the same B; grey is the paper's claim, count ** power."""

    def draw(axes: Axes) -> None:
        most, colours = linear_to, by_local_updates(result)
        for rule, dashes in SHOWN.items():
            rows = [row for row in result["rules"][rule]["cases"] if row["panel"] == name]
            for B in sorted({row["local_updates"] for row in rows}):
                points = [
                    (row[count], row["speedup"])
                    for row in rows
                    if row["local_updates"] == B and row["speedup"] is not None
                ]
                if points:
                    most = max(most, *(x for x, _ in points))
                    axes.plot(
                        *zip(*points, strict=True), color=colours[B], linestyle=dashes, marker="o", ms=3
                    )
        for at, least, middle, greatest in real(result, name):
            axes.plot([at, at], [least, greatest], color=COLOURS["ink"], linewidth=1)
            axes.plot([at], [middle], color=COLOURS["ink"], marker="x", ms=6)
        claimed = [x / 10 for x in range(10, 10 * linear_to + 1)]
        axes.plot(claimed, [x**power for x in claimed], color=COLOURS["muted"], linewidth=4, alpha=0.25)
        style_axes(axes, "speed-up at equal perplexity", label)
        axes.set_xlim(0, most + 0.5)
        axes.set_ylim(bottom=0)

    return draw


def real(result: dict[str, Any], panel: str) -> Iterator[tuple[int, float, float, float]]:
    """(number of threads or workers, least, median and greatest speed-up) of real processes in a panel."""
    shown = {"threads": "2 threads", "workers": "2 workers"}.get(panel)
    found = (result["real"] or {}).get("speedup", {}).get(shown)
    if found is not None:
        yield 2, found["least"], found["median"], found["greatest"]


def by_local_updates(result: dict[str, Any]) -> dict[int, str]:
    """A colour for each B."""
    found = {row["local_updates"] for rule in result["rules"].values() for row in rule["cases"]}
    return {B: run_colour(index) for index, B in enumerate(sorted(found))}


def main(result: dict[str, Any]) -> Path:
    paper = result["paper"]
    draws = [
        panel(result, "workers", "workers", "workers (1 thread each)", paper["linear_up_to_workers"], 1),
        panel(result, "threads", "threads", "threads (1 worker)", paper["linear_up_to_threads"], 1),
        panel(result, "both", "workers", "workers = threads of each", paper["slower_from_both"], 2),
    ]
    legend = [(f"B = {B}", colour) for B, colour in by_local_updates(result).items()]
    legend.append(("grey: linear as far as the paper claims", "#c8cccd"))
    if any(list(real(result, panel)) for panel in ("workers", "threads")):
        legend.append(("x: real processes, average, B = 15", COLOURS["ink"]))
    title = "DPSVI, simulated with costs measured on one core. Solid: the paper's step rule; dashed: average"
    figure = panels(draws, title, legend, height=4.3)
    path = HERE / "figures" / "topics-speedup.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    print(main(json.loads(Path(sys.argv[1]).read_text())))
