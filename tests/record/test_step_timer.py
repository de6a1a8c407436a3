"""Spans tile a burst and count nothing twice; outside of bursts only staleness is counted."""

from __future__ import annotations

import collections
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from murmurate.cli.main import main
from murmurate.fabric.interface import Traffic
from murmurate.record.reader import read_metrics
from murmurate.record.step_timer import KINDS, StepTimer, TraceSchedule, rounded
from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.replicator import BoundReplica
from murmurate.strategies.interface import Strategy


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Channel:
    """As much of a fabric's channel as a timer and the strategy below look at."""

    clock: Clock
    traffic: Traffic = field(default_factory=Traffic)


@dataclass
class Scripted(Strategy):
    """Waits 3 s, exchanges for 1 s, updates for 2 s, exchanges for 0.5 s."""

    staleness: int = 0

    def step(self, replica: Replica, fabric: Channel) -> Exchange:
        clock = fabric.clock
        clock.now += 3.0
        fabric.traffic.waiting_seconds += 3.0
        clock.now += 1.0
        replica.update()
        clock.now += 0.5
        return Exchange(1, 2, self.staleness)


def scripted(schedule: TraceSchedule) -> tuple[StepTimer, Replica, Clock, Scripted]:
    clock = Clock()
    channel = Channel(clock)
    replica = Replica("model", torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    update = replica.update

    def lasting() -> None:
        update()
        clock.now += 2.0

    strategy = Scripted()
    replica.exchange = lambda r: strategy.step(r, channel)
    replica.update = lasting
    timer = StepTimer(clock, [BoundReplica(replica, strategy, channel)], schedule=schedule)
    return timer, replica, clock, strategy


def turn(timer: StepTimer, replica: Replica, clock: Clock) -> None:
    clock.now += 10.0
    timer.lap("collect")
    clock.now += 4.0
    replica.follow(torch.ones(3))
    clock.now += 0.25
    timer.lap("learn")
    clock.now += 0.5  # recording: has no kind
    timer.end_iteration()


def test_spans_of_one_turn_by_hand() -> None:
    schedule = TraceSchedule(
        first_seconds=21.0, growth=1e9, seconds=21.0, least_iterations=1, longest_pause_seconds=1e9
    )
    timer, replica, clock, _ = scripted(schedule)
    turn(timer, replica, clock)  # before the burst, which begins at its end, at 21.25
    assert "spans" not in timer.fields()
    turn(timer, replica, clock)
    found = timer.fields()["spans"]
    assert found == [
        ["collect", 21.25, 10.0],
        ["learn", 31.25, 4.0],
        ["wait", 35.25, 3.0],
        ["exchange", 38.25, 1.0],
        ["learn", 39.25, 2.0],
        ["exchange", 41.25, 0.5],
        ["learn", 41.75, 0.25],
    ]
    turn(timer, replica, clock)
    assert "spans" not in timer.fields(last=True)


def test_waiting_is_that_of_all_channels_and_the_spans_of_a_burst_have_all_of_it() -> None:
    timer, replica, clock, _ = scripted(TraceSchedule(first_seconds=1e-6, seconds=1.0, least_iterations=2))
    barrier = Channel(clock)
    timer._channels.append(barrier)
    clock.now = 1.0
    timer.end_iteration()  # the burst begins
    for _ in range(2):
        clock.now += 7.0
        barrier.traffic.waiting_seconds += 7.0
        turn(timer, replica, clock)
    assert timer.waiting_seconds == 2 * (3.0 + 7.0)
    spans = timer.fields()["spans"]
    assert sum(length for kind, _, length in spans if kind == "wait") == pytest.approx(timer.waiting_seconds)


def test_a_burst_leaves_nothing_behind_and_learning_is_the_same() -> None:
    timer, replica, clock, _ = scripted(TraceSchedule(first_seconds=1e9))
    timed, other, other_clock, _ = scripted(
        TraceSchedule(first_seconds=1e-6, seconds=1.0, least_iterations=2)
    )
    other.params.data.copy_(replica.params.data)
    before = set(vars(other))
    for _ in range(5):
        turn(timer, replica, clock)
        turn(timed, other, other_clock)
    timed.fields(last=True)
    assert torch.equal(replica.params, other.params)
    # the update of ``scripted`` went with what the burst had put in its place
    assert set(vars(other)) <= before - {"update"}


def test_a_burst_ends_by_time_turns_or_number_of_spans() -> None:
    for limits, turns in (
        ({"seconds": 1.0, "least_iterations": 3}, 3),
        ({"seconds": 100.0, "least_iterations": 1}, 5),
        ({"seconds": 1e9, "most_spans": 14}, 2),
    ):
        timer, replica, clock, _ = scripted(
            TraceSchedule(first_seconds=1.0, growth=1e9, longest_pause_seconds=1e9, **limits)
        )
        for _ in range(20):
            turn(timer, replica, clock)
        spans = timer.fields()["spans"]
        assert sum(kind == "collect" for kind, *_ in spans) == turns, limits


def test_every_step_is_counted_once_by_its_staleness() -> None:
    timer, replica, clock, strategy = scripted(TraceSchedule(first_seconds=30.0, seconds=1.0))
    generator = torch.Generator().manual_seed(3)
    expected: collections.Counter[int] = collections.Counter()
    found: collections.Counter[int] = collections.Counter()
    for number in range(60):
        strategy.staleness = int(torch.randint(0, 50, (), generator=generator))
        expected[strategy.staleness] += 1
        turn(timer, replica, clock)
        if number % 7 == 0:
            found.update(timer.fields().get("staleness_counts", {}))
    found.update(timer.fields().get("staleness_counts", {}))
    assert found == expected
    assert "staleness_counts" not in timer.fields()


def test_rounding_is_exact_below_64_and_then_at_most_an_eighth_less() -> None:
    assert [rounded(v) for v in range(64)] == list(range(64))
    for value in range(64, 5000):
        assert value * 7 / 8 < rounded(value) <= value
    assert len({rounded(v) for v in range(10**6)}) < 64 + 8 * 15


@pytest.mark.parametrize("now", [0.0, 0.99, 1.0, 3.375, 59.0, 3600.0])
def test_bursts_begin_at_times_that_do_not_depend_on_who_asks(now: float) -> None:
    schedule = TraceSchedule()
    due = schedule.after(now)
    assert now < due
    assert due - now <= min(max(now * 0.5, 1.0), 60.0) + 1e-9
    # asked at any moment before, the answer is the same or one that comes sooner
    ladder = list(itertools.takewhile(lambda t: t <= due, _ladder(schedule)))
    assert ladder[-1] == due


def _ladder(schedule: TraceSchedule):
    at = 0.0
    while True:
        at = schedule.after(at)
        yield at


def test_a_run_writes_counts_of_all_updates_and_spans_of_known_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = TraceSchedule(first_seconds=1e-3, longest_pause_seconds=0.01, seconds=1e-3)
    monkeypatch.setattr("murmurate.record.step_timer.TraceSchedule", lambda: at_once)
    out = tmp_path / "run"
    command = "train cartpole-gala --launcher inline --replicas 2 --simulators 4 --updates 30"
    command += " --eval-episodes 1 --record-every-seconds 0.05 --seed 5 --strategy elastic"
    assert main([*command.split(), "--out", str(out)]) == 0
    lines = read_metrics(out / "metrics.jsonl")
    for replica in (0, 1):
        counted = collections.Counter()
        mine = [line for line in lines if line["replica"] == replica]
        for line in mine:
            counted.update(line.get("staleness_counts", {}))
        assert counted.total() == mine[-1]["updates"] == 30
    centre = [line for line in lines if line.get("kind") == "centre"]
    assert centre
    assert centre[-1]["member"] == 2
    assert centre[-1]["bytes_exchanged"] >= 0
    spans = [span for line in lines for span in line.get("spans", ())]
    assert {"collect", "learn", "exchange"} <= {kind for kind, *_ in spans} <= set(KINDS)
    for line in lines:
        for (_, start, length), (_, later, _) in itertools.pairwise(line.get("spans", ())):
            assert start + length <= later + 2e-6
    assert json.loads((out / "summary.json").read_text())["exit"] == "finished"
