"""The sections of a comparison about scores: means, interquartile means, and who improves on whom."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes

from murmurate.record import score_statistics
from murmurate.record.drawings import label_rows
from murmurate.record.figures import COLOURS, Draw, number_text, percent_axis, run_colour, style_axes, svg
from murmurate.record.groups import RunGroup
from murmurate.record.score_statistics import Interval, Scores
from murmurate.record.sections import Section

MOST_PAIRS = 45
_NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Figure:
    """The figure of ``summary.json`` by which runs are compared."""

    name: str
    title: str
    lower_is_better: bool = False


def main_figure(groups: Sequence[RunGroup]) -> Figure:
    """The main figure of the first run's evaluation."""
    run = groups[0].runs[0]
    if run.plays or not run.curves:
        return Figure("eval_return_mean", "evaluation return (greedy)")
    curve = run.run.get("headline") or run.curves[0]
    return Figure(curve["metric"], curve["title"].lower(), bool(curve.get("lower_is_better")))


def score_sections(groups: Sequence[RunGroup]) -> list[Section]:
    """The sections about scores; empty where no group has several runs."""
    if all(len(group.runs) < 2 for group in groups):
        return []
    figure, title = main_figure(groups), "Scores over runs"
    scored = [(g, s) for g in groups if (s := g.values(lambda run: run.fact(figure.name)))]
    if not scored:
        return [Section(title, f"None of the runs has a figure {figure.name} yet.")]
    if not score_statistics.available():
        return [
            Section(title, "Intervals and interquartile means need SciPy: pip install 'murmurate[topics]'")
        ]
    summaries = [(group, score_statistics.summarized(scores)) for group, scores in scored]
    with_several = [(group, scores) for group, scores in scored if len(scores) > 1]
    return [_scores(title, figure, summaries), *_improvements(figure, with_several)]


def _scores(title: str, figure: Figure, summaries: Sequence[tuple[RunGroup, Scores]]) -> Section:
    rows = [
        [
            group.label,
            str(scores.runs),
            number_text(scores.mean),
            _NONE if scores.stderr is None else f"± {number_text(scores.stderr)}",
            _interval(scores.mean_interval),
            number_text(scores.iqm),
            _interval(scores.iqm_interval),
        ]
        for group, scores in summaries
    ]
    heads = ["", "runs", "mean", "standard error", "95% interval", "interquartile mean", "95% interval"]
    text = (
        f"The {figure.title} at the end of each run ({figure.name}). The interquartile mean leaves out the "
        "lowest and the highest quarter of the runs (with fewer than four, none)."
    )
    note = (
        f"95% percentile bootstrap intervals over runs, {score_statistics.RESAMPLES:,} resamples. With "
        f"fewer than about {score_statistics.FEWEST_FOR_INTERVALS} runs such intervals are too narrow."
    )
    drawing = svg(_dots(figure, summaries), 9.4, 0.9 + 0.36 * len(summaries), name="interquartile means")
    data = [
        {"group": group.label, "figure": figure.name, **dataclasses.asdict(scores)}
        for group, scores in summaries
    ]
    return Section(
        title, text, figures=[drawing], layout="wide", table=(heads, rows), note=note, data={"scores": data}
    )


def _improvements(figure: Figure, scored: Sequence[tuple[RunGroup, Sequence[float]]]) -> list[Section]:
    """The probability that a run of one group is better than one of another, for each pair of groups in one
    world."""
    pairs = [(ours, theirs) for ours, theirs in combinations(scored, 2) if ours[0].world == theirs[0].world]
    if not pairs:
        return []
    rows: list[tuple[str, float, Interval | None]] = []
    data: list[dict[str, Any]] = []
    for (first, ours), (second, theirs) in pairs[:MOST_PAIRS]:
        better, worse = (theirs, ours) if figure.lower_is_better else (ours, theirs)
        chance, interval = score_statistics.probability_of_improvement(better, worse)
        rows.append((f"{first.label}\nover {second.label}", chance, interval))
        data.append({"group": first.label, "over": second.label, "probability": chance, "interval": interval})
    text = (
        "The probability that a run of the first has a better score than a run of the second, equal scores "
        "counting half, with its 95% bootstrap interval. An interval that contains 50% does not tell the two "
        "apart."
    )
    if len({group.world for group, _ in scored}) > 1:
        text += " Runs in different environments are not compared."
    left_out = len(pairs) - len(rows)
    note = f"{left_out} more pairs are left out: compare fewer groups." if left_out else ""
    drawing = svg(_chances(rows), 9.4, 0.9 + 0.52 * len(rows), name="probability of improvement")
    title, numbers = "Probability of improvement", {"improvements": data}
    return [Section(title, text, figures=[drawing], layout="wide", note=note, data=numbers)]


def _interval(interval: Interval | None) -> str:
    return _NONE if interval is None else f"{number_text(interval[0])} to {number_text(interval[1])}"


def _dots(figure: Figure, summaries: Sequence[tuple[RunGroup, Scores]]) -> Draw:
    """A row for each group: its interquartile mean, the interval as a line, the mean as a small ring."""

    def draw(axes: Axes) -> None:
        for row, (group, scores) in enumerate(summaries):
            colour = run_colour(group.index)
            if scores.iqm_interval is not None:
                axes.plot(scores.iqm_interval, [row, row], color=colour, linewidth=5, alpha=0.35)
            axes.plot(scores.iqm, row, "o", color=colour, markersize=7)
            axes.plot(scores.mean, row, "o", color=COLOURS["muted"], markersize=4, fillstyle="none")
        style_axes(axes, "", f"{figure.title}: interquartile mean with its 95% interval; ring: mean")
        _label_rows(axes, [group.label for group, _ in summaries])

    return draw


def _chances(rows: Sequence[tuple[str, float, Interval | None]]) -> Draw:
    """A row for each pair of groups: the probability, with its interval as a line."""

    def draw(axes: Axes) -> None:
        axes.axvline(0.5, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 3)))
        for row, (_, chance, interval) in enumerate(rows):
            if interval is not None:
                axes.plot(interval, [row, row], color=COLOURS["accent"], linewidth=5, alpha=0.35)
            axes.plot(chance, row, "o", color=COLOURS["accent"], markersize=7, clip_on=False)
            axes.text(1.03, row, f"{chance:.0%}", va="center", color=COLOURS["ink"], clip_on=False)
        style_axes(axes, "", "probability of improvement")
        axes.set_xlim(0, 1.1)
        _label_rows(axes, [name for name, *_ in rows])
        percent_axis(axes.xaxis)
        axes.spines["bottom"].set_bounds(0, 1)

    return draw


def _label_rows(axes: Axes, names: Sequence[str]) -> None:
    lines = [[textwrap.shorten(line, 56, placeholder=" …") for line in name.split("\n")] for name in names]
    label_rows(axes, ["\n".join(row) for row in lines])
