"""The table of a page about several runs: a row for each group of runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from murmurate.record import groups
from murmurate.record.console import clock
from murmurate.record.differences import notes
from murmurate.record.figures import byte_size, number_text
from murmurate.record.groups import RunGroup
from murmurate.record.score_sections import main_figure
from murmurate.record.sections import group_key

Cell = tuple[str, str]  # main text, small text below it
_NONE = "\N{EN DASH}"


def table(shown: Sequence[RunGroup]) -> dict[str, Any]:
    """The table of one or more groups: its headings ("heads", ``Cell``s), its "rows" (each a "key" of the
    legend, "cells", and "numbers" for programs), and a "note" below them."""
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
    rows = [
        {
            "key": group_key(group),
            "cells": _cells(group, returns.get(group.world)),
            "numbers": _numbers(group, returns.get(group.world)),
        }
        for group in shown
    ]
    differences = notes([run for group in shown for run in group.runs])
    return {"heads": heads, "rows": rows, "note": " ".join([_note(shown, references), *differences])}


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


def _numbers(group: RunGroup, reference: float | None) -> dict[str, Any]:
    """The numbers of a row, by the names of ``summary.json`` where they have one: means over the runs, except
    for counts of runs and replicas, the greatest and the median staleness, and medians in "reached"."""
    first, (mean, error) = group.runs[0], _mean_and_error(group)
    return {
        "group": group.label,
        "recipe": first.recipe,
        "strategy": first.strategy_name,
        "replicas": first.replicas,
        "folders": [str(run.folder) for run in group.runs],
        "figure": main_figure([group]).name,
        "mean": mean,
        "stderr": error,
        **{fact: _mean_fact(group, fact) for fact in ("train_return_mean", "env_steps", "frames")},
        "virtual_seconds" if first.virtual else "wall_seconds": group.mean(groups.seconds),
        "env_steps_per_second": group.mean(groups.env_steps_per_second),
        "reached": None if reference is None else {"return": reference, **_first_reached(group, reference)},
        "waiting_share": group.mean(groups.waiting_share),
        "staleness_median": groups.median(group.staleness_counts),
        "staleness_max": max(group.values(lambda run: run.fact("staleness_max")), default=None),
        "disagreement_final": _mean_fact(group, "disagreement_final"),
        "bytes_exchanged": group.mean(groups.bytes_exchanged),
        "bytes_per_update": group.mean(groups.bytes_per_update),
        "dead_replicas": sum(len(run.dead_replicas) for run in group.runs),
    }


def _mean_fact(group: RunGroup, fact: str) -> float | None:
    return group.mean(lambda run: run.fact(fact))


def _frames(group: RunGroup) -> float | None:
    """Mean frames of the emulator, over the runs in which they differ from env steps."""
    return group.mean(lambda run: None if run.fact("frames") == run.fact("env_steps") else run.fact("frames"))


def _evaluation(group: RunGroup) -> str:
    mean, error = _mean_and_error(group)
    return number_text(mean) if error is None else f"{number_text(mean)} ± {number_text(error)}"


def _mean_and_error(group: RunGroup) -> tuple[float | None, float | None]:
    """Mean and standard error of the main figure: over the runs if several have it, else over the games, or
    other examples, of the only one that has."""
    figure, headline = main_figure([group]), group.runs[0].run.get("headline") or {}
    means = group.values(lambda run: run.fact(figure.name))
    if not means:
        return None, None
    spread = headline.get("spread") if headline.get("metric") == figure.name else ""
    error = _mean_fact(group, spread or "eval_return_stderr")
    if len(means) > 1:
        error = statistics.stdev(means) / len(means) ** 0.5
    return statistics.fmean(means), error


def _reached(group: RunGroup, reference: float | None) -> Cell:
    """Median env steps and seconds at which the runs first had a mean return of ``reference``."""
    if reference is None:
        return _NONE, ""
    reached = _first_reached(group, reference)
    runs = reached["runs"]
    of_runs = f"{runs} of {len(group.runs)} runs" if 0 < runs < len(group.runs) else ""
    if reached["env_steps"] is None:
        return "not reached", of_runs
    seconds = f"{number_text(reached['seconds'])} s"
    return number_text(round(reached["env_steps"])), f"{seconds} ({of_runs})" if of_runs else seconds


def _first_reached(group: RunGroup, reference: float) -> dict[str, Any]:
    """Medians over all runs, None if they are not known: a run that never reached ``reference`` is later than
    all that did, so that two fast runs of five are not ahead of five that are slower."""
    found = [groups.reaches(run, reference) for run in group.runs]
    known = [each or (math.inf, math.inf) for each in found]
    medians = [statistics.median(values) for values in zip(*known, strict=True)]
    steps, seconds = (value if math.isfinite(value) else None for value in medians)
    return {"env_steps": steps, "seconds": seconds, "runs": sum(each is not None for each in found)}


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
            "runs, and for the reference return their medians, in which a run that never reached it is the "
            "last."
        )
    for group in shown:
        seeds = Counter(seed for run in group.runs if (seed := run.run.get("seed")) is not None)
        if repeated := [str(seed) for seed, count in seeds.items() if count > 1]:
            sentences.append(
                f"Several runs of {group.label} have the seed {', '.join(repeated)}. If such runs are "
                "reproducible they are one run, counted more than once."
            )
    if references:
        sentences.append("A return is reached by the mean of the last 100 episodes of all replicas together.")
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
        if not all(run.virtual for group in shown for run in group.runs):
            sentences.append(
                "Simulated runs count the bytes of means differently than real ones: do not compare these."
            )
    return " ".join(sentences)
