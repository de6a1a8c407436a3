"""Draws Mohamad et al.'s Fig. 1 to 3 of a result: ``python benchmarks/draw_topics_speedup.py RESULT.json``.

The picture goes to ``figures/topics-speedup.png``: speed-up by threads, by workers, and by both for each B,
beside the paper's words (linear to 8 threads and to 14 workers, slower from 6 of both).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from murmurate.record.figures import PRINT, RUN_COLOURS, Draw, Palette, png, tidy

HERE = Path(__file__).parent
SHOWN = {"paper": "solid", "average": (0, (4, 2))}


def panel(
    result: dict[str, Any], name: str, count: str, label: str, linear_to: int, square: bool = False
) -> Draw:
    """Speed-up over the first case; grey is the paper's claim. square: workers times threads."""

    def draw(axes: Axes, palette: Palette) -> None:
        most = linear_to
        for rule, dashes in SHOWN.items():
            rows = [row for row in result["rules"][rule]["cases"] if row["panel"] == name]
            for index, B in enumerate(sorted({row["local_updates"] for row in rows})):
                points = [
                    (row[count], row["speedup"])
                    for row in rows
                    if row["local_updates"] == B and row["speedup"] is not None
                ]
                most = max([most, *(x for x, _ in points)])
                colour = palette.runs[index % RUN_COLOURS] if square else palette.accent
                axes.plot(
                    *zip(*points, strict=True), color=colour, linestyle=dashes, marker="o", markersize=3
                )
        power = 2 if square else 1
        claimed = [x / 10 for x in range(10, 10 * linear_to + 1)]
        axes.plot(claimed, [x**power for x in claimed], color=palette.muted, linewidth=4, alpha=0.25)
        tidy(axes, palette, "speed-up at equal perplexity", label)
        axes.set_xlim(0, most + 0.5)
        axes.set_ylim(bottom=0)

    return draw


def main(result: dict[str, Any]) -> Path:
    paper = result["paper"]
    draws = [
        panel(result, "workers", "workers", "workers (p = B = 1)", paper["linear_up_to_workers"]),
        panel(result, "threads", "threads", "threads (1 worker, B = 15)", paper["linear_up_to_threads"]),
        panel(result, "both", "workers", "workers = threads", paper["slower_from_both"], square=True),
    ]
    updates = sorted({r["local_updates"] for r in result["rules"]["paper"]["cases"] if r["panel"] == "both"})
    legend = [(f"right: B = {B}", PRINT.runs[i % RUN_COLOURS]) for i, B in enumerate(updates)]
    legend += [
        ("the paper's rule; dashed: average", PRINT.accent),
        ("grey: linear as far as the paper claims", "#c8cccd"),
    ]
    figure = png(draws, "DPSVI, simulated with costs measured on one core", legend, height=4.3)
    path = HERE / "figures" / "topics-speedup.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    print(main(json.loads(Path(sys.argv[1]).read_text())))
