"""The figure that a study optimises, and how it develops while a trial trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from murmurate.errors import Refusal, RunFailed
from murmurate.record.reader import Record, Tail
from murmurate.training.run import Run

STEPS = 10  # a trial's figure is compared with the others' at each tenth of its budget
_RETURNS = ("eval_return_mean", "train_return_mean", "best_eval_return_mean")


@dataclass(frozen=True)
class Objective:
    """The figure that a study optimises. name: its name in ``summary.json``. recorded: the field of
    ``metrics.jsonl`` that stands for it while a trial trains."""

    name: str
    minimize: bool = False

    @property
    def direction(self) -> str:
        return "minimize" if self.minimize else "maximize"

    @property
    def recorded(self) -> str:
        return "return_mean" if self.name in _RETURNS else self.name

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
    """``NAME``, ``NAME:max`` or ``NAME:min``; None: the figure that the run's evaluation is about.

    Without a direction, lower is better if the curve of the figure says so, else higher. Raises Refusal.
    """
    headline = run.evaluation.headline
    curves = {c.metric: c for c in (*(() if headline is None else (headline,)), *run.evaluation.curves)}
    default = next(iter(curves), "eval_return_mean")
    name, colon, direction = (text or default).partition(":")
    if (colon and direction not in ("min", "max")) or not name:
        raise Refusal(f"--objective takes NAME, NAME:max or NAME:min, not '{text}'.")
    lower = direction == "min" if colon else name in curves and curves[name].lower_is_better
    return Objective(name, lower)


class Progress:
    """Follows a trial's ``metrics.jsonl``: the objective at each tenth of the run's budget.

    run: the trial's run, whose end is the budget. folder: the trial's folder, which need not exist yet.
    """

    def __init__(self, objective: Objective, run: Run, folder: Path) -> None:
        self._objective, self._run = objective, run
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
                if _is_number(value := latest.get(self._objective.recorded))
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
