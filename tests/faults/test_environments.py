"""Environments that exit, hang, or give what is no number: each is named as the cause, and hangs end."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from faults.broken_environments import Broken
from faults.commands import Command
from murmurate.errors import RunFailed
from murmurate.spec import Episode, TimeStep
from murmurate.training import checkpoint
from murmurate.worlds.gym_simulators import GymSimulators
from waiting import until

pytestmark = pytest.mark.timeout(600)
_WORLD = "gym:faults.broken_environments:Broken-v0"
_TESTS = str(Path(__file__).parents[1])


def play(simulators: GymSimulators, steps: int) -> TimeStep:
    """The last of so many steps."""
    for _ in range(steps):
        simulators.send(torch.zeros(simulators.size, dtype=torch.int64))
        step = simulators.receive()
    return step


def opened(*hows: str, first: int = 0) -> GymSimulators:
    return GymSimulators("broken", lambda b: (Broken(hows[b]), 10**6), len(hows), first)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "raised SystemExit in step: 0"),
        ("nan", "gave nan as its observation"),
        ("infinity", "gave inf as its observation"),
        ("none", "raised ValueError in step: its reward is None: step must return a number"),
        ("short", r"raised ValueError in step: its observation has the shape \[1\], not \[3\]"),
        ("long", r"its observation has the shape \[4\], not \[3\]"),
        ("nan reward", "gave nan as its reward"),
        ("huge reward", "gave inf as its reward"),
    ],
)
def test_what_breaks_is_replaced_and_the_others_go_on(how: str, said: str) -> None:
    """It breaks in the first step of its third episode of ten."""
    simulators = opened("works", how, first=4)
    simulators.reset(seed=0)
    play(simulators, steps=20)
    step = play(simulators, steps=1)
    (message,) = step.restarts
    assert re.search(said, message)
    assert message.startswith("the environment broken (simulator 5, step 1 of its episode) ")
    assert message.endswith("is started again")
    assert step.truncated.tolist() == [False, True]
    assert not step.terminated.any()
    assert step.reward.tolist() == [1.0, 0.0]
    assert step.final_observation is not None
    assert step.final_observation[1].tolist() == [0.0] * 3, "the last one that it gave"
    assert step.observation[1].tolist() == [0.0] * 3
    assert not step.episodes, "a lost episode does not count"
    episodes = [e for _ in range(10) for e in play(simulators, steps=1).episodes]
    assert episodes == [Episode(0, 10.0, 10), Episode(1, 10.0, 10)], "its episodes count from the start"


def test_what_breaks_again_and_again_ends_the_run_by_name() -> None:
    class Fails(Broken):
        def step(self, action):
            raise OSError("no licence")

    simulators = GymSimulators("broken", lambda b: (Fails("works"), 10**6), 1, 3)
    simulators.reset(seed=0)
    assert [len(play(simulators, steps=1).restarts) for _ in range(5)] == [1] * 5
    with pytest.raises(RunFailed, match=r"simulator 3.*OSError in step: no licence. It failed 6 times in"):
        play(simulators, steps=1)


def test_a_reset_that_fails_is_named() -> None:
    simulators = opened("fails in reset")
    with pytest.raises(RunFailed, match=r"raised OSError in reset: no licence. It failed 6 times"):
        simulators.reset(seed=0)


def test_a_resumed_run_replaces_with_the_same_seeds() -> None:
    class Drawn(Broken):
        """Observations begin at random."""

        def reset(self, *, seed=None, options=None):
            seen, info = super().reset(seed=seed)
            return seen + np.float32(self.np_random.random()), info

    def make(b: int) -> tuple[Drawn, int]:
        return Drawn("nan"), 10**6

    one, other = GymSimulators("broken", make, 1, 0), GymSimulators("broken", make, 1, 0)
    one.reset(seed=0)
    play(one, steps=7)
    other.reset(seed=1)
    play(other, steps=7)
    other._envs[0].np_random = copy.deepcopy(one._envs[0].np_random)
    other._seed, other._replacements = one._seed, one._replacements.copy()
    seen = [play(each, steps=14) for each in (one, other)]
    assert seen[0].restarts
    assert torch.equal(seen[0].observation, seen[1].observation)


def broken(folder: Path, how: str, *options: object, once: Path | None = None) -> Command:
    """A run whose environments break; the launcher finds them on PYTHONPATH."""
    environment = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), _TESTS])}
    environment |= {"MURMURATE_BROKEN": how} | ({} if once is None else {"MURMURATE_BROKEN_ONCE": str(once)})
    arguments = ("train", f"{_WORLD}-a2c", "--out", folder, "--eval-episodes", 1, "--stop-at-return", "none")
    return Command(folder, *arguments, *options, environment=environment)


def test_an_exit_in_an_environment_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    with broken(tmp_path / "run", "exits", "--env-steps", 5_000) as command:
        assert command.wait() == 0, command.said()
        lines = (command.folder / "metrics.jsonl").read_text().splitlines()
        counted = [json.loads(line).get("simulator_restarts") for line in lines]
        assert max(filter(None, counted)) > 100
        told = [event["message"] for event in command.events("simulator restarted")]
        assert "raised SystemExit in step: 0" in told[0]
        assert len(told) < 20, "the others are counted"
        assert (
            "16 simulators have been started again so far; the next line like this is message 32" in told[10]
        )
        assert command.summary()["exit"] == "finished"


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
def test_one_that_hangs_in_a_process_of_its_own_is_replaced(tmp_path: Path) -> None:
    own = ("--world.served", "true", "--simulators", 2)
    with broken(tmp_path / "run", "hangs", *own, "--env-steps", 400, once=tmp_path / "once") as command:
        assert command.wait() == 0, command.said()
        (first, *_) = command.events("simulator restarted")
        assert (
            "the process of gym:faults.broken_environments:Broken-v0 (simulators 0 to 1)" in first["message"]
        )
        assert command.summary()["exit"] == "finished"
        command.leaves_nothing()


@pytest.mark.slow
def test_where_all_hang_the_run_ends(tmp_path: Path) -> None:
    options = ("--replicas", 2, "--strategy", "all-reduce", "--hang-after-seconds", 5, "--env-steps", 10**9)
    with broken(tmp_path / "run", "hangs", *options) as command:
        assert command.wait() == 1, command.said()
        assert len(command.events("excluded")) == 2
        command.leaves_nothing()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fails in close", r"replica \d could not close its source: OSError\('the licence server is gone'\)"),
        ("dies in close", r"replica \d died after it had saved all that it learned"),
    ],
)
def test_environments_that_do_not_close_lose_nothing(how: str, said: str, tmp_path: Path) -> None:
    with broken(tmp_path / "run", how, "--replicas", 2, "--updates", 40) as command:
        assert command.wait() == 0, command.said()
        summary = command.summary()
        assert (summary["updates"], summary["dead_replicas"]) == (40, [])
        assert [bool(re.fullmatch(said, event["message"])) for event in command.events("warning")] == [
            True
        ] * 2
        assert checkpoint.read_part(command.folder / "checkpoints" / "last", 0)["updates"] == 40
