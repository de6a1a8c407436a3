"""Draws mean return against env steps and time: ``python benchmarks/draw_returns.py TITLE OUT.png DIR...``.

A colour a run, or a recipe where some have several runs: their mean, and a band from the lowest to the
highest. The line of a run is the mean over its replicas. The picture has 1600 x 640 pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from panels import panels

from murmurate.record.drawings import curves
from murmurate.record.figures import run_colour
from murmurate.record.groups import RunGroup
from murmurate.record.runs import open_run


def main(title: str, out: Path, folders: Sequence[str]) -> Path:
    runs = [open_run(folder) for folder in folders]
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    if 1 < len(recipes) < len(runs):
        of = {recipe: tuple(run for run in runs if run.recipe == recipe) for recipe in recipes}
        groups = [RunGroup(recipe, index, members) for index, (recipe, members) in enumerate(of.items())]
    else:
        groups = [RunGroup(run.label, index, (run,)) for index, run in enumerate(runs)]
    label = "return (mean of the last 100 episodes)"
    draws = [curves(groups, "return_mean", axis, label) for axis in ("total_env_steps", "time_seconds")]
    legend = [(group.label, run_colour(group.index)) for group in groups]
    panels(draws, title, legend).savefig(out, dpi=160)
    return out


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
