"""IMPALA's actors and learners when somebody is killed or frozen: the command, with real signals."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from faults.commands import Written, training
from murmurate.cli.main import main
from waiting import until

pytestmark = pytest.mark.timeout(900)
_OFTEN = ("--checkpoint-every-env-steps", 2_000, "--record-every-seconds", 0.1, "--env-steps", 10**9)


def actors(run: Written, replica: int = 0) -> dict[int, int]:
    """Process id by number, of those that began last."""
    found = {}
    for event in run.events("actor began"):
        words = re.fullmatch(r"actor (\d+) of replica (\d+) began, process (\d+)", event["message"])
        assert words is not None
        number, learner, pid = map(int, words.groups())
        if learner == replica:
            found[number] = pid
    return found


@pytest.mark.slow
def test_an_actor_is_killed_and_another_frozen_and_the_run_goes_on_ends_and_resumes(tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-impala", *_OFTEN) as command:
        command.learning(1, records=3)
        first = until(lambda: len(found := actors(command)) == 2 and found, "two actors")
        os.kill(first[0], signal.SIGSTOP)
        os.kill(first[1], signal.SIGKILL)
        until(lambda: command.events("actor died"), "the death to be told")
        assert "actor 1 of replica 0 died (signal 9)" in command.events("actor died")[0]["message"]
        until(lambda: actors(command)[1] != first[1], "another one")
        updates = command.records(0)[-1]["updates"]
        until(lambda: command.records(0)[-1]["updates"] > updates + 20, "it to learn from one actor")
        until(lambda: len(command.events("actor died")) == 2, "the frozen one to be missed")
        assert "actor 0 of replica 0 died (hung: no step for" in command.events("actor died")[1]["message"]
        command.until_checkpoint()
        command.kill_group(signal.SIGTERM)
        assert command.wait() == 143, command.said()
        command.leaves_nothing()
        last = command.records(0)[-1]
        assert last["actor_deaths"] == 2
    more = str(last["env_steps"] + 3_000)
    assert main(["resume", str(tmp_path / "run"), "--env-steps", more]) == 0
    resumed = Written(tmp_path / "run")
    assert not resumed.summary()["resume_exact"]
    assert resumed.records(0)[-1]["updates"] > last["updates"]
    until(lambda: not any(map(psutil.pid_exists, actors(resumed).values())), "its actors to be gone")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "gala", "parameter-server"])
def test_a_learner_dies_with_its_actors_and_the_others_learn_with_theirs(
    strategy: str, tmp_path: Path
) -> None:
    options = (*_OFTEN, "--strategy", strategy, "--replicas", 3, "--actors", 1, "--simulators", 2)
    with training(tmp_path / "run", "cartpole-impala", *options) as command:
        command.learning(3, records=3)
        orphans = until(lambda: actors(command, 2), "an actor of the last learner")
        os.kill(command.pids()[2], signal.SIGKILL)
        until(lambda: not any(map(psutil.pid_exists, orphans.values())), "its actors to end with it")
        updates = [command.records(rank)[-1]["updates"] for rank in range(2)]
        until(
            lambda: all(command.records(rank)[-1]["updates"] > updates[rank] + 20 for rank in range(2)),
            "the others to learn",
        )
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait() == 130, command.said()
        assert command.summary()["dead_replicas"] == [2]
        assert all(command.records(rank)[-1]["actor_deaths"] == 0 for rank in range(2))
        command.leaves_nothing()


@pytest.mark.slow
def test_actors_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-impala", *_OFTEN) as command:
        command.learning(1, records=3)
        os.kill(command.process.pid, signal.SIGKILL)
        command.wait()
        command.leaves_no_process()


def test_alone_it_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """With ``--actors 0`` and an LSTM: half the way and resumed, or in one go."""
    options = ["--actors", "0", "--simulators", "4", "--agent.recurrent", "8", "--launcher", "inline"]
    options += ["--eval-episodes", "1", "--agent.learning-rate-end", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", "cartpole-impala", *options, "--env-steps", "1600", "--out", str(whole)]) == 0
    assert main(["train", "cartpole-impala", *options, "--env-steps", "800", "--out", str(parts)]) == 0
    assert main(["resume", str(parts), "--env-steps", "1600"]) == 0
    assert Written(parts).summary()["resume_exact"]
    one, other = (load_file(folder / "checkpoints/last/replica-0.safetensors") for folder in (whole, parts))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
