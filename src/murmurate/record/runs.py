"""A run folder read from disk: the run's settings, summary, events and metrics over time."""

from __future__ import annotations

import math
import re
import reprlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal, quoted
from murmurate.record.kinds import RUN, SUMMARY, Kinds, first_unsound
from murmurate.record.reader import Record, read_metrics
from murmurate.record.stored import read_object, refuse_foreign

Array = NDArray[np.float64]
Axis = Literal["total_env_steps", "time_seconds", "total_bytes"]
GRID_POINTS = 400


def shown_recipe(recipe: str) -> str:
    """A recipe's name for a title or a legend: without the folder of a file of the user's own."""
    return re.sub(r"^env:.*/", "env:", recipe)


@dataclass(frozen=True)
class Series:
    """One metric of one replica, a point for each record: [K] arrays, ascending in time."""

    time_seconds: Array
    total_env_steps: Array
    total_bytes: Array
    value: Array

    def x(self, axis: Axis) -> Array:
        values: Array = getattr(self, axis)
        return values


@dataclass(frozen=True)
class Evaluations:
    """The headline figure of a run's evaluations while it learned: [K] arrays, ascending in time.

    time_seconds: when the evaluated parameters were saved. env_steps: of all replicas together then. error:
    standard error of ``mean``, NaN where unknown. low, high: the lowest and highest return of a game; None
    unless each evaluation recorded the returns of all its games.
    """

    time_seconds: Array
    env_steps: Array
    mean: Array
    error: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True)
