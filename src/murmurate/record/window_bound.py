"""Proposition 1 of GALA over windows of a real run, from the versions that its replicas recorded.

Within a window every vector, a replica's own or a published one, is a linear combination of the vectors at
the window's beginning and of the updates s since, with coefficients c that the recorded averagings give:

    ||X - mean||_F <= rho ||Z_0 - mean||_F + sum_s ||(I - J) c_s||_2 ||alpha g_s||,   rho = ||(I - J) C_0||_2

X [n, d] are the vectors that a replica compared: its own and the newest published ones of the others. J is
the matrix that averages them. c_s [n] are their coefficients on update s, C_0 [n, m] those on
Z_0 [m, d]: the replicas' vectors at the window's beginning, and the older messages that were read in the
window, as far as X depends on them. (Assran et al. 2019, section 3.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from murmurate.record.runs import RecordedRun

# What coefficients refer to: ("start", member, 0), ("message", member, version) or ("update", member, step)
Source = tuple[str, int, int]


@dataclass(frozen=True)
class WindowBound:
    """One comparison in one window, which began at ``total_env_steps``.

    distance: recorded ||X - mean||_F. updates: the sum over s. carried: the term with rho. There
    ||Z_0 - mean||_F is not known: the run's largest distance stands for it, times sqrt(m / n) where m > n.
    rho: as above.
    """

    total_env_steps: float
    distance: float
    updates: float
    carried: float
    rho: float

    @property
    def bound(self) -> float:
        return self.updates + self.carried


def window_bounds(run: RecordedRun) -> list[WindowBound]:
    """The comparisons of all complete windows, in order of time; empty where a run recorded none."""
    windows: dict[float, dict[int, dict[str, Any]]] = {}
    for record in run.records:
        if (window := record.get("gossip_window")) is not None:
            windows.setdefault(float(window["window"]), {})[int(record["replica"])] = window
    comparisons = []
    for begin, members in sorted(windows.items()):
        rows = _CoefficientRows(members)  # for all comparisons in the window, which have most rows in common
        for rank, window in sorted(members.items()):
            if (terms := _terms(rank, window["cut"], rows)) is not None:
                comparisons.append((begin, window["cut"]["distance"], *terms))
    largest = max((distance for _, distance, *_ in comparisons), default=0.0)
    return [
        WindowBound(begin, distance, updates, rho * largest * row_ratio**0.5, rho)
        for begin, distance, updates, rho, row_ratio in comparisons
    ]


def _terms(rank: int, cut: Mapping[str, Any], rows: _CoefficientRows) -> tuple[float, float, float] | None:
    """(sum over the updates, rho, m / n or 1 if that is more) of ``rank``'s comparison ``cut``; None where it
    used what a replica did outside of its recorded window."""
    try:
        compared = [rows.after(rank, int(cut["steps"]))]
        compared += [rows.message(int(peer), int(version)) for peer, version in cut["versions"].items()]
    except LookupError:
        return None
    sources = sorted({source for row in compared for source in row})
    c = np.array([[row.get(source, 0.0) for source in sources] for row in compared])
    deviations = c - c.mean(0)
    is_update = np.array([source[0] == "update" for source in sources])
    norms = np.array([rows.norm(source) for source in sources])
    on_start = deviations[:, ~is_update]
    rho = float(np.linalg.norm(on_start, 2)) if on_start.size else 0.0
    total = float((np.linalg.norm(deviations, axis=0) * norms)[is_update].sum())
    return total, rho, max(1.0, on_start.shape[1] / len(compared))


class _CoefficientRows:
    """A row is the coefficients of one vector or message, by source. Rows are computed when they are needed.

    Raises LookupError for a step or a message outside of the recorded windows.
    """

    def __init__(self, members: Mapping[int, Mapping[str, Any]]) -> None:
        self._steps: dict[int, Sequence[Any]] = {rank: window["steps"] for rank, window in members.items()}
        self._latest: dict[int, dict[Source, float]] = {rank: {("start", rank, 0): 1.0} for rank in members}
        self._steps_done: dict[int, int] = dict.fromkeys(members, 0)
        self._published: dict[tuple[int, int], dict[Source, float]] = {}  # by rank and index of the step
        self._after: dict[tuple[int, int], dict[Source, float]] = {}

    def after(self, rank: int, steps: int) -> dict[Source, float]:
        """The row of ``rank``'s vector after ``steps`` of its steps."""
        self._advance([(rank, steps)])
        return self._after[rank, steps] if steps else {("start", rank, 0): 1.0}

    def message(self, rank: int, version: int) -> dict[Source, float]:
        """The row of a published vector."""
        step = version - int(self._steps[rank][0][1])
        if step < 0:
            return {("message", rank, version): 1.0}
        self._advance([(rank, step)])
        return self._publication(rank, step)

    def norm(self, source: Source) -> float:
        kind, rank, step = source
        return float(self._steps[rank][step][0]) if kind == "update" else 0.0

    def _advance(self, wanted: list[tuple[int, int]]) -> None:
        """Compute steps up to the ``wanted`` (rank, number of steps), each message before it is read."""
        while wanted:
            rank, steps = wanted[-1]
            if steps > len(self._steps[rank]):
                raise LookupError("a step after the window")
            k = self._steps_done[rank]
            if k >= steps:
                wanted.pop()
                continue
            missing = self._step(rank, k)
            if missing is not None:
                if missing in wanted:
                    raise LookupError("messages that were read before they were published")
                wanted.append(missing)

    def _step(self, rank: int, k: int) -> tuple[int, int] | None:
        """Compute a step: update, publish, average. Returns None, or, where a message that it read is not
        known yet, the (rank, number of steps) that come before its publication."""
        rows = [self._publication(rank, k)]
        for name, version in self._steps[rank][k][2].items():
            peer = int(name)
            before = int(version) - int(self._steps[peer][0][1])
            if before > self._steps_done[peer]:
                return peer, before
            rows.append(self.message(peer, int(version)))
        mean: dict[Source, float] = {}
        for row in rows:
            for source, share in row.items():
                mean[source] = mean.get(source, 0.0) + share / len(rows)
        self._latest[rank] = self._after[rank, k + 1] = mean
        self._steps_done[rank] = k + 1
        return None

    def _publication(self, rank: int, k: int) -> dict[Source, float]:
        """The row that step ``k`` publishes, once the steps before it are computed.

        It does not depend on the messages that the step reads: these may have been published after it.
        """
        if (rank, k) not in self._published:
            steps = self._steps[rank]
            if k >= len(steps) or int(steps[k][1]) != int(steps[0][1]) + k:
                raise LookupError("a publication that was not recorded")
            self._published[rank, k] = {**self._latest[rank], ("update", rank, k): 1.0}
        return self._published[rank, k]
