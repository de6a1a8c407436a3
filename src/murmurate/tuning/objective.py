"""The figure that a study optimises, and how it develops while a trial trains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from murmurate.datasets.interface import DataSet
from murmurate.errors import Refusal, RunFailed
from murmurate.record.reader import Record, Tail
from murmurate.training.run import Run

STEPS = 10  # a trial's figure is compared with the others' at each tenth of its budget
_RETURNS = ("eval_return_mean", "train_return_mean", "best_eval_return_mean")


@dataclass(frozen=True)
class Objective:
    """The figure that a study optimises. name: its name in ``summary.json``."""

    name: str
    minimize: bool = False

    @property
    def direction(self) -> str:
        return "minimize" if self.minimize else "maximize"

    def of(self, summary: Mapping[str, Any]) -> float | None:
        """The figure in a run's summary; None if it is not a finite number.

        Raises RunFailed if it is missing.
        """
        if self.name not in summary:
            figures = sorted(k for k, v in summary.items() if _is_number(v) and k != "seed")
            raise RunFailed(
                f"summary.json has no figure '{self.name}'. Give --objective one of: {', '.join(figures)}."
            )
        value = summary[self.name]
        return float(value) if _is_number(value) and math.isfinite(value) else None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_objective(text: str | None, run: Run) -> Objective:
    """``NAME``, ``NAME:max`` or ``NAME:min``; None: the figure that the run's evaluation is about, of
    validation data where it has such figures.

    Without a direction, lower is better for a loss, and if the curve of the figure, or of one with whose name
    its own begins (``perplexity_bound``), says so; else higher. Raises Refusal.
    """
    headline, validation = run.evaluation.headline, run.evaluation.validation
    curves = {c.metric: c for c in (*(() if headline is None else (headline,)), *run.evaluation.curves)}
    default = next(iter((*validation.values(), *curves)), "eval_return_mean")
    name, colon, direction = (text or default).partition(":")
    if (colon and direction not in ("min", "max")) or not name:
        raise Refusal(f"--objective takes NAME, NAME:max or NAME:min, not '{text}'.")
    lower_curves = tuple(metric for metric, curve in curves.items() if curve.lower_is_better)
    lower = name.endswith("loss") or _recorded(name, run).startswith(lower_curves)
    return Objective(name, direction == "min" if colon else lower)


def check_objective(objective: Objective, run: Run) -> None:
    """Warn of an objective that is measured on test data. Raises Refusal for one of validation data if the
    run's data set has none."""
    headline, validation = run.evaluation.headline, run.evaluation.validation
    if objective.name in validation.values() and not len(cast(DataSet, run.world).divided().validation):
        raise Refusal(
            f"{objective.name} is to be optimised, and no {run.unit} are held out for validation. Set "
            "--world.validation, or name another figure with --objective."
        )
    if validation and headline is not None and objective.name == headline.metric:
        warnings.warn(
            f"{objective.name} is a figure of the test data: the best one of many trials is too good. "
            f"--objective {next(iter(validation.values()))} leaves the test data to the end.",
            stacklevel=2,
        )


def _recorded(name: str, run: Run) -> str:
    """The field of ``metrics.jsonl`` that stands for a figure of ``summary.json`` while a run trains."""
    if name in _RETURNS:
        return "return_mean"
    if name == "eval_success_rate" or name.startswith("eval_figure_"):
        return name.removeprefix("eval_")  # of training episodes
    of_validation = {figure: metric for metric, figure in run.evaluation.validation.items()}
    return of_validation.get(name, name)


class TrialProgress:
    """Follows a trial's ``metrics.jsonl``: the objective at each tenth of the run's budget.

    run: the trial's run, whose end is the budget. folder: the trial's folder, which need not exist yet.
    """

    def __init__(self, objective: Objective, run: Run, folder: Path) -> None:
        self._run, self._recorded = run, _recorded(objective.name, run)
        self._tail = Tail(folder / "metrics.jsonl")
        self._latest: dict[int, Record] = {}
        self._step = 0
        self._previous: tuple[float, float] | None = None  # share, value

    def poll(self) -> list[tuple[int, float]]:
        """(tenth of the budget, mean of the replicas' newest values) for the tenths passed since the last
        call. Interpolated between records, so that a fast run, which has few, does not look better for it."""
        tenths: list[tuple[int, float]] = []
        for record in self._tail.poll():
            if record["replica"] is None or record.get("kind"):
                continue
            self._latest[record["replica"]] = record
            known = [
                float(value)
                for latest in self._latest.values()
                if _is_number(value := latest.get(self._recorded))
            ]
            if known:
                tenths += self._tenths(self._share(), sum(known) / len(known))
        return tenths

    def _tenths(self, share: float, value: float) -> list[tuple[int, float]]:
        previous, self._previous = self._previous, (share, value)
        last = min(STEPS, int(STEPS * share))
        steps = range(self._step + 1, last + 1)
        self._step = max(self._step, last)
        if previous is None:  # there is no value from which to interpolate
            return [(last, value)] if steps else []
        return [(s, float(np.interp(s / STEPS, (previous[0], share), (previous[1], value)))) for s in steps]

    def _share(self) -> float:
        """The part of the budget that is used up."""
        run, newest = self._run, list(self._latest.values())
        shares = [0.0]
        if run.env_steps:
            shares.append(sum(r.get("env_steps") or 0 for r in newest) / run.env_steps)
        if run.updates:
            shares.append(min(r.get("updates") or 0 for r in newest) / run.updates)
        if run.minutes:
            shares.append(max(r["time_seconds"] for r in newest) / 60 / run.minutes)
        return max(shares)
