"""Loss against time and against passes, for each number of members (Jin 2018, Figures 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

_COLOURS = {"all-reduce": "C0", "elastic": "C1", "push-gossip": "C2", "pull-gossip": "C3"}


@dataclass(frozen=True)
class TrainingCurve:
    """points: ``seconds``, ``passes``, ``loss`` and ``accuracy`` on the validation images, of replica 0, or
    with more than 16 members their means over all; those of the last point are of the consensus parameters on
    the test images. real: the members are processes, and ``seconds`` of wall time, not of virtual time."""

    method: str
    members: int
    seed: int
    points: list[dict[str, float]]
    real: bool = False

    def loss_at(self, seconds: float) -> float:
        """The last validation loss up to ``seconds``; the first one if all are later."""
        earlier = [point for point in self.points[:-1] if point["seconds"] <= seconds]
        return (earlier[-1] if earlier else self.points[0])["loss"]

    def seconds_at(self, share: float) -> float:
        """The time of the last point in the first ``share`` of the passes; of the first one if there is
        none."""
        passes = share * self.points[-1]["passes"]
        return max(p["seconds"] for p in self.points if p["passes"] <= passes or p is self.points[0])


def draw(curves: Sequence[TrainingCurve], path: Path) -> None:
    """Draw a row of panels for each number of members, with a line for each curve; those of real processes
    have rows of their own."""
    groups = list(dict.fromkeys((curve.members, curve.real) for curve in curves))
    figure = Figure(figsize=(9, 2.6 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 2, squeeze=False)
    for (members, real), (by_time, by_pass) in zip(groups, axes, strict=True):
        labelled: set[str] = set()
        for curve in curves:
            if (curve.members, curve.real) != (members, real):
                continue
            label = None if curve.method in labelled else curve.method
            labelled.add(curve.method)
            losses = [point["loss"] for point in curve.points[:-1]]
            for ax, key in ((by_time, "seconds"), (by_pass, "passes")):
                values = [point[key] for point in curve.points[:-1]]
                ax.plot(values, losses, color=_COLOURS.get(curve.method), label=label, linewidth=1)
        by_time.set_ylabel(f"{members} {'processes' if real else 'members'}\nvalidation loss (nats)")
        by_time.set_xlabel("wall seconds" if real else "virtual seconds")
        for ax in (by_time, by_pass):
            ax.set_yscale("log")
    axes[0][0].legend(fontsize="small")
    axes[-1][1].set_xlabel("passes through the training images")
    figure.savefig(path, dpi=110)
