"""Doom's worlds against ViZDoom itself, played with the same seed."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from filming import record_game
from murmurate.cli import doctor
from murmurate.errors import MissingExtra, Refusal
from murmurate.evaluation.games import evaluate
from murmurate.recipes import recipe
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds import vizdoom as worlds
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.registry import world
from murmurate.worlds.served import ServedSimulators
from murmurate.worlds.vizdoom import DoomWorld
from oracles.images import area_mean
from scripted import Always
from waiting import until

vizdoom = pytest.importorskip("vizdoom")
SHARED = Path("/dev/shm")
LEFT, RIGHT, FORWARD = 1, 2, 4  # bits of an action on MyWayHome


def draw(spec: EnvSpec, steps: int, size: int, seed: int) -> Tensor:
    return torch.randint(spec.actions, (steps, size), generator=torch.Generator().manual_seed(seed))


def play(simulators: ServedSimulators, action: Tensor) -> TimeStep:
    simulators.send(action)
    return simulators.receive()


def opened(request: pytest.FixtureRequest, name: str, size: int, **options: Any) -> ServedSimulators:
    """Simulators that are closed at the end of the test."""
    known = {field.name for field in dataclasses.fields(DoomWorld)}
    chosen = dataclasses.replace(world(name), **{k: options.pop(k) for k in known & options.keys()})
    simulators = chosen.open(size, training=options.pop("training", True), **options)
    request.addfinalizer(simulators.close)
    return simulators


def test_names_and_settings() -> None:
    home, corridor = world("doom-my-way-home"), world("doom-corridor-plus")
    assert home.spec() == EnvSpec(
        "doom-my-way-home", (12, 84, 84), torch.uint8, actions=8, frames_per_step=4, stacked=True, channels=3
    )
    assert isinstance(corridor, DoomWorld)
    assert (corridor.spec().actions, corridor.skill, corridor.reward_scale) == (8, 5, 0.01)
    hidden = world("doom-corridor-plus-occluded")
    assert hidden == dataclasses.replace(corridor, occlude=(30, 130, 10, 110))
    assert hidden.name == "doom-corridor-plus-occluded"
    assert world("doom-basic").spec().actions == 4, "none, or one of three buttons"
    assert recipe("doom-corridor-plus-occluded-dqn").world == hidden
    with pytest.raises(Refusal, match="Did you mean 'doom-my-way-home'"):
        world("doom-my-way-hom")
    with pytest.raises(Refusal, match="no world called 'doom-my-way-home-occluded'"):
        world("doom-my-way-home-occluded")


def test_bad_settings_are_refused(request: pytest.FixtureRequest) -> None:
    with pytest.raises(Refusal, match="no left, right, top and bottom within a screen of 160 x 120"):
        DoomWorld("my-way-home", occlude=(30, 161, 10, 110))
    with pytest.raises(Refusal, match="skill is 6; it must be from 1 to 5"):
        DoomWorld("my-way-home", skill=6)
    with pytest.raises(Refusal, match="a button is given twice"):
        DoomWorld("my-way-home", buttons=("attack", "use", "attack"))
    with pytest.raises(Refusal, match=r"no button 'fly'\. Use some of .*turn-left"):
        opened(request, "doom-basic", 1, buttons=("fly",)).reset(0)


def test_without_vizdoom_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(MissingExtra, match=r"Doom needs the package vizdoom.*murmurate\[doom\]"):
        world("doom-my-way-home")
    with pytest.raises(MissingExtra, match=r"murmurate\[doom\]"):
        DoomWorld("my-way-home").open(1, training=True)
    assert world("cartpole").name == "cartpole"


def test_a_missing_scenario_is_named_with_the_package(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(worlds._WORLDS, "my-way-home", ("removed", {}))
    words = r"removed\.cfg is missing from the package vizdoom. Run: pip install --force-reinstall vizdoom"
    with pytest.raises(Refusal, match=words):
        opened(request, "doom-my-way-home", 1).reset(0)
    found = doctor._starts("Doom", "doom", worlds, DoomWorld("my-way-home"))
    assert (found["status"], found["found"]) == ("bad", "does not start")
    assert "--force-reinstall vizdoom" in found["advice"]


class Oracle:
    """ViZDoom's own interface, one tic at a time, and each frame made smaller in slow loops."""

    def __init__(self, file: str, buttons: list[str], seed: int, folder: Path) -> None:
        self.game = game = vizdoom.DoomGame()
        game.load_config(str(Path(vizdoom.scenarios_path) / file))
        game.set_available_buttons([getattr(vizdoom.Button, name) for name in buttons])
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_window_visible(False)
        game.set_episode_timeout(0)
        game.set_doom_config_path(str(folder / "vizdoom.ini"))
        game.set_seed(simulator_seed(seed, 0) % 2**32)
        game.init()

    def step(self, held: list[bool]) -> float:
        return sum(self.game.make_action(held, 1) for _ in range(4) if not self.game.is_episode_finished())

    def frame(self, hidden: tuple[int, ...]) -> np.ndarray:
        screen = self.game.get_state().screen_buffer
        for y in range(*hidden[2:]) if hidden else ():
            screen[y, hidden[0] : hidden[1]] = 0
        return area_mean(screen, 84, 84).transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("name", "file", "buttons", "hidden"),
    [
        ("doom-my-way-home", "my_way_home.cfg", ["TURN_LEFT", "TURN_RIGHT", "MOVE_FORWARD"], ()),
        (
            "doom-corridor-plus-occluded",
            "deadly_corridor.cfg",
            ["MOVE_RIGHT", "TURN_LEFT", "TURN_RIGHT"],
            (30, 130, 10, 110),
        ),
    ],
)
def test_it_shows_what_vizdoom_shows(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    file: str,
    buttons: list[str],
    hidden: tuple[int, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    oracle = Oracle(file, buttons, seed=3, folder=tmp_path)
    request.addfinalizer(oracle.game.close)
    simulators = opened(request, name, 1)
    frames = [oracle.frame(hidden)] * 4
    observation = simulators.reset(3).observation
    for action in [None, *(range(8) if not hidden else (LEFT, RIGHT, FORWARD))]:
        if action is not None:
            step = play(simulators, torch.tensor([action]))
            reward = oracle.step([bool(action & 1 << k) for k in range(3)])
            assert float(step.reward) == pytest.approx(reward * (0.01 if "corridor" in name else 1), rel=1e-6)
            observation = step.observation
            frames.append(oracle.frame(hidden))
        seen = np.concatenate(frames[-4:])
        assert np.abs(observation[0].numpy() - seen).max() <= 0.51, "but for rounding"


def test_a_time_out_truncates_with_the_last_picture(request: pytest.FixtureRequest) -> None:
    """10 tics: two steps of four, and one of two. The same episode without a time-out goes on."""
    cut, whole = (opened(request, "doom-my-way-home", 2, timeout=t) for t in (10, None))
    assert torch.equal(cut.reset(4).observation, whole.reset(4).observation)
    for t, action in enumerate(draw(cut.spec, 3, 2, seed=5)):
        a, b = play(cut, action), play(whole, action)
        assert not a.terminated.any()
        assert a.truncated.all() == a.truncated.any() == (t == 2)
        if t < 2:
            assert torch.equal(a.observation, b.observation)
    assert a.final_observation is not None
    assert torch.equal(a.final_observation[:, :9], b.observation[:, :9])
    assert not torch.equal(a.observation[:, :9], b.observation[:, :9])
    assert [(e.simulator, e.length) for e in a.episodes] == [(0, 3), (1, 3)]
    assert a.episodes[0].episode_return == pytest.approx(-0.001)
    assert torch.equal(a.observation[:, :3], a.observation[:, 9:]), "the first frame of the next, four times"


def test_my_way_home_takes_525_steps_at_most(request: pytest.FixtureRequest) -> None:
    simulators = opened(request, "doom-my-way-home", 1)
    simulators.reset(0)
    for _ in range(524):
        assert not play(simulators, torch.tensor([LEFT])).truncated.any()
    step = play(simulators, torch.tensor([LEFT]))
    assert step.truncated.all()
    assert step.episodes[0].episode_return == pytest.approx(-0.21)
    assert step.episodes[0].success is False


def test_a_death_terminates_and_rewards_are_scaled_in_training_alone(request: pytest.FixtureRequest) -> None:
    training, evaluation = (
        opened(request, "doom-corridor-plus", 1, training=training) for training in (True, False)
    )
    training.reset(1), evaluation.reset(1)
    total = 0.0
    for _ in range(525):
        a, b = (play(each, torch.tensor([0])) for each in (training, evaluation))
        assert torch.equal(a.observation, b.observation)
        assert float(a.reward) == pytest.approx(0.01 * float(b.reward))
        total += float(b.reward)
        if a.terminated.all():
            break
    else:
        pytest.fail("who stands still in the corridor dies")
    assert not a.truncated.any()
    assert a.episodes == b.episodes
    assert a.episodes[0].episode_return == pytest.approx(total)
    assert total < -90, "a death costs 100"
    assert a.episodes[0].success is False


def test_seeds_and_halves(request: pytest.FixtureRequest) -> None:
    whole = opened(request, "doom-my-way-home", 4)
    halves = [opened(request, "doom-my-way-home", 2, first=first) for first in (0, 2)]
    start = whole.reset(8).observation
    assert torch.equal(start, torch.cat([half.reset(8).observation for half in halves]))
    assert not torch.equal(start[0], start[1]), "it begins in a random room"
    actions = draw(whole.spec, 40, 4, seed=1)
    seen = [play(whole, action).observation for action in actions]
    for action, observation in zip(actions, seen, strict=True):
        parts = [play(half, its) for half, its in zip(halves, action.split(2), strict=True)]
        assert torch.equal(observation, torch.cat([part.observation for part in parts]))
    assert torch.equal(whole.reset(8).observation, start), "also of games that have begun"
    assert all(torch.equal(play(whole, a).observation, o) for a, o in zip(actions, seen, strict=True))


def games_of(simulators: ServedSimulators) -> list[psutil.Process]:
    """ViZDoom's processes."""
    return [
        p for p in psutil.Process(simulators._process.pid).children(recursive=True) if "vizdoom" in p.name()
    ]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_game_that_dies_or_hangs_is_started_again(request: pytest.FixtureRequest, sign: int) -> None:
    chosen = world("doom-my-way-home").open(3, training=True)
    simulators = ServedSimulators(
        chosen.spec, chosen._settings.game, chosen._settings.options, 3, threads=2, hang_seconds=2.0
    )
    request.addfinalizer(simulators.close)
    simulators.reset(0)
    before = play(simulators, torch.zeros(3, dtype=torch.int64)).observation
    victim = games_of(simulators)[0]
    os.kill(victim.pid, sign)
    step = play(simulators, torch.zeros(3, dtype=torch.int64))
    assert int(step.truncated.sum()) == 1
    lost = int(torch.argmax(step.truncated.int()))
    assert step.final_observation is not None
    assert torch.equal(step.final_observation[lost, 9:], before[lost, 9:])
    assert not step.episodes
    (message,) = step.restarts
    assert message.startswith(f"doom-my-way-home (simulator {lost}) is started again after ViZDoom")
    assert not play(simulators, torch.zeros(3, dtype=torch.int64)).truncated.any()
    assert len(games_of(simulators)) == 3
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE


def test_a_crash_of_vizdoom_itself_replaces_all_games(request: pytest.FixtureRequest) -> None:
    """A game that dies while it starts takes ViZDoom's library, and so the server, with it (a segmentation
    fault in 1.3.2)."""
    before = set(SHARED.glob("ViZDoom*"))
    simulators = opened(request, "doom-my-way-home", 2)
    with ThreadPoolExecutor() as pool:
        started = pool.submit(simulators.reset, 0)
        found = until(lambda: simulators._process is not None and games_of(simulators), "a game that starts")
        found[0].kill()
        step = started.result()
    assert step.restarts
    assert "is started again" in step.restarts[0]
    assert len(games_of(simulators)) == 2
    assert not play(simulators, torch.zeros(2, dtype=torch.int64)).restarts
    new = set(SHARED.glob("ViZDoom*")) - before
    in_use = "".join(map(_maps, psutil.pids()))
    for name in new:
        if str(name) not in in_use:
            name.unlink(missing_ok=True)


def _maps(process: int) -> str:
    try:
        return Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return ""


def test_games_find_their_folder_when_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ViZDoom makes it where it is missing; where two processes do so at once, one of them ends."""
    monkeypatch.chdir(tmp_path)
    games = importlib.import_module("murmurate.worlds._doom_game")
    taken = ("buttons", "combine", "skill", "frame_skip", "timeout", "occlude", "occlude_colour")
    games.DoomGame(file="my_way_home", **{name: getattr(world("doom-my-way-home"), name) for name in taken})
    assert (tmp_path / "_vizdoom").is_dir()


def test_a_folder_in_which_nothing_is_executed_has_games_without_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a mount with noexec: a script that is not used is better than a game that does not start."""
    monkeypatch.chdir(tmp_path)
    games = importlib.import_module("murmurate.worlds._doom_game")
    script = games._launcher()
    if script is None:
        pytest.skip("this host has no setpriv")
    script.chmod(0o600)
    assert games._launcher() is None


def test_a_package_at_any_path_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    games = importlib.import_module("murmurate.worlds._doom_game")
    program = tmp_path / 'a "$HOME" `folder`' / "vizdoom"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho started $1\n")
    program.chmod(0o700)
    monkeypatch.setattr(games.vizdoom, "exe_path", str(program))
    if (script := games._launcher()) is None:
        pytest.skip("this host has no setpriv")
    assert subprocess.run([script, "a game"], capture_output=True, text=True).stdout == "started a game\n"


def test_nothing_is_left(request: pytest.FixtureRequest) -> None:
    """Neither after close, nor where the server is killed: no process, and no name of the shared memory that
    the games had mapped."""
    for kill in (False, True):
        simulators = opened(request, "doom-my-way-home", 2)
        simulators.reset(0)
        games = games_of(simulators)
        assert len(games) == 2
        shared = {name for game in games for name in re.findall(rf"{SHARED}/ViZDoom\w+", _maps(game.pid))}
        assert len(shared) >= 2
        if kill:
            simulators._process.kill()
            _, left = psutil.wait_procs(games, timeout=10)
        else:
            simulators.close()
            left = [game for game in games if game.is_running()]
        assert not left
        assert not any(Path(name).exists() for name in shared)


def test_film_and_evaluation_agree(request: pytest.FixtureRequest) -> None:
    short = dataclasses.replace(world("doom-corridor-plus-occluded"), timeout=40)
    result = evaluate(short, Always(3), 2, seed=9)
    frames, total = record_game(short, Always(3), seed=9)
    assert total == pytest.approx(result.returns[0])
    assert frames.shape == (result.lengths[0], 120, 160, 3)
    assert not frames[:, 10:110, 30:130].any()
    assert frames[:, :10].any()
