"""Draws Zhang's Fig. 4.8 from recorded runs: ``python benchmarks/draw_relaxed_loop.py DIR...``.

The picture is ``figures/relaxed-loop.png``, or ``figures/relaxed-loop-RECIPE.png`` for a single recipe: mean
return of the last 100 training episodes against env steps, with a panel for each recipe and a colour for each
D (number of batches drawn before the priorities of earlier batches are updated). A thin line is a seed, a
bold line the mean over the seeds, up to the end of the shortest run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from panels import panels

from murmurate.record.figures import Draw, run_colour, style_axes
from murmurate.record.groups import RunGroup
from murmurate.record.runs import Axis, RecordedRun, open_run

HERE = Path(__file__).parent
_STEPS: Axis = "total_env_steps"
Runs = dict[int, list[RecordedRun]]  # by D


def panel(recipe: str, by_depth: Runs, colours: dict[int, str]) -> Draw:
    def draw(axes: Axes) -> None:
        for depth, runs in sorted(by_depth.items()):
            colour = colours[depth]
            for run in runs:
                axes.plot(*run.mean("return_mean", _STEPS), color=colour, linewidth=0.6, alpha=0.45)
            over_seeds = RunGroup(f"D = {depth}", 0, tuple(runs)).curve("return_mean", _STEPS)
            axes.plot(over_seeds.x, over_seeds.mean, color=colour, linewidth=2)
        seeds = " or ".join(str(n) for n in sorted({len(runs) for runs in by_depth.values()}))
        style_axes(axes, f"{recipe}: return (seeds a colour: {seeds})", "env steps")

    return draw


def main(folders: list[str]) -> Path:
    found: dict[str, Runs] = defaultdict(lambda: defaultdict(list))
    for run in map(open_run, folders):
        found[run.recipe][int(run.run["replay"]["ahead"])].append(run)
    depths = sorted({depth for by_depth in found.values() for depth in by_depth})
    colours = {depth: run_colour(i) for i, depth in enumerate(depths)}
    draws = [panel(recipe, by_depth, colours) for recipe, by_depth in sorted(found.items())]
    legend = [(f"D = {depth}", colour) for depth, colour in colours.items()]
    path = HERE / "figures" / f"relaxed-loop{'' if len(found) > 1 else '-' + next(iter(found))}.png"
    path.parent.mkdir(exist_ok=True)
    panels(draws, "Learning from batches that were drawn ahead", legend).savefig(path, dpi=160)
    return path


if __name__ == "__main__":
    print(main(sys.argv[1:]))
