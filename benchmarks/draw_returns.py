"""Draws mean return against env steps and time: ``python benchmarks/draw_returns.py TITLE OUT.png DIR...``.

Each run has a colour; where a recipe has several runs, each recipe has one, with the mean of its runs and a
band from the lowest to the highest. ``LABEL=DIR,DIR,...`` in place of ``DIR`` makes such a group of any runs.
The line of a run is the mean over its replicas. The picture has 1600 x 640 pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from panels import panels

from murmurate.record.drawings import curves
from murmurate.record.figures import run_colour
from murmurate.record.groups import RunGroup
from murmurate.record.runs import RecordedRun, open_run


def main(title: str, out: Path, folders: Sequence[str]) -> Path:
    groups = [
        RunGroup(name, index, tuple(open_run(each) for each in members.split(",")))
        for index, (name, _, members) in enumerate(folder.partition("=") for folder in folders)
        if members
    ]
    if len(groups) < len(folders):
        if groups:
            raise SystemExit("Give a label to all groups of runs, or to none.")
        groups = _by_recipe([open_run(folder) for folder in folders])
    label = "return (mean of the last 100 episodes)"
    draws = [curves(groups, "return_mean", axis, label) for axis in ("total_env_steps", "time_seconds")]
    legend = [(group.label, run_colour(group.index)) for group in groups]
    panels(draws, title, legend).savefig(out, dpi=160)
    return out


def _by_recipe(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    if 1 < len(recipes) < len(runs):
        by_recipe = {recipe: tuple(run for run in runs if run.recipe == recipe) for recipe in recipes}
        return [RunGroup(recipe, index, own) for index, (recipe, own) in enumerate(by_recipe.items())]
    return [RunGroup(run.label, index, (run,)) for index, run in enumerate(runs)]


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
