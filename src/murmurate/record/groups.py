"""Groups of runs that differ only in their seed, or in where they ran, and numbers of single runs by which
the groups are compared."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.record.differences import contents, differing_files
from murmurate.record.pooled_returns import pooled_returns
from murmurate.record.runs import Axis, RecordedRun, ascending, shown_recipe

Array = NDArray[np.float64]
POINTS = 300  # of a curve
_BEGINNING = 0.05  # share of an axis; replicas whose first value is later have joined late
# what may differ between the runs of one group; ``grouped`` compares "files" by itself
_MAY_DIFFER = frozenset(
    {
        "seed",
        "command",
        "curves",
        "headline",
        "format",
        "files",
        "imports",
        "launcher",
        "loggers",
        "versions",
        "hardware",
        "restarts",
        "hang_after_seconds",
        "record_every_seconds",
        "replay.folder",
        "eval_episodes",
        "eval_max_env_steps",
        "checkpoint_every_env_steps",
        "checkpoint_every_seconds",
        "evaluate_every_env_steps",
        "agent.name",
    }
)
_ROUNDING = 1e-9  # relative error of a mean of returns
_SEED = re.compile(r"(seed[-_]?)\d+")  # in the name of a folder
_DEVICE_NUMBER = re.compile(r":\d+$")
# the settings of a world that say which environment or data set it is, in all packages' worlds
_WORLD_NAMES = ("id", "game", "target", "scenario", "domain", "task", "level", "pixels", "path")


@dataclass(frozen=True)
class GroupCurve:
    """A metric of a group's runs at [G] points of an axis. y: [R, G], a row for each of ``runs``."""

    x: Array
    y: Array
    runs: tuple[RecordedRun, ...]

    @property
    def mean(self) -> Array:
        mean: Array = self.y.mean(0)
        return mean

    @property
    def low(self) -> Array:
        low: Array = self.y.min(0)
        return low

    @property
    def high(self) -> Array:
        high: Array = self.y.max(0)
        return high


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed and in settings that do not affect learning (``_MAY_DIFFER``), and
    had the same files of the user's own.

    index: selects the colour and dashes of the group in all figures. is_single_run_page: whether
    the page is about a single run, this one.
    """

    label: str
    index: int
    runs: tuple[RecordedRun, ...]
    is_single_run_page: bool = False

    @property
    def world(self) -> str:
        """The environment or data set of the runs: only within one are returns and scores compared."""
        stored = self.runs[0].run.get("world")
        if not isinstance(stored, dict):
            return ""
        named = [(key, stored[key]) for key in _WORLD_NAMES if key in stored]
        words = [
            value if isinstance(value, str) else key if value is True else f"{key} {value}"
            for key, value in named
            if value not in ("", None) and value is not False
        ]
        return " ".join(words) or json.dumps(stored, sort_keys=True)

    def curve(self, key: str, axis: Axis) -> GroupCurve | None:
        """``key`` (mean over a run's replicas, or ``pooled_returns``) over the part of ``axis`` that all runs
        with ``key`` have; the first run's own curve if there is no such part, and None without such runs."""
        pooled = key == "return_mean"
        found = [pooled_returns(run, axis) if pooled else run.mean(key, axis) for run in self.runs]
        runs = tuple(run for run, curve in zip(self.runs, found, strict=True) if curve is not None)
        means = [curve for curve in found if curve is not None]
        if not means:
            return None
        start, end = max(x[0] for x, _ in means), min(x[-1] for x, _ in means)
        if not pooled:
            # begin where every replica has a value, but for those that joined late: the mean would jump
            firsts = [s.x(axis)[0] for run in self.runs for s in run.series(key).values()]
            start = max(start, *(x for x in firsts if x <= max(_BEGINNING * end, min(firsts))))
        if end <= start:  # the runs have no part of the axis in common
            (x, y), *_ = means
            return GroupCurve(x, y[None], runs[:1])
        first = max(start, end / 1e4)  # a logarithmic axis cannot begin at 0
        grid = np.geomspace(first, end, POINTS) if axis == "total_bytes" else np.linspace(start, end, POINTS)
        rows = np.stack([np.interp(grid, x, y) for x, y in means])
        return GroupCurve(grid, rows, runs)

    @cached_property
    def staleness_counts(self) -> Counter[int]:
        """Number of updates by staleness, over all runs and replicas."""
        counts: Counter[int] = Counter()
        for run in self.runs:
            counts += staleness_counts(run)
        return counts

    def values(self, fact: Callable[[RecordedRun], float | None]) -> list[float]:
        """``fact(run)`` of each run, without those that are None or not finite."""
        return [value for run in self.runs if (value := fact(run)) is not None and math.isfinite(value)]

    def mean(self, fact: Callable[[RecordedRun], float | None]) -> float | None:
        known = self.values(fact)
        return statistics.fmean(known) if known else None


def only_run(groups: Sequence[RunGroup]) -> RecordedRun | None:
    """The run if the page is about a single one, else None."""
    return groups[0].runs[0] if groups and groups[0].is_single_run_page else None


def grouped(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    """``runs`` in groups, in the order of the groups' first runs.

    Runs of equal settings are in different groups if a file of the user's own was not the same in them. A
    group's label is its strategy's name and those settings that differ between the groups; if that is also
    the label of another group, with the folder of its first run.
    """
    keys = [json.dumps(_settings(run), sort_keys=True) for run in runs]
    by_settings: dict[str, list[RecordedRun]] = {}
    for key, run in zip(keys, runs, strict=True):
        by_settings.setdefault(key, []).append(run)
    changed = {key: differing_files(same) for key, same in by_settings.items()}
    by_files: dict[Any, list[RecordedRun]] = {}
    for key, run in zip(keys, runs, strict=True):
        by_files.setdefault((key, contents(run, changed[key])), []).append(run)
    all_settings = [json.loads(key) for key, _ in by_files]
    labels = [_label(settings, all_settings) for settings in all_settings]
    counts = Counter(labels)
    return [
        # groups of one label differ by a setting that one of them lacks, or by the content of a file
        RunGroup(label if counts[label] == 1 else f"{label} ({members[0].folder})", index, tuple(members))
        for index, (label, members) in enumerate(zip(labels, by_files.values(), strict=True))
    ]


def _settings(run: RecordedRun) -> dict[str, Any]:
    """The settings that all runs of a group share, flat: "recipe", "strategy.name", "strategy.period", ...

    Runs that start from runs of several seeds share a setting, if the paths of these say so:
    ``base/seed-3`` is ``base/seed-*``. Other paths may be of runs that were trained in another way. Devices
    are without their numbers: each seed may have a GPU of its own, whereas a CPU and a GPU may be what is
    compared.
    """
    flat: dict[str, Any] = {"recipe": run.recipe, "replicas": run.replicas}
    for key, value in {**run.run, "strategy": run.strategy}.items():
        settings = value.items() if isinstance(value, dict) else [("", value)]
        for name, setting in settings:
            flat[f"{key}.{name}" if name else key] = setting
    if isinstance(initial := flat.get("initial"), str):
        flat["initial"] = _SEED.sub(r"\1*", initial)
    if isinstance(devices := flat.get("placement.devices"), list):
        flat["placement.devices"] = [_DEVICE_NUMBER.sub("", str(device)) for device in devices]
    return {k: v for k, v in flat.items() if k not in _MAY_DIFFER and k.split(".")[0] not in _MAY_DIFFER}


def _label(settings: dict[str, Any], all_settings: Sequence[dict[str, Any]]) -> str:
    """The label of a group with ``settings``, among groups with ``all_settings``."""
    name = str(settings.get("strategy.name", "unknown strategy"))
    words = [name]
    for key, value in sorted(settings.items(), key=lambda item: (item[0] != "recipe", item[0] != "replicas")):
        # a strategy's settings are compared within that strategy, other settings within the recipe
        shared = "strategy.name" if key.startswith("strategy.") else "recipe"
        compared = [s for s in all_settings if key == "recipe" or s.get(shared) == settings.get(shared)]
        if key == "strategy.name" or all(other.get(key, value) == value for other in compared):
            continue
        if value is None:  # only the groups that have the setting name it
            continue
        if key == "recipe":
            words.insert(0, shown_recipe(str(value)))
        elif key == "replicas":
            words.append(f"{value} replica{'s' if value != 1 else ''}")
        else:
            words.append(f"{key.rsplit('.', 1)[-1].replace('_', ' ')} {value}")
    return ", ".join(words)


# -- numbers of one run -------------------------------------------------------------------------------


def staleness_counts(run: RecordedRun) -> Counter[int]:
    counts: Counter[int] = Counter()
    for record in run.records:
        counted = record.get("staleness_counts")
        if isinstance(counted, dict):
            counts.update({int(value): int(count) for value, count in counted.items()})
    return counts


def median(counts: Counter[int]) -> float | None:
    """The (lower) median of the counted values."""
    half, so_far = counts.total() / 2, 0
    for value, count in sorted(counts.items()):
        so_far += count
        if so_far >= half > 0:
            return float(value)
    return None


def waiting_share(run: RecordedRun) -> float | None:
    """Share of the replicas' time, between their first and last records, spent waiting for others."""
    waited = elapsed = 0.0
    for series in run.series("waiting_seconds").values():
        path = ascending(series.value)  # a replica that was started again counts from 0 again
        waited += float(path[-1] - path[0])
        elapsed += float(series.time_seconds[-1] - series.time_seconds[0])
    return waited / elapsed if elapsed > 0 else None


def seconds(run: RecordedRun) -> float:
    """How long the run took: virtual seconds if it was simulated, else wall time."""
    return float(run.fact("virtual_seconds" if run.virtual else "wall_seconds"))


def env_steps_per_second(run: RecordedRun) -> float | None:
    if not run.virtual:
        value = run.fact("env_steps_per_second")
        return None if value is None else float(value)
    elapsed = seconds(run)
    return float(run.fact("env_steps")) / elapsed if elapsed else None


def bytes_exchanged(run: RecordedRun) -> float | None:
    if run.fact("bytes_exchanged") is not None:
        return float(run.fact("bytes_exchanged"))
    last = max(run.last_heard(replica) for replica in run.histories)
    return float(run.total_bytes(np.array([last]))[0]) if run.has("bytes_exchanged") else None


def exchanges(run: RecordedRun) -> bool:
    """Whether members exchanged bytes after their first records (which count the bytes
    by which all received the same first parameters)."""
    counts = run.series("bytes_exchanged").values()
    return any(bool(series.value[-1] > series.value[0]) for series in counts)


def bytes_per_update(run: RecordedRun) -> float | None:
    """Bytes of all members divided by updates of all replicas."""
    # the line of several replicas has the median of their updates
    lines = [history[-1] for history in run.histories.values()]
    total = sum(int(line.get("updates") or 0) * int(line.get("joined_replicas") or 1) for line in lines)
    exchanged = bytes_exchanged(run)
    return exchanged / total if exchanged is not None and total else None


# -- the reference return ------------------------------------------------------------------------------


def reference_return(groups: Sequence[RunGroup]) -> tuple[float, str] | None:
    """The return until which runs of one world are timed, and a phrase that says why; None if no run recorded
    a return.

    It is the largest ``stop_at_return`` of the runs, if any has one; else what at least half of the groups
    reached, rounded down to two significant digits. A group reached what more than half of its runs did.
    """
    targets = [run.run.get("stop_at_return") for group in groups for run in group.runs]
    known = [float(value) for value in targets if value is not None]
    if known:
        return max(known), "the return at which the runs were to stop"
    best = [statistics.median_low([_highest_return(run) for run in group.runs]) for group in groups]
    best = [value for value in best if value > -math.inf]
    if not best:
        return None
    reached = sorted(best)[(len(best) - 1) // 2]
    step = 10.0 ** (math.floor(math.log10(abs(reached))) - 1) if reached else 1.0
    # 3.3 / 0.1 is 32.99999999999999, and 33 * 0.1 is 3.3000000000000003, which nobody has reached
    rounded_down = min(math.floor(round(reached / step, 6)) * step, reached)
    return rounded_down, "reached by at least half of the strategies"


def reference_returns(groups: Sequence[RunGroup]) -> dict[str, tuple[float, str]]:
    """The ``reference_return`` of each world that has one."""
    worlds = dict.fromkeys(group.world for group in groups)
    found = {world: reference_return([g for g in groups if g.world == world]) for world in worlds}
    return {world: reference for world, reference in found.items() if reference is not None}


def _highest_return(run: RecordedRun) -> float:
    """The highest mean of 100 returns; -inf if the run has no 100 episodes."""
    returns = pooled_returns(run, "total_env_steps", full=True)
    return -math.inf if returns is None else float(returns[1].max())


def reaches(run: RecordedRun, value: float) -> tuple[float, float] | None:
    """The env steps of all replicas, and the seconds, at which the mean of the last 100 returns
    (``pooled_returns``) is first at least ``value``; None if it never is."""
    returns = pooled_returns(run, "total_env_steps", full=True)
    if returns is None:
        return None
    x, y = returns
    reached = np.flatnonzero(y >= value - _ROUNDING * abs(value))
    if not len(reached):
        return None
    after = int(reached[0])
    before = max(after - 1, 0)  # y rises between these two, so x can be interpolated over y
    env_steps = np.interp([value], y[[before, after]], x[[before, after]])
    return float(env_steps[0]), float(run.seconds_at(env_steps)[0])
