"""Games of Doom that die in the middle of a run: they are replaced and counted, and the run goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from faults.commands import Command
from waiting import until

pytest.importorskip("vizdoom")
pytestmark = pytest.mark.timeout(600)


def games(command: Command) -> list[psutil.Process]:
    """ViZDoom's processes, in the sessions of the servers."""
    return [
        process
        for process in psutil.Process(command.process.pid).children(recursive=True)
        if process.name() == "vizdoom"
    ]


@pytest.mark.parametrize(
    "recipe", ["doom-my-way-home-a2c", pytest.param("doom-my-way-home-impala", marks=pytest.mark.slow)]
)
def test_one_that_is_killed_is_replaced_and_counted(tmp_path: Path, recipe: str) -> None:
    arguments = ("train", recipe, "--simulators", 4, "--env-steps", 10**9, "--record-every-seconds", 0.2)
    ends = ("--minutes", 5, "--eval-episodes", 1, "--out", tmp_path / "run")
    with Command(tmp_path / "run", *arguments, *ends) as command:
        until(lambda: command.records(0) or command.process.poll() is not None, "the first record")
        assert command.process.poll() is None, command.said()
        until(lambda: len(games(command)) == 4, "all games of all actors")
        # more than one is replaced if it was just starting: see test_vizdoom.py
        os.kill(games(command)[1].pid, signal.SIGKILL)
        until(
            lambda: (
                [r for r in command.records(0) if r.get("simulator_restarts", 0) >= 1]
                or command.process.poll() is not None
            ),
            "the metric",
        )
        assert command.process.poll() is None, command.said()
        counted = command.records(0)[-1]["env_steps"]
        until(lambda: command.records(0)[-1]["env_steps"] > counted, "further steps")
        if recipe.endswith("a2c"):
            events = command.events("simulator restarted")
            assert events
            assert all("doom-my-way-home (simulator" in event["message"] for event in events)
        until(lambda: len(games(command)) == 4, "all games again")
        alive = games(command)
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait() == 130, command.said()
        _, left = psutil.wait_procs(alive, timeout=20)
        assert not left
        command.leaves_nothing()


def test_games_end_with_a_replica_that_is_killed(tmp_path: Path) -> None:
    arguments = ("train", "doom-my-way-home-a2c", "--simulators", 2, "--env-steps", 10**9, "--minutes", 5)
    with Command(tmp_path / "run", *arguments, "--eval-episodes", 1, "--out", tmp_path / "run") as command:
        until(lambda: command.records(0) or command.process.poll() is not None, "the first record")
        playing = games(command)
        assert len(playing) == 2, command.said()
        os.kill(command.pids()[0], signal.SIGKILL)
        _, left = psutil.wait_procs(playing, timeout=30)
        assert not left
        assert command.wait() == 1
