"""Draws the curves of ``murmurate bench jin-table``: ``python benchmarks/draw_jin.py OUT.png FOLDER``.

A panel for each task among the runs in FOLDER, and in it a line for each agent: the mean over its seeds, with
a band from the lowest to the highest.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from panels import panels

from murmurate.bench.jin_table import AGENTS, TASKS
from murmurate.record.drawings import curves
from murmurate.record.figures import run_colour
from murmurate.record.groups import RunGroup
from murmurate.record.runs import RecordedRun, open_run

_LABELS = {"arm": "ARM", "dqn": "dueling double DQN", "a2c": "A2C", "trpo": "TRPO"}


def main(out: Path, folder: Path) -> Path:
    found: dict[tuple[str, str], list[RecordedRun]] = defaultdict(list)
    for task in TASKS:
        for agent in AGENTS:
            for path in sorted(folder.glob(f"{task}-{agent}-*-seed-*")):
                if path.is_dir() and path.name.rpartition("-")[0].endswith("-seed"):  # not those set aside
                    found[task, agent].append(open_run(path))
    agents = [agent for agent in AGENTS if any(agent == other for _, other in found)]
    draws = []
    for task in dict.fromkeys(task for task, _ in found):
        groups = [
            RunGroup(_LABELS[agent], index, tuple(found[task, agent]))
            for index, agent in enumerate(agents)
            if found[task, agent]
        ]
        draws.append(curves(groups, "return_mean", "total_env_steps", task))
    legend = [(_LABELS[agent], run_colour(index)) for index, agent in enumerate(agents)]
    title = "Return (mean of the last 100 episodes) where observations hide part of the state"
    figure = panels(draws, title, legend, width=10.0, height=3.6)
    limits = [axes.get_ylim() for axes in figure.axes]
    for axes in figure.axes:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    figure.savefig(out, dpi=160)
    return out


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2])))
