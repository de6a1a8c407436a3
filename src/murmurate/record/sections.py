"""The sections of a report: each a title, figures or a table, and a sentence where data is missing.

Pages about single runs and comparisons share them where possible; they take groups of runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from murmurate.errors import Refusal, did_you_mean
from murmurate.record import drawings
from murmurate.record.console import clock
from murmurate.record.figures import DASHES, RUN_COLOURS, svg
from murmurate.record.groups import RunGroup, exchanges, only_run, waiting_share
from murmurate.record.runs import Axis, RecordedRun
from murmurate.record.timelines import same_length, shares, timeline

SHOWN_EVENTS = 200
_RETURNS = "Training return, sampled"
_ROUNDING = 1e-6  # the disagreement of equal float32 vectors is at most about a tenth of this
_ROUTINE_EVENTS = frozenset({"checkpoint", "finished"})  # events that a comparison leaves out
LINE_STYLES = ("", "dashed", "dotted", "dashdot")  # CSS classes for ``DASHES``
TIME_AXES: tuple[tuple[Axis, str], ...] = (("total_env_steps", "env steps"), ("time_seconds", "time"))


@dataclass(frozen=True)
class LegendKey:
    """An entry of a legend. colour: a CSS variable's name. kind: how it is drawn, as a CSS class."""

    label: str
    colour: str
    kind: str = ""


@dataclass(frozen=True)
class Section:
    """What the template shows, in this order; empty parts are omitted.

    layout: a CSS class for the figures: "square", "three", "four" (a row), "wide", "speed" or "strips".
    figures: HTML, which is not escaped. image: a picture's URL. table: (heads, rows). details: (name, value)
    pairs. code: commands. data: the section's numbers by name, for programs; not shown.
    """

    title: str
    text: str = ""
    legend: Sequence[LegendKey] = ()
    figures: Sequence[str] = ()
    layout: str = ""
    image: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    details: Sequence[tuple[str, str]] = field(default=())
    code: Sequence[str] = ()
    note: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


SPAN_KEYS = [
    LegendKey("collecting", "collect", "block"),
    LegendKey("learning", "learn", "block"),
    LegendKey("exchanging", "exchange", "block"),
    LegendKey("waiting for others", "wait", "bar"),
]


