"""Silence, exclusion and hand-overs as the launcher decides them, with a clock that is turned by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.fabric.processes.run_state import RunState, TransferRequest
from murmurate.fabric.processes.spawn import DIED, Exit
from murmurate.launch.failure_detector import EXCLUDED, REJOINS, RETRIED, FailureDetector
from murmurate.launch.heartbeats import (
    ENDS_RUN_SECONDS,
    FLOOR_SECONDS,
    STOPPED_SECONDS,
    HeartbeatMonitor,
    patience,
)
from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.training.rejoin import Pace

PACE = 0.1
CAP_SECONDS = 45.0


class Worker:
    """What the detector sees of a worker process."""

    def __init__(self, rank: int, joins: bool = False) -> None:
        self.rank, self.joins = rank, joins
        self.exit: Exit | None = None
        self.killed_because = ""
        self.killed = self.is_stopped = self.dumped = False

    @property
    def ended(self) -> bool:
        return self.exit is not None

    def kill(self, because: str = "") -> None:
        self.killed, self.killed_because = True, because

    def dump_stacks(self) -> bool:
        self.dumped = True
        return True


class Scene:
    """Three replicas that live as the test says, and what the failure detector makes of it."""

    def __init__(self, strategy: str = "all-reduce", replicas: int = 3, **fields: Any) -> None:
        self.now = 1000.0
        self.events: list[tuple[str, int]] = []
        self.messages: list[str] = []
        self.joined: list[tuple[int, int]] = []
        fields = {"hang_after_seconds": CAP_SECONDS, **fields}
        run = dataclasses.replace(
            recipe("cartpole-gala"), strategy=strategies()[strategy](), replicas=replicas, **fields
        )
        self.run_state = RunState(run.members)
        self.run_state.open()
        self.coordinator: Any = SimpleNamespace(
            run_state=self.run_state,
            run=run,
            should_end=False,
            is_saving=False,
            is_admitting=False,
            name=lambda rank: f"member {rank}",
            event=self._event,
            joined=lambda rank, donor: self.joined.append((rank, donor)),
        )
        self.workers = {rank: Worker(rank) for rank in range(run.members)}
        processes: Any = SimpleNamespace(by_rank=self.workers)
        self.detector = FailureDetector(processes, self.coordinator, self._start_again, lambda: self.now)
        self.silent: set[int] = set()
        for rank in range(run.members):
            self.run_state.set_pace(rank, PACE)

    def _event(self, name: str, message: str, member: int, **more: Any) -> None:
        self.events.append((name, member))
        self.messages.append(message)

    def _start_again(self, rank: int) -> None:
        self.workers[rank] = Worker(rank, joins=True)

    def live(self, seconds: float, step: float = 0.1) -> None:
        for _ in range(round(seconds / step)):
            self.now += step
            for worker in self.workers.values():
                if worker.rank not in self.silent and not worker.ended:
                    self.run_state.heartbeat(worker.rank)
            self.detector.poll()

    def die(self, rank: int) -> None:
        self.workers[rank].exit = Exit(DIED)
        self.run_state.mark_dead(rank)
        self.detector.died(self.workers[rank])

    def told(self, rank: int) -> list[str]:
        return [name for name, member in self.events if member == rank]


@pytest.mark.parametrize(
    ("pace", "seconds"),
    [
        (0.0, FLOOR_SECONDS),
        (1e-3, FLOOR_SECONDS),
        (0.25, FLOOR_SECONDS),
        (0.5, 10.0),
        (1.0, 20.0),
        (60.0, 45.0),
    ],
)
def test_the_deadline_follows_the_rounds_between_a_floor_and_a_cap(pace: float, seconds: float) -> None:
    assert patience(pace, CAP_SECONDS) == seconds


def test_the_pace_is_a_high_quantile_that_one_pause_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("murmurate.training.rejoin.time.monotonic", lambda: now[0])
    pace, told = Pace(), []
    for number in range(200):
        now[0] += 10.0 if number == 150 else 0.2 if number % 10 == 0 else 0.1
        told.append(pace.tick())
    known = [seconds for seconds in told if seconds is not None]
    assert known[-1] == pytest.approx(0.2)
    assert max(known) < 1.0


def test_a_silent_one_in_a_synchronous_round_is_reported_then_excluded_then_started_again() -> None:
    scene = Scene()
    scene.live(1.0)
    scene.silent = {1}
    scene.live(FLOOR_SECONDS / 2 + 0.3)
    assert scene.told(1) == ["silent"]
    scene.live(FLOOR_SECONDS / 2)
    assert scene.told(1) == ["silent", "excluded"]
    assert scene.workers[1].killed
    assert scene.told(0) == scene.told(2) == []
    scene.die(1)
    assert scene.told(1) == ["silent", "excluded", "restarted"]
    assert scene.workers[1].joins
    assert scene.run_state.incarnation(1) == 1


def test_a_slow_one_is_given_the_time_that_its_rounds_take() -> None:
    scene = Scene()
    scene.run_state.set_pace(2, 1.0)
    scene.live(1.0)
    scene.silent = {1}
    scene.live(4 * FLOOR_SECONDS - 0.5)
    assert scene.told(1) == ["silent"]
    scene.live(1.0)
    assert scene.told(1) == ["silent", "excluded"]


def test_who_expects_slow_resets_can_lengthen_the_deadline_of_rounds() -> None:
    scene = Scene(hang_after_seconds=150.0)  # 30 more than by default
    scene.live(1.0)
    scene.silent = {1}
    scene.live(30.0 + FLOOR_SECONDS - 0.5)
    assert scene.told(1) == ["silent"]
    scene.live(1.0)
    assert scene.told(1) == ["silent", "excluded"]
    assert "so long, use --hang-after-seconds 186" in scene.messages[-1]


def test_under_an_asynchronous_strategy_a_slow_one_has_the_time_of_the_field_and_may_wake() -> None:
    scene = Scene("gala")
    scene.live(1.0)
    scene.silent = {1}
    scene.live(FLOOR_SECONDS / 2 + 0.3)
    assert scene.told(1) == ["silent"]
    scene.live(CAP_SECONDS - FLOOR_SECONDS)
    assert scene.told(1) == ["silent"]
    assert scene.workers[1].dumped
    scene.silent = set()
    scene.live(0.2)
    assert scene.told(1) == ["silent", "woke"]
    assert not scene.workers[1].killed
    scene.silent = {1}
    scene.live(CAP_SECONDS + 1.0)
    assert scene.told(1) == ["silent", "woke", "silent", "excluded"]


def test_under_an_asynchronous_strategy_a_stopped_one_is_excluded_as_in_a_round() -> None:
    scene = Scene("gala")
    scene.live(1.0)
    scene.silent, scene.workers[1].is_stopped = {1}, True
    scene.live(FLOOR_SECONDS + 0.3)
    assert scene.told(1) == ["silent", "excluded"]
    assert not scene.workers[1].dumped, "it could not"
    scene.die(1)
    assert scene.told(1) == ["silent", "excluded", "restarted"]


def test_an_exclusion_is_said_once_though_the_process_takes_a_while_to_end() -> None:
    scene = Scene("gala")
    scene.live(1.0)
    monitor, worker = HeartbeatMonitor(scene.coordinator, lambda: scene.now), scene.workers[1]
    worker.is_stopped = True
    excluded = 0
    for _ in range(200):
        scene.now += 0.1
        excluded += len(monitor.poll([worker]))
    assert excluded == 1
    assert scene.told(1) == ["silent", "excluded"]


def test_a_silent_member_is_excluded_by_a_launcher_that_polls_seldom() -> None:
    scene = Scene("gala")
    scene.live(1.0)
    scene.silent = {1}
    scene.live(5 * CAP_SECONDS, step=2.0)
    assert scene.told(1) == ["silent", "excluded"]
    assert not scene.told(0)


def test_a_run_is_not_ended_by_a_short_stop_of_its_centre_or_of_all() -> None:
    scene = Scene("parameter-server")
    scene.live(1.0)
    scene.silent, scene.workers[3].is_stopped = {3}, True
    scene.live(ENDS_RUN_SECONDS - 0.5)
    assert scene.told(3) == ["silent"]
    scene.live(1.0)
    assert scene.told(3) == ["silent", "excluded"]

    scene = Scene("gala")
    scene.live(1.0)
    scene.silent = {0, 1, 2}
    for worker in scene.workers.values():
        worker.is_stopped = True
    scene.live(ENDS_RUN_SECONDS - 0.5)
    assert all(scene.told(rank) == ["silent"] for rank in range(3))
    scene.silent = set()
    scene.live(0.2)
    assert all(scene.told(rank) == ["silent", "woke"] for rank in range(3))


def test_a_stopped_one_is_excluded_while_it_is_built_and_while_a_checkpoint_is_written() -> None:
    scene = Scene("gala")
    scene.silent, scene.workers[1].is_stopped = {1}, True
    scene.run_state.set_pace(1, 0.0)
    scene.live(STOPPED_SECONDS - 0.3)  # from the start of the run, not of the host's clock
    assert "excluded" not in scene.told(1)
    scene.live(0.6)
    assert "excluded" in scene.told(1)

    scene = Scene("gala")
    scene.live(1.0)
    scene.coordinator.is_saving = True
    scene.silent, scene.workers[1].is_stopped = {1}, True
    scene.live(FLOOR_SECONDS + 0.3)
    assert "excluded" in scene.told(1)


def test_a_pause_of_all_members_is_no_silence_of_one() -> None:
    scene = Scene()
    scene.live(1.0)
    scene.now += 3600.0  # Ctrl-Z, and fg after lunch
    scene.detector.poll()
    scene.live(1.0)
    assert scene.events == []


def test_a_member_that_is_being_built_is_not_silent() -> None:
    scene = Scene()
    scene.silent = {1}
    scene.live(300.0)  # rank 1 has not beaten once
    assert scene.told(1) == []


def test_one_that_has_finished_is_not_started_again() -> None:
    scene = Scene("gala", restarts=3)
    scene.live(1.0)
    scene.run_state.mark_finished(1)
    scene.die(1)
    assert scene.told(1) == []


def test_while_a_checkpoint_is_written_a_slow_disk_is_no_silence() -> None:
    scene = Scene()
    scene.live(1.0)
    scene.coordinator.is_saving = True
    scene.silent = {1}
    scene.live(CAP_SECONDS - 1.0)
    assert "excluded" not in scene.told(1)
    scene.live(2.0)
    assert "excluded" in scene.told(1)


@pytest.mark.parametrize(("restarts", "lives"), [(0, 0), (2, 2)])
def test_the_dead_are_started_again_as_often_as_asked(restarts: int, lives: int) -> None:
    scene = Scene("gala", restarts=restarts)
    scene.live(0.5)
    for _ in range(5):
        scene.die(1)
    assert scene.run_state.incarnation(1) == lives


def test_a_joiner_that_is_killed_to_begin_again_uses_up_no_restart() -> None:
    scene = Scene("gala", restarts=1)
    scene.live(0.5)
    scene.workers[1].killed_because = RETRIED
    scene.die(1)
    scene.workers[1].killed_because = ""
    scene.die(1)
    assert scene.run_state.incarnation(1) == 2


def test_the_excluded_come_back_a_few_times_unasked() -> None:
    scene = Scene()
    for _ in range(REJOINS + 2):
        scene.workers[1].killed_because = EXCLUDED
        scene.die(1)
    assert scene.run_state.incarnation(1) == REJOINS


@pytest.mark.parametrize("end", ["due", "finished"])
def test_no_member_is_started_again_when_the_run_is_over_and_joiners_are_sent_away(end: str) -> None:
    scene = Scene("gala", restarts=9)
    scene.live(0.5)
    scene.die(1)
    assert scene.run_state.incarnation(1) == 1
    if end == "due":
        scene.coordinator.should_end = True
    else:
        scene.run_state.mark_finished(0)
        scene.run_state.mark_finished(2)
    scene.live(0.1)
    assert scene.workers[1].killed
    scene.die(1)
    assert scene.run_state.incarnation(1) == 1


def test_a_state_transfer_waits_for_a_joiner_that_is_ready_and_for_a_checkpoint_to_be_whole() -> None:
    scene = Scene("gala", restarts=1)
    scene.die(1)
    scene.live(0.2)
    assert scene.run_state.transfer_request == 0
    scene.run_state.mark_ready(1)
    scene.coordinator.is_saving = True
    scene.live(0.2)
    assert scene.run_state.transfer_request == 0
    scene.coordinator.is_saving = False
    scene.live(0.1)
    asked = TransferRequest.unpack(scene.run_state.transfer_request)
    assert asked == TransferRequest(1, 1, 1, 0)
    assert scene.run_state.is_alive(1)
    assert scene.coordinator.is_admitting
    scene.run_state.mark_transferred(0, 1)
    scene.run_state.enter(1)
    scene.live(0.1)
    assert scene.joined == [(1, 0)]
    assert not scene.coordinator.is_admitting


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_another_donor_is_asked_when_the_first_cannot(how: str) -> None:
    scene = Scene("gala", restarts=1)
    scene.live(0.5)
    scene.die(2)
    scene.run_state.mark_ready(2)
    scene.live(0.1)
    assert TransferRequest.unpack(scene.run_state.transfer_request).donor == 0
    if how == "dies":
        scene.detector.run = dataclasses.replace(scene.detector.run, restarts=0)
        scene.die(0)
    else:
        scene.silent = {0}
    scene.live(FLOOR_SECONDS)
    assert TransferRequest.unpack(scene.run_state.transfer_request) == TransferRequest(2, 1, 2, 1)


def test_in_rounds_a_death_during_a_state_transfer_sends_the_joiner_back_to_begin_again() -> None:
    scene = Scene("all-reduce", replicas=4, restarts=1)
    scene.live(0.5)
    scene.die(3)
    scene.run_state.mark_ready(3)
    scene.live(0.1)
    scene.detector.run = dataclasses.replace(scene.detector.run, restarts=0)
    scene.die(0)
    scene.live(0.1)
    assert scene.workers[3].killed
    scene.die(3)
    assert scene.run_state.incarnation(3) == 2, "it was not its fault, and costs it no restart"
    scene.run_state.mark_ready(3)
    scene.live(0.1)
    assert TransferRequest.unpack(scene.run_state.transfer_request) == TransferRequest(2, 2, 3, 1)


def test_a_joiner_that_falls_silent_while_it_joins_begins_again_so_that_runs_are_saved() -> None:
    scene = Scene("gala", restarts=1)
    scene.live(0.5)
    scene.die(1)
    scene.run_state.mark_ready(1)
    scene.live(0.2)
    assert scene.coordinator.is_admitting
    scene.silent = {1}
    scene.live(CAP_SECONDS)
    assert scene.workers[1].killed
    scene.die(1)
    assert not scene.coordinator.is_admitting
    assert scene.run_state.incarnation(1) == 2


def test_a_joiner_that_is_silent_each_time_is_given_up() -> None:
    scene = Scene("gala", restarts=1)
    scene.live(0.5)
    scene.die(1)
    for _ in range(REJOINS + 2):
        if scene.workers[1].ended:
            break
        scene.silent = set()
        scene.run_state.mark_ready(1)
        scene.live(0.2)
        scene.silent = {1}  # as when its environment never ends its first reset
        scene.live(CAP_SECONDS)
        assert scene.workers[1].killed
        scene.die(1)
    assert scene.workers[1].ended
    assert scene.run_state.incarnation(1) == 1 + REJOINS


def test_the_last_living_replica_has_no_donor_to_be_restarted_from() -> None:
    scene = Scene("gala", replicas=2, restarts=5)
    scene.live(0.5)
    scene.die(0)
    scene.die(1)
    assert [scene.run_state.incarnation(rank) for rank in range(2)] == [1, 0]
    scene.live(0.1)
    assert scene.workers[0].killed
