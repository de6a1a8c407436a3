"""Spans that members recorded in bursts, side by side: when each computed, waited and exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from murmurate.record.runs import RecordedRun
from murmurate.record.step_timer import KINDS

SHOWN_MEMBERS = 12
_MOST_TURNS = 40
_ALIKE = 4.0


@dataclass(frozen=True)
class Span:
    kind: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True)
class Window:
    """A stretch of the run's clock and what each member, by its name, did in it."""

    start_seconds: float
    end_seconds: float
    members: dict[str, list[Span]]
    left_out: int


Burst = list[Span]


def bursts(run: RecordedRun) -> dict[str, list[Burst]]:
    """Each member's bursts in order of time; the centre comes last."""
    sources = {i: list(history) for i, history in run.histories.items()}
    for line in run.members:
        sources.setdefault(int(line["member"]), []).append(line)
    found: dict[str, list[Burst]] = {}
    for name, history in [*((f"replica {i}", sources[i]) for i in sorted(sources)), ("centre", run.centre)]:
        mine = [_burst(record["spans"]) for record in history if isinstance(record.get("spans"), list)]
        if mine := [burst for burst in mine if burst]:
            found[name] = mine
    return found


def _burst(spans: Sequence[Sequence[object]]) -> Burst:
    return [Span(str(kind), float(str(start)), float(str(length))) for kind, start, length in spans]


def window(run: RecordedRun) -> Window | None:
    """The burst nearest to the middle of the run that most members share; None if no member recorded any.

    Of many members a dozen are shown, evenly chosen, the centre among them.
    """
    found = bursts(run)
    if not found:
        return None
    names = [list(found)[i] for i in shown_of(len(found))]
    begun = min(history[0]["time_seconds"] for history in run.histories.values())
    middle = (begun + max(run.last_heard(replica) for replica in run.histories)) / 2

    def rank(burst: Burst) -> tuple[int, float]:
        start, end = burst[0].start, burst[-1].end
        sharing = sum(any(_meet(other, start, end) for other in found[name]) for name in names)
        return -sharing, abs((start + end) / 2 - middle)

    best = min((burst for name in names for burst in found[name]), key=rank)
    shown = {name: _within(found[name], best[0].start, best[-1].end) for name in names}
    together = [spans for spans in shown.values() if spans]
    start = max(spans[0].start for spans in together)
    end = min(spans[-1].end for spans in together)
    if end <= start:  # one after another, as where they take turns
        start, end = best[0].start, best[-1].end
    turns = [span.start for span in best if span.kind == "collect" and start <= span.start < end]
    if len(turns) > _MOST_TURNS:
        end = turns[_MOST_TURNS]
    cut = {name: _cut(spans, start, end) for name, spans in shown.items()}
    members = max(len(found), run.replicas)
    return Window(start, end, cut, members - len(names) if members > SHOWN_MEMBERS else 0)


def shown_of(members: int) -> list[int]:
    """All of few; of many a dozen, evenly chosen, the first and the last among them."""
    if members <= SHOWN_MEMBERS:
        return list(range(members))
    return [int(i) for i in np.linspace(0, members - 1, SHOWN_MEMBERS).round()]


def alike(windows: Sequence[Window]) -> list[Window]:
    """Windows of nearly one length cut to the shortest, so that one centimetre is the same time in all."""
    lengths = [w.end_seconds - w.start_seconds for w in windows]
    if not lengths or max(lengths) > _ALIKE * min(lengths):
        return list(windows)
    ends = [w.start_seconds + min(lengths) for w in windows]
    return [
        Window(
            w.start_seconds, end, {k: _cut(v, w.start_seconds, end) for k, v in w.members.items()}, w.left_out
        )
        for w, end in zip(windows, ends, strict=True)
    ]


def _meet(burst: Burst, start: float, end: float) -> bool:
    return burst[0].start < end and burst[-1].end > start


def _within(all_bursts: Sequence[Burst], start: float, end: float) -> Burst:
    """The spans of those of a member's bursts that meet the stretch."""
    return [span for burst in all_bursts if _meet(burst, start, end) for span in burst]


def _cut(spans: Burst, start: float, end: float) -> Burst:
    clipped = [(s.kind, max(s.start, start), min(s.end, end)) for s in spans]
    return [Span(kind, a, b - a) for kind, a, b in clipped if b > a]


def shares(runs: Sequence[RecordedRun]) -> dict[str, float] | None:
    """Of the replicas' time in bursts, the share of each kind and, under "other", of what has none.

    None if no member recorded any.
    """
    total: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    passed = 0.0
    for run in runs:
        for name, mine in bursts(run).items():
            if name == "centre":
                continue
            for burst in mine:
                passed += burst[-1].end - burst[0].start
                for span in burst:
                    if span.kind in total:
                        total[span.kind] += span.length
    if passed <= 0:
        return None
    known = {kind: length / passed for kind, length in total.items()}
    return {**known, "other": max(0.0, 1.0 - sum(known.values()))}
