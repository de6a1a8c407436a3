"""Spans in which members collect, learn, exchange and wait, in one window of the run's clock.

Members record them in bursts: each metric record may hold the spans of a few iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from murmurate.record.runs import RecordedRun
from murmurate.record.step_timer import KINDS

SHOWN_MEMBERS = 12
_MOST_ITERATIONS = 40  # of a member's loop, that a timeline shows
_SIMILAR_LENGTHS = 4.0  # ratio of lengths up to which timelines are cut to the same length


@dataclass(frozen=True)
class TimelineSpan:
    """kind: one of ``step_timer.KINDS``. start, length: seconds of the run's clock."""

    kind: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True)
class Timeline:
    """The spans of each member, by its name, in a window of the run's clock. left_out: number of members that
    are not shown, if there are more than ``SHOWN_MEMBERS``."""

    start_seconds: float
    end_seconds: float
    members: dict[str, list[TimelineSpan]]
    left_out: int

    @property
    def length(self) -> float:
        return self.end_seconds - self.start_seconds

    def cut(self, start: float, end: float) -> Timeline:
        """What lies between ``start`` and ``end``."""
        return Timeline(start, end, {k: _cut(v, start, end) for k, v in self.members.items()}, self.left_out)


Burst = list[TimelineSpan]


def bursts(run: RecordedRun) -> dict[str, list[Burst]]:
    """Each member's bursts in order of time; the centre comes last."""
    records = {i: list(history) for i, history in run.histories.items()}
    for record in run.members:
        records.setdefault(int(record["member"]), []).append(record)
    histories = {**{f"replica {i}": records[i] for i in sorted(records)}, "centre": run.centre}
    recorded = {
        name: [
            [TimelineSpan(str(kind), float(start), float(length)) for kind, start, length in record["spans"]]
            for record in history
            if isinstance(record.get("spans"), list) and record["spans"]
        ]
        for name, history in histories.items()
    }
    return {name: member_bursts for name, member_bursts in recorded.items() if member_bursts}


def timeline(run: RecordedRun) -> Timeline | None:
    """The window of the burst that most members share, of these the nearest to the middle of the run; None
    without bursts.

    Of many members a dozen are shown, evenly chosen, the centre among them. The window is cut to the time in
    which all of them recorded, and to ``_MOST_ITERATIONS`` iterations.
    """
    bursts_by_member = bursts(run)
    if not bursts_by_member:
        return None
    names = [list(bursts_by_member)[i] for i in shown_members(len(bursts_by_member))]
    begun_seconds = min(history[0]["time_seconds"] for history in run.histories.values())
    middle_seconds = (begun_seconds + max(run.last_heard(replica) for replica in run.histories)) / 2

    # (start, end) of each burst, as arrays: a long run has thousands, and each is compared with all others
    edges = [np.array([(each[0].start, each[-1].end) for each in bursts_by_member[name]]) for name in names]

    def sort_key(burst: Burst) -> tuple[int, float]:
        start, end = burst[0].start, burst[-1].end
        sharing = sum(bool(((each[:, 0] < end) & (each[:, 1] > start)).any()) for each in edges)
        return -sharing, abs((start + end) / 2 - middle_seconds)

    best = min((burst for name in names for burst in bursts_by_member[name]), key=sort_key)
    start, end = best[0].start, best[-1].end
    spans = {
        name: [span for burst in bursts_by_member[name] if _overlap(burst, start, end) for span in burst]
        for name in names
    }
    members = max(len(bursts_by_member), run.replicas)
    uncut = Timeline(start, end, spans, members - len(names) if members > SHOWN_MEMBERS else 0)
    recorded = [member_spans for member_spans in spans.values() if member_spans]
    common_start, common_end = (
        max(member_spans[0].start for member_spans in recorded),
        min(member_spans[-1].end for member_spans in recorded),
    )
    if common_end > common_start:  # else the members recorded one after another
        start, end = common_start, common_end
    iterations = [span.start for span in best if span.kind == "collect" and start <= span.start < end]
    return uncut.cut(start, iterations[_MOST_ITERATIONS] if len(iterations) > _MOST_ITERATIONS else end)


def shown_members(members: int) -> list[int]:
    """Indices of the members to show: all, or a dozen, evenly chosen, the first and the last among them."""
    if members <= SHOWN_MEMBERS:
        return list(range(members))
    return [int(i) for i in np.linspace(0, members - 1, SHOWN_MEMBERS).round()]


def same_length(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Timelines cut to the shortest, so that they have the same scale on the page; uncut if the longest is
    more than ``_SIMILAR_LENGTHS`` times as long as the shortest."""
    lengths = [each.length for each in timelines]
    if not lengths or max(lengths) > _SIMILAR_LENGTHS * min(lengths):
        return list(timelines)
    return [each.cut(each.start_seconds, each.start_seconds + min(lengths)) for each in timelines]


def _overlap(burst: Burst, start: float, end: float) -> bool:
    return burst[0].start < end and burst[-1].end > start


def _cut(spans: Burst, start: float, end: float) -> Burst:
    clipped = [(s.kind, max(s.start, start), min(s.end, end)) for s in spans]
    return [TimelineSpan(kind, a, b - a) for kind, a, b in clipped if b > a]


def shares(runs: Sequence[RecordedRun], waiting: float | None = None) -> dict[str, float] | None:
    """Share of the replicas' time in bursts by kind of span, and "other" for the rest; None without bursts.

    waiting: share of waiting in the whole run (``groups.waiting_share``), used instead of the share in the
    bursts, so that it is the same number everywhere; the other kinds share the rest as in the bursts.
    """
    total: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    burst_seconds = 0.0
    for run in runs:
        for burst in [burst for name, each in bursts(run).items() if name != "centre" for burst in each]:
            burst_seconds += burst[-1].end - burst[0].start
            for span in burst:
                if span.kind in total:
                    total[span.kind] += span.length
    if burst_seconds <= 0:
        return None
    by_kind = {kind: length / burst_seconds for kind, length in total.items()}
    if waiting is not None and by_kind["wait"] < 1.0:
        scale = (1.0 - waiting) / (1.0 - by_kind["wait"])
        by_kind = {kind: waiting if kind == "wait" else share * scale for kind, share in by_kind.items()}
    return {**by_kind, "other": max(0.0, 1.0 - sum(by_kind.values()))}
