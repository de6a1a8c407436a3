"""The page of a study: its history, what mattered, and its trials' settings and values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.record.figures import number_text, svg
from murmurate.record.report import render, write_html
from murmurate.record.sections import LegendKey, Section
from murmurate.tuning import drawings
from murmurate.tuning.objective import Objective
from murmurate.tuning.space import Dimension

MOST_ROWS = 200  # of the table of trials
LEAST_TRIALS = 10  # finished trials from which importances are computed


def write_page(
    folder: Path,
    recipe: str,
    study: Any,
    objective: Objective,
    space: Sequence[Dimension],
    command: str,
) -> Path:
    """Write ``report.html`` in the study's folder and return its path.

    study: Optuna's, with at least one finished trial. command: the command that trains the best setting.
    Raises Refusal where the page cannot be written.
    """
    trials = study.get_trials(deepcopy=False)
    finished = [trial for trial in trials if trial.state.name == "COMPLETE"]
    best, counts = study.best_trial, [trial.state.name for trial in trials]
    facts = [
        ("best", number_text(best.value), f"{objective.name}, trial {best.number}"),
        ("median", number_text(statistics.median(t.value for t in finished)), "of the finished trials"),
        ("finished", str(len(finished)), "trials"),
        ("pruned", str(counts.count("PRUNED")), "ended before their budget"),
        ("failed", str(counts.count("FAIL")), ""),
    ]
    sections = [
        Section(
            "To train with the best setting",
            code=[command],
            note=f"Its run: {folder}/trial-{best.number:04d}",
        ),
        _history(trials, objective),
        _importances(study, finished, space),
        _slices(finished, objective, space),
        _coordinates(finished, objective, space),
        _table(trials, objective, space),
    ]
    shown = {
        "title": f"Tuning of {recipe}",
        "subtitle": f"{objective.name}, {objective.direction}d over {len(trials)} trials",
        "state": "",
        "state_bad": False,
        "facts": [{"name": name, "value": value, "small": small} for name, value, small in facts],
        "comparison": None,
        "sections": sections,
    }
    data = {
        "objective": objective.name,
        "direction": objective.direction,
        "command": command,
        "trials": [
            {"number": t.number, "state": t.state.name.lower(), "value": _finite(t.value), "params": t.params}
            for t in trials
        ],
    }
    return write_html(render(shown, data, [folder]), folder / "report.html")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _history(trials: Sequence[Any], objective: Objective) -> Section:
    keys = [
        LegendKey("a finished trial", "accent", "bar"),
        LegendKey("best so far", "warm"),
        LegendKey("pruned: its last value", "muted", "bar"),
    ]
    draw = drawings.history(trials, objective)
    return Section("History", legend=keys, figures=[svg(draw, 9.4, 3.2, name="history")], layout="wide")


def _importances(study: Any, finished: Sequence[Any], space: Sequence[Dimension]) -> Section:
    """The importance of each field for the better trials (PED-ANOVA, Watanabe et al. 2023).

    Optuna's evaluators take finished trials alone."""
    from optuna import importance

    title = "What mattered"
    if len(finished) < LEAST_TRIALS or len(space) < 2:
        return Section(title, f"Importances need two fields and {LEAST_TRIALS} finished trials.")
    try:
        evaluator = importance.PedAnovaImportanceEvaluator(target_quantile=0.3)
        shares = importance.get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError):
        shares = {}
    if sum(shares.values()) <= 0:
        return Section(title, "The finished trials do not tell the fields apart.")
    text = (
        "Importance of each field: how differently its values are distributed among the best 30% of the "
        "finished trials and among all finished ones (PED-ANOVA, Watanabe et al. 2023), as shares. With few "
        "trials these are noisy. Pruned trials are left out, as they have no value at the end of the budget."
    )
    draw = drawings.bars(list(shares.items()))
    return Section(
        title, text, figures=[svg(draw, 9.4, 0.8 + 0.32 * len(shares), name="importances")], layout="wide"
    )


def _slices(finished: Sequence[Any], objective: Objective, space: Sequence[Dimension]) -> Section:
    svgs = [
        svg(drawings.slice_of(finished, objective, dimension), 3.2, 2.4, name=f"slice of {dimension.name}")
        for dimension in space
    ]
    text = f"{objective.name} of every finished trial against each field; the best trial is marked."
    return Section("Slices", text, figures=svgs, layout="four")


def _coordinates(finished: Sequence[Any], objective: Objective, space: Sequence[Dimension]) -> Section:
    title = "Parallel coordinates"
    if len(space) < 2 or len(finished) < 2:
        return Section(title, "These need two fields and two finished trials.")
    text = "A line for each finished trial; the better a trial, the stronger its line."
    draw = drawings.coordinates(finished, objective, space)
    return Section(title, text, figures=[svg(draw, 11.0, 3.8, name="parallel coordinates")], layout="strips")


def _table(trials: Sequence[Any], objective: Objective, space: Sequence[Dimension]) -> Section:
    def sort_key(trial: Any) -> tuple[bool, float, int]:
        value = 0.0 if trial.value is None else trial.value
        return trial.state.name != "COMPLETE", value if objective.minimize else -value, trial.number

    ordered = sorted(trials, key=sort_key)
    rows = [
        [
            str(trial.number),
            "" if trial.state.name != "COMPLETE" else number_text(trial.value),
            {"COMPLETE": "finished", "PRUNED": "pruned"}.get(trial.state.name, trial.state.name.lower()),
            *(drawings.short_word(trial.params.get(dimension.name, "")) for dimension in space),
        ]
        for trial in ordered[:MOST_ROWS]
    ]
    heads = ["trial", objective.name, "end", *(dimension.name for dimension in space)]
    left_out = len(ordered) - MOST_ROWS
    return Section(
        "Trials", table=(heads, rows), note=f"{left_out} more are in study.db." if left_out > 0 else ""
    )
