"""Silence and exclusion as the launcher decides them, with a clock that is turned by hand."""

from __future__ import annotations

import pytest

from launch.replica_scene import CAP_SECONDS, Scene
from murmurate.launch.heartbeats import (
    ENDS_RUN_SECONDS,
    FLOOR_SECONDS,
    STOPPED_SECONDS,
    HeartbeatMonitor,
    patience,
)
from murmurate.training.rejoin import Pace


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
