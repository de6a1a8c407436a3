"""Environments that exit, hang, or give what is no number: each is named as the cause, and hangs end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from faults.broken_environments import Broken
from faults.commands import Command
from murmurate.errors import RunFailed
from murmurate.worlds.gym import GymSimulators
from waiting import until

pytestmark = pytest.mark.timeout(600)
_WORLD = "gym:faults.broken_environments:Broken-v0"
_TESTS = str(Path(__file__).parents[1])


def play(simulators: GymSimulators, steps: int) -> None:
    for _ in range(steps):
        simulators.send(torch.zeros(simulators.size, dtype=torch.int64))
        simulators.receive()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "raised SystemExit in step: 0"),
        ("nan", "gave nan as its observation"),
        ("infinity", "gave inf as its observation"),
        ("none", "gave nan as its reward"),
        ("short", r"raised ValueError in step: its observation has the shape \[1\], not \[3\]"),
        ("long", r"its observation has the shape \[4\], not \[3\]"),
        ("nan reward", "gave nan as its reward"),
        ("huge reward", "gave inf as its reward"),
    ],
)
def test_what_breaks_is_named_with_simulator_and_step(how: str, said: str) -> None:
    simulators = GymSimulators("broken", [Broken("works"), Broken(how)], limit=10**6, first=4)
    simulators.reset(seed=0)
    with pytest.raises(RunFailed, match=said) as failure:
        play(simulators, steps=30)
    assert "broken (simulator 5, step 1 of its episode)" in str(failure.value)


def test_a_reset_that_fails_is_named() -> None:
    simulators = GymSimulators("broken", [Broken("fails in reset")], limit=10, first=0)
    with pytest.raises(RunFailed, match="raised OSError in reset: no licence"):
        simulators.reset(seed=0)


def broken(folder: Path, how: str, *options: object, once: Path | None = None) -> Command:
    """A run whose environments break; the launcher finds them on PYTHONPATH."""
    environment = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), _TESTS])}
    environment |= {"MURMURATE_BROKEN": how} | ({} if once is None else {"MURMURATE_BROKEN_ONCE": str(once)})
    arguments = ("train", f"{_WORLD}-a2c", "--out", folder, "--eval-episodes", 1, "--stop-at-return", "none")
    return Command(folder, *arguments, *options, environment=environment)


def test_an_exit_in_an_environment_fails_the_run(tmp_path: Path) -> None:
    with broken(tmp_path / "run", "exits", "--env-steps", 5_000) as command:
        assert command.wait() == 1, command.said()
        assert "raised SystemExit in step: 0" in command.said()
        assert "Traceback" not in command.said()
        assert command.summary()["exit"].startswith("failed")


def test_one_that_hangs_is_ended_and_its_replica_comes_back(tmp_path: Path) -> None:
    options = ("--replicas", 2, "--strategy", "gala", "--hang-after-seconds", 5, "--env-steps", 10**9)
    often = ("--record-every-seconds", 0.1)
    with broken(tmp_path / "run", "hangs", *options, *often, once=tmp_path / "once") as command:
        until(lambda: command.events("joined") or command.process.poll() is not None, "it to come back")
        assert command.process.poll() is None, command.said()
        (excluded,) = command.events("excluded")
        log = command.folder / "logs" / f"replica-{excluded['member']}.log"
        assert "broken_environments.py" in log.read_text(), "its stack is in its log"
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait() == 130, command.said()
        command.leaves_nothing()


@pytest.mark.slow
def test_where_all_hang_the_run_ends(tmp_path: Path) -> None:
    options = ("--replicas", 2, "--strategy", "all-reduce", "--hang-after-seconds", 5, "--env-steps", 10**9)
    with broken(tmp_path / "run", "hangs", *options) as command:
        assert command.wait() == 1, command.said()
        assert len(command.events("excluded")) == 2
        command.leaves_nothing()
