"""The picture of several runs' learning curves for a README or a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from murmurate.errors import Refusal
from murmurate.record.figures import PRINT, RUN_COLOURS, over, png
from murmurate.record.runs import open_run


def plot_returns(directories: Sequence[Path | str], out_png: Path | str, title: str) -> Path:
    """Draw mean return against env steps and against wall time, side by side, a colour a run.

    Each replica is a thin line, the mean over them a bold one. Writes a PNG of 1600 x 640 pixels and
    returns its path. Raises ``Refusal`` for a folder that holds no run, or none with finished episodes.
    """
    if not directories:
        raise Refusal("There is nothing to draw; give one or more run folders.")
    runs = [open_run(directory) for directory in directories]
    for run in runs:
        if not run.has("return_mean"):
            raise Refusal(f"No episode has ended in {run.folder} yet; train it further, or leave it out.")
    label = "return (mean of the last 100 episodes)"
    draws = [over(runs, "return_mean", axis, label) for axis in ("total_env_steps", "time_seconds")]
    colours = [PRINT.accent] if len(runs) == 1 else [PRINT.runs[i % RUN_COLOURS] for i in range(len(runs))]
    alike = len({run.label for run in runs}) < len(runs)
    names = [f"{run.label} ({run.folder.name})" if alike else run.label for run in runs]
    figure = png(draws, title, list(zip(names, colours, strict=True)))
    out_png = Path(out_png)
    figure.savefig(out_png, dpi=160)
    return out_png
