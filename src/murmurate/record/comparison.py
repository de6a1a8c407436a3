"""The sections of a page about several runs: how the strategies compare."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from murmurate.record import drawings, figures, groups
from murmurate.record.console import clock
from murmurate.record.figures import DASHES, RUN_COLOURS, number
from murmurate.record.groups import Group
from murmurate.record.runs import Axis, RecordedRun
from murmurate.record.sections import KIND_KEYS, Key, Section, timelines
from murmurate.record.strips import shares

_KINDS = ("", "dashed", "dotted", "dashdot")


def legend(shown: Sequence[Group]) -> list[Key]:
    return [
        Key(g.label, f"run{g.index % RUN_COLOURS}", _KINDS[g.index // RUN_COLOURS % len(DASHES)])
        for g in shown
    ]


# -- the table ------------------------------------------------------------------------------------------

Cell = tuple[str, str]


def table(shown: Sequence[Group]) -> dict[str, Any]:
    """Heads and rows: each cell has a main text and, below it, a small one."""
    reference = groups.reference_return(shown)
    heads: list[tuple[str, str]] = [
        ("strategy", "replicas, runs"),
        ("evaluation", "in training"),
        ("env steps", "frames" if any(_frames(g) for g in shown) else ""),
        ("seconds", "h:mm:ss" if any((groups.seconds(r) or 0) >= 60 for g in shown for r in g.runs) else ""),
        ("env steps/s", ""),
        (f"to return {number(reference[0])}" if reference else "to a return", "env steps, seconds"),
        ("waiting", "of the time"),
        ("staleness", "median, max"),
        ("disagreement", "at the end"),
        ("exchanged", "per update"),
        ("dead", ""),
    ]
    rows = [
        {
            "colour": f"run{group.index % RUN_COLOURS}",
            "kind": _KINDS[group.index // RUN_COLOURS % len(DASHES)],
            "cells": _cells(group, None if reference is None else reference[0]),
        }
        for group in shown
    ]
    return {"heads": heads, "rows": rows, "note": _note(shown, reference)}


def _cells(group: Group, reference: float | None) -> list[Cell]:
    replicas = group.runs[0].replicas
    many = f"{replicas} replica{'s' if replicas > 1 else ''}"
    runs = f", {len(group.runs)} runs" if len(group.runs) > 1 else ""
    spent = group.mean(groups.seconds)
    waited = group.mean(groups.waiting_share)
    exchanged, each = group.mean(groups.bytes_exchanged), group.mean(groups.bytes_per_update)
    frames = _frames(group)
    return [
        (group.label, many + runs),
        (_evaluation(group), number(group.mean(lambda run: run.fact("train_return_mean")))),
        (number(group.mean(lambda run: run.fact("env_steps"))), number(frames) if frames else ""),
        (number(spent), clock(spent) if spent is not None and spent >= 60 else ""),
        (number(group.mean(groups.env_steps_per_second)), ""),
        _reached(group, reference),
        ("\N{EN DASH}" if waited is None or replicas < 2 else f"{waited:.1%}", ""),
        _staleness(group) if replicas > 1 else ("\N{EN DASH}", ""),
        (_small(group.mean(lambda run: run.fact("disagreement_final"))), ""),
        (
            "\N{EN DASH}" if exchanged is None else drawings.size(exchanged),
            "" if each is None else drawings.size(each),
        ),
        (_dead(group), ""),
    ]


def _frames(group: Group) -> float | None:
    """Frames of the emulator, where they are not the same as env steps."""
    return group.mean(lambda run: None if run.fact("frames") == run.fact("env_steps") else run.fact("frames"))


def _evaluation(group: Group) -> str:
    """Mean ± standard error: over the runs if there are several, else over the games of the only one."""
    found = group.each(lambda run: run.fact("eval_return_mean"))
    if len(found) < 2:
        error = group.mean(lambda run: run.fact("eval_return_stderr"))
    else:
        error = statistics.stdev(found) / len(found) ** 0.5
    mean = number(statistics.fmean(found) if found else None)
    return mean if error is None or not found else f"{mean} ± {number(error)}"


def _reached(group: Group, reference: float | None) -> Cell:
    if reference is None:
        return "\N{EN DASH}", ""
    steps = group.each(lambda run: groups.reaches(run, reference, "total_env_steps"))
    spent = group.each(lambda run: groups.reaches(run, reference, "time_seconds"))
    if not steps:
        return "not reached", ""
    part = "" if len(steps) == len(group.runs) else f" ({len(steps)} of {len(group.runs)} runs)"
    return number(round(statistics.median(steps))), f"{number(statistics.median(spent))} s{part}"


def _staleness(group: Group) -> Cell:
    middle = groups.median(group.staleness_counts)
    top = group.each(lambda run: run.fact("staleness_max"))
    return number(middle), f"max {number(max(top))}" if top else ""


def _small(value: float | None) -> str:
    return f"{value:.1e}" if value is not None and 0 < abs(value) < 1e-3 else number(value)


def _dead(group: Group) -> str:
    dead = [len(run.fact("dead_replicas") or ()) for run in group.runs]
    return "none" if not any(dead) else f"{sum(dead)} of {sum(run.replicas for run in group.runs)}"


def _note(shown: Sequence[Group], reference: tuple[float, str] | None) -> str:
    words = []
    if any(len(group.runs) > 1 for group in shown):
        words.append(
            "Of several runs (seeds): means, and of the evaluation ± the standard error over the runs; "
            "to the reference return the median."
        )
    if reference is not None:
        words.append(f"Return {number(reference[0])}: {reference[1]}.")
    words.append(
        "Seconds count from the launcher's start, the start of the processes included. Waiting is for "
        "others, in a strategy's step. Bytes per update: all members' bytes over all replicas' updates."
    )
    virtual = sum(run.virtual for group in shown for run in group.runs)
    if virtual:
        words.append("Seconds of simulated runs are virtual ones, of the simulated cluster.")
    return " ".join(words)


# -- the figures ----------------------------------------------------------------------------------------


def returns(shown: Sequence[Group]) -> Section:
    title = "Return"
    shown = _having(shown, "return_mean")
    if not shown:
        return Section(title, "No episode has ended yet, so there is no return to draw.")
    label = "return (mean of the last 100 episodes)"
    silent = [g.label for g in shown if not any(map(groups.exchanges, g.runs))]
    drawn = []
    axes: list[tuple[Axis, str]] = [
        ("total_env_steps", "env steps"),
        ("time_seconds", "time"),
        ("total_bytes", "bytes"),
    ]
    for axis, name in axes:
        able = [g for g in shown if axis != "total_bytes" or g.label not in silent]
        if able:
            draw = drawings.lines(able, "return_mean", axis, label)
            drawn.append(figures.svg(draw, 4.5, 3.2, name=f"return by {name}"))
    note = ""
    if any(len(group.runs) > 1 for group in shown):
        note = (
            "Lines are means over the runs of a strategy where all of them have records, bands go from the "
            "lowest run to the highest. "
        )
    if silent and len(silent) < len(shown):
        note += f"Nothing against bytes for {', '.join(silent)}: no message was exchanged while learning."
    return Section(
        title,
        "Unclipped returns of whole training games, against the experience of all replicas together, against "
        "time, and against what was read from and written to others.",
        legend=legend(shown),
        figures=drawn,
        layout="three",
        note=note.strip(),
    )


def times(shown: Sequence[Group]) -> Section:
    """Where the time went: speed along the run, and shares of it from the bursts."""
    drawn = []
    able = _having(shown, "env_steps_per_second")
    if able:
        draw = drawings.lines(
            able, "env_steps_per_second", "time_seconds", "env steps per second, each replica"
        )
        drawn.append(figures.svg(draw, 6.8, 3.4, name="speed"))
    rows = [(group.label, found) for group in shown if (found := shares(group.runs)) is not None]
    keys = legend(able) + (KIND_KEYS if rows else [])
    if rows:
        height = max(3.4, 0.9 + 0.27 * len(rows))
        drawn.append(figures.svg(drawings.stacked(rows), 6.8, height, name="shares of time"))
    text = "One env step is one decision of the agent."
    if rows:
        note = (
            "Waiting in the bars is all waiting, agreeing on when to stop included, as synchronous ones do "
            "in every round; in the table it is only that inside of the strategy's step. What lacks to "
            "100% is recording and saving."
        )
    else:
        note = "The runs recorded no spans, so nothing is known of where the time went."
    return Section("Speed, and where the time went", text, keys, drawn, layout="speed", note=note)


def staleness(shown: Sequence[Group]) -> Section:
    title = "Staleness"
    text = "Own updates since a replica last agreed with the peers it listens to: share of all updates."
    able = [g for g in shown if g.runs[0].replicas > 1 and g.staleness_counts]
    if not able:
        return Section(title, "None of these runs has several replicas that counted staleness.")
    largest = max(max(group.staleness_counts) for group in able)
    drawn = [
        figures.svg(
            drawings.histogram(
                group.staleness_counts,
                largest,
                group.index,
                textwrap.shorten(group.label, 36, placeholder=" …"),
            ),
            3.2,
            2.3,
            name=f"staleness of {group.label}",
        )
        for group in able
    ]
    return Section(title, text, figures=drawn, layout="four")


def disagreement(shown: Sequence[Group]) -> Section:
    """The relative disagreement of several runs, on a logarithmic axis."""
    able = [g for g in _having(shown, "disagreement") if g.runs[0].replicas > 1]
    if not able:
        return Section("Disagreement", "None of these runs has several replicas that recorded disagreement.")
    zero = [g.label for g in able if not any(_positive(run) for run in g.runs)]
    drawable = [g for g in able if g.label not in zero]
    text = "Distance of the replicas from their mean, relative to its length: √(mean ‖xᵢ − mean‖²) / ‖mean‖."
    note = f"Exactly 0 throughout, so not on this axis: {', '.join(zero)}." if zero else ""
    if not drawable:
        return Section("Disagreement", text, note=note)
    draw = drawings.lines(
        drawable, "disagreement", "total_env_steps", "disagreement relative to ‖mean‖", log_y=True
    )
    drawn = [figures.svg(draw, 9.4, 3.7, name="disagreement")]
    return Section("Disagreement", text, legend(drawable), drawn, layout="wide", note=note)


def timeline(shown: Sequence[Group]) -> Section:
    many = sum(len(group.runs) for group in shown) > 8
    chosen: list[tuple[str, RecordedRun]] = []
    for group in shown:
        runs = group.runs[:1] if many else group.runs
        chosen += [(_name(group, run), run) for run in runs]
    note = "Of several runs of a strategy, the first." if many and any(len(g.runs) > 1 for g in shown) else ""
    return timelines(chosen, note)


def _name(group: Group, run: RecordedRun) -> str:
    return f"{group.label}, seed {run.run.get('seed')}" if len(group.runs) > 1 else group.label


def _having(shown: Sequence[Group], key: str) -> list[Group]:
    return [group for group in shown if any(run.has(key) for run in group.runs)]


def _positive(run: RecordedRun) -> bool:
    return any(bool((series.value > 0).any()) for series in run.series("disagreement").values())
