"""Learners with actors, and learners with banks, when somebody is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from faults.commands import Written, trained, training
from murmurate.cli.main import main
from waiting import until

pytestmark = pytest.mark.timeout(900)
_SMALL = ("--replay.learning-starts", 500, "--replay.capacity", 5_000, "--agent.batch", 16)
_OFTEN = ("--checkpoint-every-env-steps", 2_000, "--record-every-seconds", 0.1)


def actors(run: Written) -> dict[int, int]:
    """Process id by number, of those that began last."""
    found = {}
    for event in run.events("actor began"):
        number, pid = map(
            int, re.findall(r"actor (\d+) of replica 0 began, process (\d+)", event["message"])[0]
        )
        found[number] = pid
    return found


def test_a_killed_actor_is_replaced_and_a_resumed_run_has_its_replay(tmp_path: Path) -> None:
    options = (*_SMALL, *_OFTEN, "--env-steps", 40_000)
    with training(tmp_path / "run", "cartpole-apex-dqn", *options) as command:
        command.learning(1, records=5)
        first = until(lambda: len(found := actors(command)) == 2 and found, "two actors")
        os.kill(first[1], signal.SIGKILL)
        until(lambda: command.events("actor died"), "the death to be told")
        until(lambda: actors(command)[1] != first[1], "another one")
        command.until_checkpoint()
        died = command.events("actor died")[0]["message"]
        assert "actor 1 of replica 0 died (signal 9)" in died
        command.kill_group(signal.SIGTERM)
        assert command.wait() == 143, command.said()
        command.leaves_nothing()
        before = command.records(0)[-1]
    assert main(["resume", str(tmp_path / "run"), "--env-steps", str(before["env_steps"] + 3_000)]) == 0
    resumed = Written(tmp_path / "run")
    assert not resumed.summary()["resume_exact"]
    again = [r for r in resumed.records(0) if r["env_steps"] > before["env_steps"]]
    assert again[0]["replay_transitions"] >= min(before["replay_transitions"], 5_000)
    until(lambda: not any(map(psutil.pid_exists, actors(resumed).values())), "its actors to be gone")


@pytest.mark.slow
def test_actors_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-apex-dqn", *_SMALL, *_OFTEN) as command:
        command.learning(1, records=3)
        os.kill(command.process.pid, signal.SIGKILL)
        command.wait()
        command.leaves_nothing()


@pytest.mark.slow
def test_a_replay_service_of_images_that_an_actor_fills(tmp_path: Path) -> None:
    pytest.importorskip("dm_control")
    options = (
        *("--actors", 1, "--simulators", 2, "--samplers", 1, "--world.size", 36, "--world.stack", 2),
        *("--replay.capacity", 400, "--replay.learning-starts", 50, "--random-env-steps", 20),
        *("--agent.batch", 4, "--agent.hidden", 8, "--env-steps", 100),
        *("--record-every-seconds", 0.1, "--eval-max-env-steps", 20, "--eval-episodes", 1),
    )
    name = "dmc-cartpole-swingup-pixels-service-d4pg"
    with training(tmp_path / "run", name, *options) as command:
        assert command.wait() == 0, command.said()
        last = command.records(0)[-1]
        assert last["env_steps"] >= 100
        assert last["updates"] > 0
        assert last["replay_transitions"] >= 50
        assert command.events("actor began")
        command.leaves_nothing()


@pytest.mark.slow
def test_learners_with_banks_average_without_one_that_was_killed(tmp_path: Path) -> None:
    options = (*_SMALL, *_OFTEN, "--replicas", 3, "--env-steps", 15_000)
    with training(tmp_path / "run", "cartpole-spo-dqn", *options) as command:
        command.learning(3, records=5)
        os.kill(command.pids()[2], signal.SIGKILL)
        assert command.wait() == 0, command.said()
        summary = command.summary()
        assert summary["dead_replicas"] == [2]
        assert summary["env_steps"] >= 15_000
        last = [command.records(rank)[-1] for rank in range(2)]
        assert [record["heard"] for record in last] == [2, 2]
        assert summary["disagreement_final"] < 0.5
        command.leaves_nothing()


@pytest.mark.parametrize("strategy", [pytest.param("local-sgd", marks=pytest.mark.slow), "parameter-server"])
def test_banks_that_know_of_one_another_learn_under_any_strategy(strategy: str, tmp_path: Path) -> None:
    """A centre has no bank, and must make the same channels all the same."""
    options = ("--strategy", strategy, "--replicas", 2, "--replay.weights", "all", "--updates", 60)
    run = trained(tmp_path / "run", "cartpole-dqn", *options)
    assert run.summary()["updates"] >= 60