def group_key(group: RunGroup) -> LegendKey:
    """The legend's entry of a group."""
    kind = LINE_STYLES[group.index // RUN_COLOURS % len(DASHES)]
    return LegendKey(group.label, f"run{group.index % RUN_COLOURS}", kind)


def legend(groups: Sequence[RunGroup]) -> list[LegendKey]:
    run = only_run(groups)
    if run is None:
        return [group_key(group) for group in groups]
    if run.replicas < 2:
        return []
    return [LegendKey("mean over the living replicas", "accent"), LegendKey("each replica", "accent", "thin")]


def _with_metric(groups: Sequence[RunGroup], key: str) -> list[RunGroup]:
    return [group for group in groups if any(run.has(key) for run in group.runs)]


# -- curves ---------------------------------------------------------------------------------------------


def returns(groups: Sequence[RunGroup]) -> Section:
    groups = _with_metric(groups, "return_mean")
    if not groups:
        return Section(_RETURNS, "No episode has ended yet, so there is no return to draw.")
    label = "training return, sampled (mean of the last 100 episodes)"
    size = (5.2, 2.9) if only_run(groups) else (4.5, 3.2)
    svgs = [
        svg(drawings.curves(groups, "return_mean", axis, label), *size, name=f"return by {name}")
        for axis, name in TIME_AXES
    ]
    text = (
        "Unclipped returns of whole training games, in which the agent draws its actions and explores (the "
        "evaluation acts greedily), against the experience of all replicas together"
    )
    if only_run(groups):
        return Section(_RETURNS, f"{text} and against time.", legend(groups), svgs)
    silent = [group.label for group in groups if not any(map(exchanges, group.runs))]
    if exchanging := [group for group in groups if group.label not in silent]:
        draw = drawings.curves(exchanging, "return_mean", "total_bytes", label)
        svgs.append(svg(draw, *size, name="return by bytes"))
    notes = ["The last 100 episodes are those of all replicas together."]
    if any(len(group.runs) > 1 for group in groups):
        notes.append(
            "Lines are means over the runs of a strategy, where all of these have records; bands go from the "
            "lowest run to the highest."
        )
    if silent and exchanging:
        notes.append(
            f"Not drawn against bytes: {', '.join(silent)}, which exchanged no message while learning."
        )
    text += ", against time, and against the bytes exchanged." if exchanging else " and against time."
    return Section(_RETURNS, text, legend(groups), svgs, layout="three", note=" ".join(notes))


def success_rate(groups: Sequence[RunGroup]) -> list[Section]:
    """No section if the world does not say which episodes reach its goal."""
    groups = _with_metric(groups, "success_rate")
    if not groups:
        return []
    label = "share of the last 100 episodes"
    svgs = [
        svg(
            drawings.curves(groups, "success_rate", axis, label, from_zero=True),
            name=f"success rate by {name}",
        )
        for axis, name in TIME_AXES
    ]
    text = "Share of training episodes that reached the world's goal; the agent explores in them."
    return [Section("Success rate in training, sampled", text, legend(groups), svgs)]


def evaluation_curves(groups: Sequence[RunGroup]) -> list[Section]:
    """A section for each curve of the first run's evaluation (``evaluation.interface.Curve``)."""
    sections = []
    for curve in groups[0].runs[0].curves:
        metric, title = curve["metric"], curve["title"]
        with_data = _with_metric(groups, metric)
        if not with_data:
            sections.append(Section(title, f"No {title.lower()} was recorded during the run."))
            continue
        svgs = [
            svg(drawings.curves(with_data, metric, axis, curve["label"]), name=f"{metric} by {axis}")
            for axis, _ in TIME_AXES
        ]
        sections.append(Section(title, curve["text"], legend(with_data), svgs))
    return sections


def metrics(groups: Sequence[RunGroup], names: Sequence[str]) -> list[Section]:
    """A section for each of ``names``, fields of records of replicas. Raises Refusal for one that no run has
    recorded as a number."""
    return [_metric(groups, name) for name in dict.fromkeys(names)]


def _metric(groups: Sequence[RunGroup], name: str) -> Section:
    with_data = [group for group in groups if any(run.series(name) for run in group.runs)]
    if not with_data:
        histories = [history for group in groups for run in group.runs for history in run.histories.values()]
        records = [record for history in histories for record in history]
        known = sorted({key for record in records for key in record if isinstance(record[key], (int, float))})
        raise Refusal(
            f"No replica has recorded a number called '{name}'.{did_you_mean(name, known)} Give --metric one "
            f"of: {', '.join(known)}."
        )
    svgs = [
        svg(drawings.curves(with_data, name, axis, name), name=f"{name} by {axis}") for axis, _ in TIME_AXES
    ]
    silent = [group.label for group in groups if group not in with_data]
    note = f"Not recorded: {', '.join(silent)}." if silent else ""
    return Section(name, "", legend(with_data), svgs, note=note)


def speed(groups: Sequence[RunGroup]) -> Section:
    """Speed over the run; for a single run also its waiting, for several how their time was spent."""
    run, with_data = only_run(groups), _with_metric(groups, "env_steps_per_second")
    first = groups[0].runs[0]
    svgs = []
    if with_data:
        seconds = "virtual second" if first.virtual else "second"
        scope = "all replicas" if first.has("joined_replicas") else "each replica"
        label = f"{first.unit} per {seconds}, {scope}"
        draw = drawings.curves(
            with_data, "env_steps_per_second", "time_seconds", label, from_zero=run is not None
        )
        svgs.append(svg(draw, *((5.2, 2.9) if run else (6.8, 3.4)), name="speed"))
    text = "One env step is one decision of the agent." if first.plays else ""
    if run is not None:
        if not with_data:
            return Section("Speed", "The run recorded no env_steps_per_second.")
        if run.has("waiting_seconds") and run.replicas > 1:
            label = "time spent waiting for others (seconds, cumulative)"
            draw = drawings.curves(groups, "waiting_seconds", "time_seconds", label)
            svgs.append(svg(draw, name="waiting"))
        return Section("Speed", text, legend(groups), svgs)
    rows = [
        (group.label, time_shares)
        for group in groups
        if (time_shares := shares(group.runs, group.mean(waiting_share))) is not None
    ]
    note = "The runs recorded no spans, so it is unknown how their time was spent."
    if rows:
        height = max(3.4, 0.9 + 0.27 * len(rows))
        svgs.append(svg(drawings.stacked(rows), 6.8, height, name="shares of time"))
        note = (
            "Waiting is all waiting for others over the whole run, as in the table: in the strategy's steps, "
            "and for agreeing on when to stop, which synchronous strategies do in every round. The other "
            "kinds are from bursts of spans; the rest to 100% is recording and saving."
        )
    keys = legend(with_data) + (SPAN_KEYS if rows else [])
    return Section("Speed, and how the time was spent", text, keys, svgs, layout="speed", note=note)


def staleness(groups: Sequence[RunGroup]) -> Section:
    run = only_run(groups)
    text = "Own updates since a replica last agreed with the peers it listens to"
    if run is None:
        with_data = [group for group in groups if group.runs[0].replicas > 1 and group.staleness_counts]
        if not with_data:
            return Section("Staleness", "None of these runs has several replicas that recorded staleness.")
        largest = max(max(group.staleness_counts) for group in with_data)
        svgs = []
        for group in with_data:
            title = textwrap.shorten(group.label, 36, placeholder=" …")
            draw = drawings.histogram(group.staleness_counts, largest, group.index, title)
            svgs.append(svg(draw, 3.2, 2.3, name=f"staleness of {group.label}"))
        return Section("Staleness", f"{text}: share of all updates.", figures=svgs, layout="four")
    if run.replicas < 2:
        return Section("Staleness", "One replica has no peers, so nothing can be stale.")
    if not run.has("staleness"):
        return Section("Staleness", "The run recorded no staleness.")
    svgs = []
    if counts := groups[0].staleness_counts:
        draw = drawings.histogram(counts, max(counts), None, "share of updates, all replicas")
        svgs.append(svg(draw, name="staleness histogram"))
    for key, label in (("staleness", "staleness (own updates)"), ("heard", "replicas in the last agreement")):
        if run.has(key):
            draw = drawings.curves(groups, key, "total_env_steps", label, from_zero=True)
            svgs.append(svg(draw, name=key))
    return Section("Staleness", f"{text}.", legend(groups), svgs)


def timelines(groups: Sequence[RunGroup]) -> Section:
    """A timeline for each run: when each member computed, waited and exchanged."""
    title, single = "Timelines", only_run(groups) is not None
    first_only = sum(len(group.runs) for group in groups) > 8
    entries = []
    for group in groups:
        for run in group.runs[:1] if first_only else group.runs:
            seed = f", seed {run.run.get('seed')}" if len(group.runs) > 1 else ""
            if (shown := timeline(run)) is not None:
                entries.append(("" if single else f"{group.label}{seed}", run.virtual, shown))
    if not entries:
        return Section(
            title,
            "No spans of time were recorded yet; the first are about a second after the start (simulated: "
            "five steps after it).",
        )
    cut_timelines = same_length([shown for *_, shown in entries])
    svgs = [
        svg(
            drawings.timeline(shown, name, virtual=virtual),
            11.0 if single else 14.2,
            0.85 + 0.3 * len(shown.members),
            name=f"timeline of {name}" if name else "timeline",
        )
        for (name, virtual, _), shown in zip(entries, cut_timelines, strict=True)
    ]
    notes = []
    if first_only and any(len(group.runs) > 1 for group in groups):
        notes.append("Where a strategy has several runs, the first is shown.")
    if any(shown.left_out for shown in cut_timelines):
        notes.append("Of many members a dozen are shown, evenly chosen.")
    text = (
        "What each member did in a short window near the middle of the run, in which it recorded spans of "
        "time. Blank: recording, saving, agreeing on when to stop."
    )
    return Section(title, text, SPAN_KEYS, svgs, layout="strips", note=" ".join(notes))


def disagreement(groups: Sequence[RunGroup]) -> Section:
    """The relative disagreement of several runs, on a logarithmic axis."""
    with_data = [g for g in _with_metric(groups, "disagreement") if g.runs[0].replicas > 1]
    if not with_data:
        text = "No run of several replicas has recorded it while it learned (every --probe-every-updates)."
        return Section("Disagreement", text)
    all_zero = [g.label for g in with_data if not any(_has_positive_disagreement(run) for run in g.runs)]
    drawable = [g for g in with_data if g.label not in all_zero]
    text = "Distance of the replicas from their mean, relative to its length: √(mean ‖xᵢ − mean‖²) / ‖mean‖."
    note = f"0 up to rounding throughout, so not on this axis: {', '.join(all_zero)}." if all_zero else ""
    if not drawable:
        return Section("Disagreement", text, note=note)
    label = "disagreement relative to ‖mean‖"
    draw = drawings.curves(drawable, "disagreement", "total_env_steps", label, log_y=True)
    svgs = [svg(draw, 9.4, 3.7, name="disagreement")]
    return Section("Disagreement", text, legend(drawable), svgs, layout="wide", note=note)


def _has_positive_disagreement(run: RecordedRun) -> bool:
    return any(bool((series.value > _ROUNDING).any()) for series in run.series("disagreement").values())


# -- texts ----------------------------------------------------------------------------------------------


def events(runs: Sequence[RecordedRun]) -> Section:
    several = len(runs) > 1
    rows: list[list[str]] = []
    for run in runs:
        for event in run.events:
            if several and event.get("event") in _ROUTINE_EVENTS:
                continue
            cells = [clock(event["time_seconds"]), str(event.get("event", "")), str(event.get("message", ""))]
            rows.append([f"{run.label} ({run.folder.name})", *cells] if several else cells)
    if not rows:
        routine = "No events besides checkpoints and ends were recorded."
        return Section("Events", routine if several else "No events were recorded.")
    heads = ["time", "event", "message"]
    omitted = len(rows) - SHOWN_EVENTS
    note = f"{omitted} events between these are in metrics.jsonl." if omitted > 0 else ""
    shown = rows if omitted <= 0 else rows[: SHOWN_EVENTS // 2] + rows[-SHOWN_EVENTS // 2 :]
    return Section("Events", table=(["run", *heads] if several else heads, shown), note=note)


def commands(runs: Sequence[RecordedRun]) -> Section:
    recorded = all(known for _, known in (run.command for run in runs))
    note = "" if recorded else "Put together from run.json, which holds no command."
    return Section("To repeat it", code=["\n".join(run.command[0] for run in runs)], note=note)
