"""Environments with vector actions in a process of their own: steps, ends, and what happens to failures."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmurate.errors import RunFailed
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds import served
from murmurate.worlds.served import ServedSimulators
from scripted_games import FOLDER

DRIFTING = EnvSpec("drifting", (2,), torch.float32, actions=0, action_shape=(2,))


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens environments with vector actions in a server; ``how`` and ``once`` say how and when they fail."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), FOLDER]))
    made: list[ServedSimulators] = []

    def open_environments(how: str, once: Path, size: int = 2, **options: Any) -> ServedSimulators:
        game = {"make": "scripted_games:Drifting", "options": {"how": how, "once": str(once)}}
        made.append(
            ServedSimulators(
                DRIFTING, "murmurate.worlds._env_game:EnvGame", game, size, savable=True, **options
            )
        )
        return made[-1]

    yield open_environments
    for each in made:
        each.close()


def push(simulators: ServedSimulators, *actions: float) -> TimeStep:
    simulators.send(torch.tensor(actions)[:, None].expand(-1, 2))
    return simulators.receive()


def test_a_server_that_an_error_ends_says_so_by_its_exit_code(
    vectors: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match="ended with code 1, 4 times in a row"):
        vectors("works", tmp_path, screen=(4, 6, 3)).reset(5)


def test_vectors_and_their_ends_are_those_of_the_environment(
    vectors: Callable[..., Any], tmp_path: Path
) -> None:
    simulators = vectors("works", tmp_path)
    start = simulators.reset(5).observation
    assert start.dtype == torch.float32
    step = push(simulators, 0.5, 9.0)
    assert torch.equal(step.observation, start + torch.tensor([[0.5, 0.5], [1.0, 1.0]])), "clipped to 1"
    for _ in range(3):
        step = push(simulators, 0.0, 0.0)
    assert step.truncated.all()
    assert [(e.length, e.success) for e in step.episodes] == [(4, True), (4, True)]
    assert step.final_observation is not None
    assert torch.equal(step.final_observation, start + torch.tensor([[0.5, 0.5], [1.0, 1.0]]))
    assert not torch.equal(step.observation, start)


def test_a_signal_to_all_processes_of_a_job_loses_no_episode(
    vectors: Callable[..., Any], tmp_path: Path
) -> None:
    """A scheduler's SIGTERM, after which a run saves itself with its simulators."""
    simulators = vectors("works", tmp_path)
    start = simulators.reset(5).observation
    os.kill(simulators._process.pid, signal.SIGTERM)
    step = push(simulators, 0.5, 0.5)
    assert step.restarts == ()
    assert torch.equal(step.observation, start + 0.5)


def test_a_late_answer_about_states_is_not_taken_for_that_of_the_next_step(
    vectors: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulators = vectors("works", tmp_path)
    simulators.reset(5)
    server = simulators._process.pid
    with monkeypatch.context() as patch:
        patch.setattr(served, "_SERVER_SECONDS", 0.2)
        patch.setattr(served, "_CLOSE_SECONDS", 0.0)
        os.kill(server, signal.SIGSTOP)
        assert simulators.state() is None
    with contextlib.suppress(ProcessLookupError):  # else it answers now
        os.kill(server, signal.SIGCONT)
    step = push(simulators, 0.5, 0.5)
    assert step.truncated.all()
    assert "gave no answer and is started again" in step.restarts[0]
    assert not push(simulators, 0.5, 0.5).restarts


@pytest.mark.parametrize(
    ("how", "said", "lost"),
    [
        ("raises", "OSError: no licence", [True, False]),
        ("nan", "it gave nan as its observation", [True, False]),
        ("nan reward", "it gave nan as its reward", [True, False]),
        ("short", r"the shape \[1\], not \[2\]", [True, False]),
        ("hangs", r"the process of drifting \(simulators 0 to 1\) ended with code 4", [True, True]),
    ],
)
def test_an_environment_that_fails_is_replaced(
    how: str, said: str, lost: list[bool], vectors: Callable[..., Any], tmp_path: Path
) -> None:
    hangs = {"hang_seconds": 1.0} if how == "hangs" else {}
    simulators = vectors(how, tmp_path / "once", **hangs)
    before = simulators.reset(5).observation
    step = push(simulators, -1.0, 0.5)
    assert step.truncated.tolist() == lost
    assert re.search(said, step.restarts[0])
    assert step.final_observation is not None
    assert torch.equal(step.final_observation[0], before[0]), "its last observation"
    assert not step.episodes
    assert not push(simulators, -1.0, 0.5).restarts, "the file lets them go on"
