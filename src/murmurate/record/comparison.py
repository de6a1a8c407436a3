"""The table of a page about several runs: a row for each group of runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from murmurate.record import groups
from murmurate.record.console import clock
from murmurate.record.figures import byte_size, number_text
from murmurate.record.groups import RunGroup
from murmurate.record.score_sections import main_figure
from murmurate.record.sections import group_key

Cell = tuple[str, str]  # main text, small text below it
_NONE = "\N{EN DASH}"


def table(shown: Sequence[RunGroup]) -> dict[str, Any]:
    """The table of one or more groups: its headings ("heads", ``Cell``s), its "rows" (each a "key" of the
    legend and "cells"), and a "note" below them."""
    references, first = groups.reference_returns(shown), shown[0].runs[0]
    only = next(iter(references.values()))[0] if len(references) == 1 else None
    heads: list[Cell] = [
        ("strategy", "replicas, runs"),
        ("evaluation, greedy", "in training, sampled") if first.plays else (main_figure(shown).title, ""),
        (first.unit, "frames" if any(_frames(g) for g in shown) else ""),
        ("seconds", "h:mm:ss" if any(groups.seconds(r) >= 60 for g in shown for r in g.runs) else ""),
        (f"{first.unit}/s", ""),
        ("to a return" if only is None else f"to return {number_text(only)}", "env steps, seconds"),
        ("waiting", "of the time"),
        ("staleness", "median, max"),
        ("disagreement", "at the end"),
        ("exchanged", "per update"),
        ("dead", ""),
    ]
    returns = {world: value for world, (value, _) in references.items()}
    rows = [{"key": group_key(group), "cells": _cells(group, returns.get(group.world))} for group in shown]
    return {"heads": heads, "rows": rows, "note": _note(shown, references)}


def _cells(group: RunGroup, reference: float | None) -> list[Cell]:
    replicas = group.runs[0].replicas
    replica_count = f"{replicas} replica{'s' if replicas > 1 else ''}"
    run_count = f", {len(group.runs)} runs" if len(group.runs) > 1 else ""
    seconds, waited = group.mean(groups.seconds), group.mean(groups.waiting_share)
    exchanged, per_update = group.mean(groups.bytes_exchanged), group.mean(groups.bytes_per_update)
    frames = _frames(group)
    return [
        (group.label, replica_count + run_count),
        (_evaluation(group), number_text(_mean_fact(group, "train_return_mean"))),
        (number_text(_mean_fact(group, "env_steps")), number_text(frames) if frames else ""),
        (number_text(seconds), clock(seconds) if seconds is not None and seconds >= 60 else ""),
        (number_text(group.mean(groups.env_steps_per_second)), ""),
        _reached(group, reference),
        (_NONE if waited is None or replicas < 2 else f"{waited:.1%}", ""),
        _staleness(group) if replicas > 1 else (_NONE, ""),
        (_scientific_if_small(_mean_fact(group, "disagreement_final")), ""),
        (
            _NONE if exchanged is None else byte_size(exchanged),
            "" if per_update is None else byte_size(per_update),
        ),
        (_dead(group), ""),
    ]


def _mean_fact(group: RunGroup, fact: str) -> float | None:
    return group.mean(lambda run: run.fact(fact))


def _frames(group: RunGroup) -> float | None:
    """Mean frames of the emulator, over the runs in which they differ from env steps."""
    return group.mean(lambda run: None if run.fact("frames") == run.fact("env_steps") else run.fact("frames"))


def _evaluation(group: RunGroup) -> str:
    """Mean ± standard error: over the runs if several have a figure, else over the games, or other examples,
    of the only one that has."""
    figure, headline = main_figure([group]), group.runs[0].run.get("headline") or {}
    means = group.values(lambda run: run.fact(figure.name))
    if not means:
        return number_text(None)
    spread = headline.get("spread") if headline.get("metric") == figure.name else ""
    error = _mean_fact(group, spread or "eval_return_stderr")
    if len(means) > 1:
        error = statistics.stdev(means) / len(means) ** 0.5
    mean = number_text(statistics.fmean(means))
    return mean if error is None else f"{mean} ± {number_text(error)}"


def _reached(group: RunGroup, reference: float | None) -> Cell:
    """Median env steps and seconds at which the runs first had a mean return of ``reference``."""
    if reference is None:
        return _NONE, ""
    reached = [where for run in group.runs if (where := groups.reaches(run, reference)) is not None]
    if not reached:
        return "not reached", ""
    steps, seconds = (statistics.median(values) for values in zip(*reached, strict=True))
    of_runs = "" if len(reached) == len(group.runs) else f" ({len(reached)} of {len(group.runs)} runs)"
    return number_text(round(steps)), f"{number_text(seconds)} s{of_runs}"


def _staleness(group: RunGroup) -> Cell:
    greatest = group.values(lambda run: run.fact("staleness_max"))
    median = number_text(groups.median(group.staleness_counts))
    return median, f"max {number_text(max(greatest))}" if greatest else ""


def _scientific_if_small(value: float | None) -> str:
    return f"{value:.1e}" if value is not None and 0 < abs(value) < 1e-3 else number_text(value)


def _dead(group: RunGroup) -> str:
    dead = sum(len(run.dead_replicas) for run in group.runs)
    return f"{dead} of {sum(run.replicas for run in group.runs)}" if dead else "none"


def _note(shown: Sequence[RunGroup], references: Mapping[str, tuple[float, str]]) -> str:
    sentences = []
    if any(len(group.runs) > 1 for group in shown):
        sentences.append(
            "A row of several runs (seeds) has their means, for the evaluation ± the standard error over the "
            "runs, and for the reference return their medians."
        )
    for world, (value, why) in references.items():
        of_world = f" of {world}" if len(references) > 1 else ""
        sentences.append(f"Return {number_text(value)}{of_world}: {why}.")
    sentences.append(
        "Seconds count from the launcher's start and include the start of the processes. Waiting: for "
        "other members, in a strategy's steps and to agree on when to stop. Bytes per update: all members' "
        "bytes divided by all replicas' updates."
    )
    if any(run.virtual for group in shown for run in group.runs):
        sentences.append("Seconds of simulated runs are virtual ones, of the simulated cluster.")
    return " ".join(sentences)
