"""Restarts and state transfers as the failure detector decides them, with a clock that is turned by hand."""

from __future__ import annotations

import dataclasses

import pytest

from launch.replica_scene import CAP_SECONDS, Scene
from murmurate.fabric.processes.run_state import TransferRequest
from murmurate.launch.failure_detector import EXCLUDED, REJOINS, RETRIED
from murmurate.launch.heartbeats import FLOOR_SECONDS


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


def test_the_dead_are_started_again_while_the_only_other_replica_is_silent() -> None:
    """As where memory runs short: one replica is killed while another waits for the disk."""
    scene = Scene("gala", replicas=2, restarts=1)
    scene.live(0.5)
    scene.silent = {0}
    scene.live(FLOOR_SECONDS)
    assert scene.told(0) == ["silent"]
    scene.die(1)
    assert scene.run_state.incarnation(1) == 1
    scene.run_state.mark_ready(1)
    scene.live(0.2)
    assert scene.run_state.transfer_request == 0, "it cannot send its state yet"
    scene.silent = set()
    scene.live(0.2)
    assert TransferRequest.unpack(scene.run_state.transfer_request) == TransferRequest(1, 1, 1, 0)
