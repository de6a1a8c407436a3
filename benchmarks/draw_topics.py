"""Draws perplexity against documents and CPU seconds from the newest result of ``bench topics``:
``python benchmarks/draw_topics.py``.

One picture has every step rule from every start (``pictures/topics-steps.svg``), the other all libraries on
each corpus (``pictures/topics-libraries.svg``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RULES = {"paper": "#c0392b", "average": "#2a6fb0", "robbins-monro": "#2e8b57"}
STARTS = {"random": ":", "documents": "-", "svi": "--"}
LIBRARIES = {"murmurate": "#2a6fb0", "gensim": "#c0392b", "scikit-learn": "#e08e0b", "tomotopy": "#2e8b57"}
DASHES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1)))


def newest(folder: Path) -> dict[str, Any]:
    """The newest result; the newest one of ``--full``, if there is any."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*-topics.json"))]
    chosen: dict[str, Any] = max(found, key=lambda result: (result["full"], result["date"]))
    return chosen


def _curve(axes: Axes, row: dict[str, Any], key: str, **look: Any) -> None:
    curve = row["curve"]
    axes.plot([p[key] for p in curve], [p["perplexity"] for p in curve], label=row["label"], **look)


def _label_axes(axes: Axes, key: str, title: str = "") -> None:
    axes.set_xlabel("documents" if key == "documents" else "CPU seconds")
    axes.set_ylabel("perplexity")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def step_rules(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    unigram = result["unigram_perplexity"]["generated"]
    least = min(point["perplexity"] for row in result["step_rules"] for point in row["curve"])
    for axes, key in zip(panels, ("documents", "cpu_seconds"), strict=True):
        for row in result["step_rules"]:
            rule, _, start = row["label"].partition(" from ")
            look = {"color": RULES.get(rule, "#777777"), "linestyle": STARTS.get(start, "-.")}
            if rule.startswith("paper,"):
                look = {"color": "#222222", "linestyle": STARTS[start]}
            _curve(axes, row, key, **look)
        axes.axhline(unigram, color="#999999", linewidth=0.8)
        # the perplexity of a random start before the first push is far above this
        axes.set_ylim(0.97 * least, 1.05 * unigram)
        _label_axes(axes, key)
    panels[0].annotate("counting words alone", (0, unigram), fontsize=8, va="bottom")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    _save(figure, path)


def libraries(result: dict[str, Any], path: Path) -> None:
    corpora = result["corpora"]
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    panels = figure.subplots(1, len(corpora), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, corpora.items(), strict=True):
        drawn = dict.fromkeys(LIBRARIES, 0)
        for row in rows:
            library = row["label"].split(" ")[0]
            look = {"color": LIBRARIES[library], "linestyle": DASHES[drawn[library]]}
            drawn[library] += 1
            _curve(axes, row, "cpu_seconds", marker=".", markersize=4, **look)
        axes.set_xscale("log")
        axes.set_ylim(top=1.05 * result["unigram_perplexity"][name])
        _label_axes(axes, "cpu_seconds", name)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    _save(figure, path)


def main(folder: Path) -> None:
    result = newest(folder / "results")
    step_rules(result, folder / "pictures" / "topics-steps.svg")
    libraries(result, folder / "pictures" / "topics-libraries.svg")


if __name__ == "__main__":
    main(HERE)