class RecordedRun:
    """run: run.json. summary: summary.json (empty while the run goes on, or if it was killed).

    The lines of metrics.jsonl by kind, each list in order of time. records: of replicas. members: of single
    replicas, where a record of ``records`` stands for many. centre: of the strategy's centre, if it has one.
    evaluated: of evaluations during training.
    """

    folder: Path
    run: dict[str, Any]
    summary: dict[str, Any]
    records: list[Record] = field(repr=False)
    events: list[Record] = field(repr=False)
    centre: list[Record] = field(default_factory=list, repr=False)
    members: list[Record] = field(default_factory=list, repr=False)
    evaluated: list[Record] = field(default_factory=list, repr=False)

    @property
    def virtual(self) -> bool:
        """Whether times are seconds of a simulated cluster."""
        return "simulated" in self.run

    @property
    def recipe(self) -> str:
        return str(self.run["recipe"])

    @property
    def strategy(self) -> dict[str, Any]:
        """The strategy's name under "name", and its fields."""
        stored = self.run.get("strategy", self.summary.get("strategy", {}))
        return dict(stored) if isinstance(stored, dict) else {"name": str(stored)}

    @property
    def strategy_name(self) -> str:
        return str(self.strategy.get("name", "unknown strategy"))

    @property
    def replicas(self) -> int:
        return int(self.run.get("replicas") or 1 + max(self.histories))

    @property
    def unit(self) -> str:
        """The unit of ``env_steps``: "env steps", "documents", ..."""
        return str(self.run.get("unit", "env steps"))

    @property
    def plays(self) -> bool:
        """Whether the run learns in simulators and has returns."""
        return self.unit == "env steps"

    @property
    def curves(self) -> list[dict[str, str]]:
        """The curves of the run's evaluation: "metric", "title", "label" and "text" of each."""
        return list(self.run.get("curves") or ())

    @cached_property
    def evaluations(self) -> Evaluations | None:
        """Evaluations while the run learned; None if there were none."""
        curve = self.run.get("headline")
        measured = [r for r in self.evaluated if curve and isinstance(r.get(curve["metric"]), (int, float))]
        if not curve or not measured:
            return None

        def column(key: str, fallback: str = "") -> Array:
            return np.array([float(r[key if r.get(key) is not None else fallback]) for r in measured])

        errors = [r.get(curve.get("spread") or "") for r in measured]
        games = [r["returns"] for r in measured if r.get("returns") and None not in r["returns"]]
        low, high = (
            np.array([float(pick(returns)) for returns in games]) if len(games) == len(measured) else None
            for pick in (min, max)
        )
        return Evaluations(
            column("snapshot_seconds", "time_seconds"),
            column("env_steps"),
            column(curve["metric"]),
            np.array([math.nan if error is None else float(error) for error in errors]),
            low,
            high,
        )

    @property
    def label(self) -> str:
        replicas = "" if self.replicas == 1 else f", {self.replicas} replicas"
        return f"{shown_recipe(self.recipe)}, {self.strategy_name}{replicas}"

    @property
    def command(self) -> tuple[str, bool]:
        """The command that repeats the run (in lines, if it was resumed with other settings), and whether it
        was recorded (if not, it is put together here)."""
        stored = self.run.get("command")
        if stored:
            return (stored if isinstance(stored, str) else shlex.join(map(str, stored))), True
        words = ["murmurate", "train", self.recipe, "--strategy", self.strategy_name]
        words += ["--replicas", str(self.replicas)]
        for key in ("env_steps", "updates", "minutes", "seed", "launcher"):
            if self.run.get(key) is not None:
                words += [f"--{key.replace('_', '-')}", str(self.run[key])]
        return shlex.join(words), False

    @cached_property
    def histories(self) -> dict[int, list[Record]]:
        """Each replica's records in order of time."""
        histories: dict[int, list[Record]] = {}
        for record in sorted(self.records, key=lambda r: r["time_seconds"]):
            histories.setdefault(int(record["replica"]), []).append(record)
        return dict(sorted(histories.items()))

    @cached_property
    def deaths(self) -> dict[int, float]:
        """``time_seconds`` of the first report of each dead replica's death.

        A resume restarts all replicas. A replica that the summary lists as dead, without such a report, is
        taken to have died at its last record.
        """
        deaths: dict[int, float] = {}
        for event in self.events:
            if event.get("event") == "resumed":
                deaths.clear()
            member = event.get("member", event.get("replica"))
            if member is None:
                continue
            if event.get("event") == "died":
                deaths.setdefault(int(member), float(event["time_seconds"]))
            elif event.get("event") == "joined":
                deaths.pop(int(member), None)
        for member in self.summary.get("dead_replicas") or ():
            deaths.setdefault(int(member), self.last_heard(int(member)))
        return deaths

    @property
    def dead_replicas(self) -> list[int]:
        """The replicas that were dead at the end; a centre has the rank after them."""
        return [rank for rank in self.fact("dead_replicas") or () if rank < self.replicas]

    def last_heard(self, replica: int) -> float:
        """``time_seconds`` of the replica's last record; 0 if it has none."""
        history = self.histories.get(replica)
        return float(history[-1]["time_seconds"]) if history else 0.0

    def has(self, key: str) -> bool:
        return any(isinstance(record.get(key), (int, float)) for record in self.records)

    def series(self, key: str) -> dict[int, Series]:
        """``key`` over the run by replica, without replicas that never recorded it as a number."""
        series: dict[int, Series] = {}
        for replica, history in self.histories.items():
            known = [r for r in history if isinstance(r.get(key), (int, float))]
            if known:
                times = np.array([float(r["time_seconds"]) for r in known])
                value = np.array([float(r[key]) for r in known])
                series[replica] = Series(times, self.total_env_steps(times), self.total_bytes(times), value)
        return series

    def total_env_steps(self, times: Array) -> Array:
        """Env steps of all replicas together at each of ``times`` [K], linear between records."""
        return np.interp(times, *self._all_env_steps)

    def seconds_at(self, env_steps: Array) -> Array:
        """The inverse of ``total_env_steps``: the time of each of ``env_steps`` [K]."""
        times, totals = self._all_env_steps
        return np.interp(env_steps, totals, times)

    def total_bytes(self, times: Array) -> Array:
        """Bytes exchanged by all members together, the centre included, at each of ``times`` [K]."""
        return np.interp(times, *self._all_bytes)

    @cached_property
    def _all_env_steps(self) -> tuple[Array, Array]:
        return sum_of_paths([cumulative(history, "env_steps") for history in self.histories.values()])

    @cached_property
    def _all_bytes(self) -> tuple[Array, Array]:
        members = [*self.histories.values(), self.centre]
        return sum_of_paths([cumulative(history, "bytes_exchanged") for history in members])

    def at(self, times: Array, replica: int, key: str) -> Array:
        """Updates or rounds of one replica at ``times`` [K]: 0 at the start, linear between records.

        One that was started again goes on with a peer's number: if that is lower, it has made none there.
        """
        recorded, values = _path(self.histories.get(replica, ()), key)
        made: Array = np.cumsum(np.maximum(np.diff(values, prepend=0.0), 0.0))
        return np.interp(times, recorded, made)

    def mean(self, key: str, axis: Axis) -> tuple[Array, Array] | None:
        """(x [G], mean of ``key`` over the replicas [G]); None if no replica recorded it.

        Between its records a replica counts with the interpolated value; after its last record with the last
        value, or not at all if it died; before its first record not at all.
        """
        series = self.series(key)
        if not series:
            return None
        start = min(s.x(axis)[0] for s in series.values())
        end = max(s.x(axis)[-1] for s in series.values())
        grid = np.linspace(start, end, GRID_POINTS) if end > start else np.array([start])
        rows = np.stack([self._on_grid(replica, s, grid, axis) for replica, s in series.items()])
        counted = (~np.isnan(rows)).sum(0)
        kept = counted > 0
        return grid[kept], np.nansum(rows, 0)[kept] / counted[kept]

    def _on_grid(self, replica: int, series: Series, grid: Array, axis: Axis) -> Array:
        x = series.x(axis)
        dead = replica in self.deaths
        return np.interp(grid, x, series.value, left=np.nan, right=np.nan if dead else None)

    def fact(self, key: str) -> Any:
        """A value of the summary; if that has none, computed from the records; None if unknown."""
        if self.summary.get(key) is not None:
            return self.summary[key]
        end_seconds = max(self.last_heard(replica) for replica in self.histories)
        latest = [history[-1] for history in self.histories.values()]
        if key == "env_steps":
            return sum(int(r.get("env_steps") or 0) for r in latest)
        if key == "updates":
            return int(np.median([r.get("updates") or 0 for r in latest]))
        if key == ("virtual_seconds" if self.virtual else "wall_seconds"):
            return end_seconds
        if key == "env_steps_per_second" and not self.virtual:  # else per wall second, which is unknown
            return self.fact("env_steps") / end_seconds if end_seconds else None
        if key == "train_return_mean":
            last_means = [s.value[-1] for i, s in self.series("return_mean").items() if i not in self.deaths]
            return float(np.mean(last_means)) if last_means else None
        if key == "dead_replicas":
            return sorted(self.deaths)
        if key == "disagreement_final":
            series = self.series("disagreement").values()
            return float(max(series, key=lambda s: s.time_seconds[-1]).value[-1]) if series else None
        if key == "staleness_max":
            return max(
                (float(s.value.max()) for k in _STALENESS for s in self.series(k).values()), default=None
            )
        return None


