"""Games in a process of their own: stacks, ends, and what happens to one that fails."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from murmurate.errors import Refusal, RunFailed, library_advice
from murmurate.sources.rollouts import RolloutSource
from murmurate.spec import EnvSpec, Episode, TimeStep
from murmurate.worlds import _game_server
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.served import ServedSimulators
from scripted import Always
from scripted_games import FOLDER, SCREEN, frame
from waiting import until

SPEC = EnvSpec("scripted", (9, 2, 2), torch.uint8, actions=9, stacked=True, channels=3)
_FAILURES = {3: "out of memory", 4: "nan as its reward", 5: r"uint8 \[3, 1, 2\]", 6: "killed"}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that opens scripted games, which are closed at the end."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), FOLDER]))
    made: list[ServedSimulators] = []

    def open_games(size: int = 2, **options: Any) -> ServedSimulators:
        own = {k: options.pop(k) for k in ("once", "broken", "unusable") if k in options}
        made.append(ServedSimulators(SPEC, "scripted_games:ScriptedGame", own, size, **options))
        return made[-1]

    yield open_games
    for each in made:
        each.close()


def play(simulators: ServedSimulators, *actions: int) -> TimeStep:
    simulators.send(torch.tensor(actions))
    return simulators.receive()


def keep_playing(simulators: ServedSimulators, action: int) -> None:
    for _ in range(10):
        play(simulators, action)


def stack(b: int, *numbers: int, seed: int = 5) -> Tensor:
    """The observation of game b that shows its frames of these numbers."""
    of_game = simulator_seed(seed, b) % 13
    return torch.from_numpy(np.concatenate([frame(number, of_game) for number in numbers]))


def test_stacks_begin_with_the_first_frame_and_end_with_the_last(opened: Callable[..., Any]) -> None:
    games = opened(scale=0.5)
    step = games.reset(5)
    assert torch.equal(step.observation, torch.stack([stack(0, 0, 0, 0), stack(1, 0, 0, 0)]))
    step = play(games, 0, 0)
    assert torch.equal(step.observation, torch.stack([stack(0, 0, 0, 1), stack(1, 0, 0, 1)]))
    assert step.reward.tolist() == [0.5, 0.5]
    assert step.final_observation is None
    step = play(games, 1, 2)
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False], [False, True])
    assert step.final_observation is not None
    assert torch.equal(step.final_observation[1], stack(1, 0, 1, 2))
    assert torch.equal(step.observation, torch.stack([stack(0, 3, 3, 3), stack(1, 3, 3, 3)]))
    assert step.episodes == [Episode(0, 2.0, 2), Episode(1, 2.0, 2)]
    step = play(games, 0, 1)
    assert torch.equal(step.observation[0], stack(0, 3, 3, 4))
    assert step.episodes == [Episode(1, 1.0, 1)]
    assert step.restarts == ()


def test_observations_are_never_written_to_again(opened: Callable[..., Any]) -> None:
    games = opened()
    kept = [games.reset(5).observation]
    copies = [kept[0].clone()]
    for action in (0, 0, 2, 0, 1, 0, 0, 0):
        kept.append(play(games, action, 0).observation)
        copies.append(kept[-1].clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert len({o.data_ptr() for o in kept}) == len(kept)


def test_halves_equal_the_whole_with_any_number_of_threads(opened: Callable[..., Any]) -> None:
    whole = opened(5, threads=3)
    halves = [opened(2), opened(3, first=2, threads=2)]
    start = whole.reset(8).observation
    assert torch.equal(start, torch.cat([half.reset(8).observation for half in halves]))
    for actions in ([0, 1, 2, 0, 0], [0, 0, 0, 2, 1], [1, 1, 1, 0, 0]):
        step = play(whole, *actions)
        parts = [play(halves[0], *actions[:2]), play(halves[1], *actions[2:])]
        assert torch.equal(step.observation, torch.cat([part.observation for part in parts]))
        assert torch.equal(step.truncated, torch.cat([part.truncated for part in parts]))


def test_pictures_are_of_game_0(opened: Callable[..., Any]) -> None:
    games = opened(screen=SCREEN)
    games.reset(0)
    play(games, 0, 1)  # game 1 has begun its next episode, and shows another number
    assert np.array_equal(games.picture(), np.full(SCREEN, 1))
    with pytest.raises(ValueError, match="picture=True"):
        opened().picture()


@pytest.mark.parametrize("action", _FAILURES)
def test_a_game_that_fails_is_replaced_and_the_others_go_on(
    action: int, opened: Callable[..., Any], tmp_path: Path
) -> None:
    hangs = {"hang_seconds": 0.5} if action == 6 else {}
    games = opened(3, once=str(tmp_path / "once"), threads=2, first=4, **hangs)
    games.reset(5)
    play(games, 0, 0, 0)
    step = play(games, 0, action, 1)
    assert step.truncated.tolist() == [False, True, False]
    assert step.terminated.tolist() == [False, False, True]
    assert step.reward.tolist() == [1.0, 0.0, 1.0]
    assert step.final_observation is not None
    assert torch.equal(step.final_observation[1], stack(5, 0, 1, 1)), "its last frame, again"
    assert torch.equal(step.observation[0], stack(4, 0, 1, 2))
    assert step.episodes == [Episode(2, 2.0, 2)], "a lost episode does not count"
    (message,) = step.restarts
    assert message.startswith("scripted (simulator 5) is started again after ")
    assert re.search(_FAILURES[action], message)
    step = play(games, 0, 1, 0)
    assert step.episodes == [Episode(1, 1.0, 1)]
    assert step.restarts == ()


@pytest.mark.parametrize("action", [7, 8])
def test_a_server_that_ends_or_does_not_answer_is_replaced(
    action: int, opened: Callable[..., Any], tmp_path: Path
) -> None:
    """7 ends it; a call that nothing can end (8) makes it end itself."""
    hangs = {"hang_seconds": 0.5} if action == 8 else {}
    games = opened(2, once=str(tmp_path / "once"), **hangs)
    games.reset(5)
    play(games, 0, 0)
    step = play(games, 0, action)
    assert step.truncated.tolist() == [True, True]
    assert step.final_observation is not None
    assert torch.equal(step.final_observation[0], stack(0, 0, 1, 1))
    assert len(step.restarts) == 2
    assert "the process of scripted (simulators 0 to 1) ended with code" in step.restarts[0]
    assert step.episodes == ()
    assert play(games, 1, 0).episodes == [Episode(0, 1.0, 1)]


def test_an_answer_may_take_as_long_as_the_games_may_take_to_start(opened: Callable[..., Any]) -> None:
    games = opened(5, threads=2)
    games.reset(5)
    assert games._connection.gettimeout() == 90 + 3 * 60
    play(games, 0, 0, 0, 0, 0)
    assert games._connection.gettimeout() == 90


def test_each_reset_of_a_game_may_take_as_long_as_its_start(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    games = opened(1)
    slot: Any = _game_server._GameSlot(games._settings, games._shared, 0)
    slot.begin(5)
    clock, killed = [time.monotonic()], []
    begin = slot._game.begin

    def begins_slowly(seed: int | None, steps: int) -> Any:
        for seconds in (30.0, 31.0):
            clock[0] += seconds
            slot.kill_if_hung()
            killed.append(slot._game._killed)
        return begin(seed, steps)

    monkeypatch.setattr(_game_server.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(slot._game, "begin", begins_slowly)
    slot.step(1)
    assert killed == [False, True]


def test_a_killed_server_is_replaced(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    games = opened(2)
    games.reset(5)
    games._process.kill()
    games._process.wait()
    assert play(games, 0, 0).truncated.all()
    assert not play(games, 0, 0).truncated.any()
    assert len(list(tmp_path.iterdir())) == 1, "the folder of the present server"
    games.close()
    assert not list(tmp_path.iterdir())


def test_what_fails_again_and_again_ends_the_run_by_name(opened: Callable[..., Any]) -> None:
    with pytest.raises(
        RunFailed, match=r"scripted \(simulator 3\) failed 6 times in a row.*OSError: no power"
    ):
        opened(1, first=3, broken=True).reset(0)
    games = opened(1)
    games.reset(0)
    with pytest.raises(RunFailed, match=r"6 times in a row, at last by RuntimeError: out of memory"):
        keep_playing(games, 3)
    games = opened(1)
    games.reset(0)
    with pytest.raises(RunFailed, match=r"ended with code 9, 4 times in a row.*logs/"):
        keep_playing(games, 7)


def test_now_and_then_is_not_again_and_again(opened: Callable[..., Any]) -> None:
    games = opened(1)
    games.reset(0)
    for _ in range(8):
        assert play(games, 3).truncated.all()
        for _ in range(12):
            assert not play(games, 0).truncated.any()


def test_what_cannot_be_opened_is_refused_with_the_remedy(opened: Callable[..., Any]) -> None:
    with pytest.raises(Refusal, match=r"no cartridge\. Run: apt-get install cartridge"):
        opened(1, unusable=True).reset(0)


@pytest.mark.parametrize(
    ("said", "package"),
    [
        ('Library "GLU" not found.', "libglu1-mesa"),
        ("libGL.so.1: cannot open shared object file: No such file or directory", "libgl1"),
        ('Library "EGL" not found.', "libegl1 libegl-mesa0 libgl1-mesa-dri"),
        ("cannot import name 'GLuint' from 'pyglet.gl'", ""),
    ],
)
def test_a_missing_library_of_the_system_is_named_with_its_package(said: str, package: str) -> None:
    advice = library_advice(ImportError(said))
    assert advice == (f" On Debian and Ubuntu run: apt-get install {package}" if package else "")


def test_a_game_that_cannot_be_imported_is_refused(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "without_library.py").write_text("raise ImportError('Library \"GLU\" not found.')")
    os.environ["PYTHONPATH"] += os.pathsep + str(tmp_path)  # as it was after the test: see ``opened``
    simulators = ServedSimulators(SPEC, "without_library:Game", {}, 1)
    with pytest.raises(Refusal, match=r"scripted cannot be opened here.*\. On Debian.*install libglu1-mesa"):
        simulators.reset(0)


def test_an_impossible_action_is_refused(opened: Callable[..., Any]) -> None:
    games = opened(2)
    games.reset(0)
    with pytest.raises(ValueError, match="actions 0 to 8"):
        games.send(torch.tensor([0, 9]))
    assert games.state() is None
    with pytest.raises(ValueError, match="cannot be saved"):
        games.load({})


def test_a_source_counts_and_tells_them(opened: Callable[..., Any], tmp_path: Path) -> None:
    games = opened(2, once=str(tmp_path / "once"))
    source = RolloutSource([games], Always(3), 5, seed=0)
    assert source.fields() == {}
    batch = next(source)
    # game 0 fails first, and from then on the file lets them all go on
    assert source.fields() == {"simulator_restarts": 1}
    ((kind, message),) = source.events()
    assert kind == "simulator restarted"
    assert "out of memory" in message
    assert source.events() == []
    assert batch.data.truncated.sum() == 1
    assert len(batch.data.truncated_observation) == 1
    assert not batch.episodes


def test_the_server_ends_with_whoever_opened_it(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Also when that one is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            games = opened(1)
            games.reset(0)
            os.write(writer, games._process.pid.to_bytes(8, "little"))
            signal.pause()
        finally:
            os._exit(1)
    server = int.from_bytes(os.read(reader, 8), "little")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: not _runs(server), "the server to end")


def _runs(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
