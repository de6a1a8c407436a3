"""How the processes of a replay service are watched: one that ends, is suspended, or says nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.errors import RunFailed
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.replay.config import ReplayConfig
from murmurate.sources import service_processes
from murmurate.sources.service_processes import ShardProcess, _Watched, empty_state, shard_config
from waiting import until


@pytest.fixture
def watched() -> Iterator[_Watched]:
    one = _Watched("replay shard", "2 of replica 1")
    one.note_start(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE), beats=0)
    yield one
    one.kill()


def test_a_process_with_signs_of_life_is_fine(watched: _Watched) -> None:
    assert watched.name == "replay shard 2 of replica 1"
    assert [watched.cause_of_death(beats) for beats in (0, 1, 1, 2)] == [None] * 4


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "signal 9"), (signal.SIGTERM, "signal 15")])
def test_a_process_that_is_killed(watched: _Watched, number: signal.Signals, cause: str) -> None:
    assert watched.process is not None
    watched.process.send_signal(number)
    assert until(lambda: watched.cause_of_death(0)) == cause


def test_a_process_that_ends_by_itself(watched: _Watched) -> None:
    assert watched.process is not None
    assert watched.process.stdin is not None
    watched.process.stdin.close()  # an EOFError in it
    assert until(lambda: watched.cause_of_death(0)) == "exit code 1"


def test_silence_counts_from_the_last_beat(watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    now = watched.checked_at
    monkeypatch.setattr(service_processes.time, "monotonic", lambda: now)

    def causes(seconds: int, beats: float) -> set[str | None]:
        nonlocal now
        found = set()
        for _ in range(seconds):
            now += 1.0
            found.add(watched.cause_of_death(beats))
        return found

    assert causes(299, 0) == {None}, "it may take that long to begin"
    assert causes(1 + 60, 1) == {None}
    assert causes(1, 1) == {"hung: no sign of life for 61 s"}


def test_time_in_which_the_learner_itself_was_suspended_is_no_silence(
    watched: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the whole job was: whoever goes on first must not find the others hung."""
    now = watched.checked_at
    monkeypatch.setattr(service_processes.time, "monotonic", lambda: now)
    assert watched.cause_of_death(1) is None
    for _ in range(5):
        now += 10_000.0
        assert watched.cause_of_death(1) is None


def test_a_suspended_process_is_given_up_sooner(watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched.process is not None
    os.kill(watched.process.pid, signal.SIGSTOP)
    until(lambda: is_stopped(watched.process and watched.process.pid))
    assert watched.cause_of_death(1) is None
    monkeypatch.setattr(service_processes, "_STOPPED_SECONDS", 0.0)
    assert str(watched.cause_of_death(1)).startswith("hung: no sign of life for")


def test_a_wait_for_a_suspended_process_ends(watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a checkpoint is made, which waits for the contents of a shard."""
    monkeypatch.setattr(service_processes, "_STOPPED_SECONDS", 0.0)
    monkeypatch.setattr(service_processes, "_CHECK_SECONDS", 0.01)
    assert watched.process is not None
    os.kill(watched.process.pid, signal.SIGSTOP)
    with watched.killed_if_suspended():
        assert watched.process.wait(timeout=60) == -signal.SIGKILL
    assert str(watched.cause_of_death(0)).startswith("hung: suspended for")


def test_a_shard_that_hangs_does_not_outlive_its_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_processes, "_STOPPED_SECONDS", 0.0)
    settings: Any = SimpleNamespace(address=SimpleNamespace(host=""))
    shard = ShardProcess(settings, 1, 2)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    shard.watched.note_start(process, beats=0)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: is_stopped(process.pid))
    with pytest.raises(RunFailed, match="replay shard 2 of replica 1 died \\(hung"):
        shard.check()
    assert process.poll() == -signal.SIGKILL
    shard.close()


def test_an_empty_shard_in_the_middle_of_a_run_is_drawn_from_at_once_and_without_random_steps() -> None:
    config = ReplayConfig(capacity=1_200, learning_starts=100, samples_per_insert=4.0)
    for random_env_steps, inserted, drawn in ((None, 0, 0), (40, 100, 0), (150, 150, 200)):
        expected = {"inserted": inserted, "drawn": drawn, "store": None}
        assert empty_state(config, random_env_steps) == expected


def test_the_shards_share_the_replay_of_their_learner() -> None:
    whole = ReplayConfig(capacity=1_200, learning_starts=100, folder="/disk")
    parts = [shard_config(whole, 4, index) for index in range(4)]
    assert {part.capacity for part in parts} == {300}
    assert {part.learning_starts for part in parts} == {25}
    assert [part.folder for part in parts] == [f"/disk/shard-{index}" for index in range(4)]
    assert shard_config(ReplayConfig(), 2, 0).folder is None