_STALENESS = ("staleness", "staleness_max")


def cumulative(history: Sequence[Record], key: str) -> tuple[Array, Array]:
    """(times, values) of a cumulative count over one member's records, beginning with 0 at time 0.

    A member that was started again counts from 0 again: the count goes on from what it had reached.
    """
    times, values = _path(history, key)
    return times, ascending(values)


def _path(history: Sequence[Record], key: str) -> tuple[Array, Array]:
    """(times, values) of a count as it was recorded, beginning with 0 at time 0."""
    known = [r for r in history if isinstance(r.get(key), (int, float))]
    times = np.array([0.0, *(float(r["time_seconds"]) for r in known)])
    return times, np.array([0.0, *(float(r[key]) for r in known)])


def ascending(values: Array) -> Array:
    """A count that begins anew at each fall, [K], as one that never falls."""
    increments = np.diff(values)
    return np.cumsum([*values[:1], *np.where(increments < 0, values[1:], increments)])


def sum_of_paths(paths: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The sum of piecewise linear ``paths``, as (times, values).

    Each path is (times, values), begins with the value 0, and is constant after its last point. Raises
    ValueError without a path.

    Faster than interpolating each path at all times.
    """
    corners = np.concatenate([times for times, _ in paths])
    slope_changes, value_jumps = [], []  # at each corner
    for times, values in paths:
        durations, increases = np.diff(times), np.diff(values)
        slopes = np.divide(increases, durations, out=np.zeros_like(increases), where=durations > 0)
        slope_changes.append(np.diff(slopes, prepend=0.0, append=0.0))
        value_jumps.append(np.concatenate([[0.0], np.where(durations > 0, 0.0, increases)]))
    order = np.argsort(corners, kind="stable")
    corners = corners[order]
    slope = np.cumsum(np.concatenate(slope_changes)[order])
    sloped = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(corners))])
    return corners, sloped + np.cumsum(np.concatenate(value_jumps)[order])


def open_run(folder: Path | str) -> RecordedRun:
    """Read a run folder.

    Raises ``Refusal`` if it is not one or holds no records yet, or if run.json or summary.json is damaged.
    Damaged lines of metrics.jsonl are left out with a warning.
    """
    folder = Path(folder)
    refuse_foreign(folder)
    run_file, metrics_file = folder / "run.json", folder / "metrics.jsonl"
    if not metrics_file.is_file():
        raise Refusal(
            f"{folder} is not a run folder: it has no {metrics_file.name}; "
            "give a folder that murmurate train wrote."
        )
    run = _object(run_file, RUN)
    if "recipe" not in run:
        raise Refusal(
            f"{run_file} names no recipe, so another program wrote it; "
            "give a folder that murmurate train wrote."
        )
    summary_file = folder / "summary.json"
    summary = _object(summary_file, SUMMARY) if summary_file.is_file() else {}
    lines = sorted(read_metrics(metrics_file), key=lambda line: line["time_seconds"])
    events = [line for line in lines if line.get("kind") == "event"]
    records = [line for line in lines if line.get("kind") != "event" and line["replica"] is not None]
    centre, members, evaluated = (
        [line for line in lines if line.get("kind") == kind] for kind in ("centre", "member", "evaluation")
    )
    if not records and str(end := summary.get("exit", "")).startswith("failed"):
        raise Refusal(f"{folder} holds no records, as its run {end.rstrip('.')}. Train anew with --out.")
    if not records:
        raise Refusal(
            f"{folder} holds no records yet; wait until the run has learned for some seconds, "
            f"or go on with it: murmurate resume {quoted(folder)}"
        )
    return RecordedRun(folder, run, summary, records, events, centre, members, evaluated)


def _object(path: Path, kinds: Kinds) -> dict[str, Any]:
    """The JSON object in ``path``. Raises Refusal for one that is damaged, or has fields of other kinds."""
    try:
        content = read_object(path)
        if (name := first_unsound(content, kinds)) is not None:
            raise ValueError(f"{name} is {reprlib.repr(content[name])}")
    except (ValueError, OSError) as error:
        raise Refusal(
            f"{path} cannot be read ({error}); restore it from a backup or leave this run out."
        ) from error
    return content
