"""The maze curriculum: its layouts, its game, its schedule, and that it goes on from a saved state."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmurate.cli import doctor
from murmurate.errors import MissingExtra, Refusal
from murmurate.recipes import recipe
from murmurate.sources.interface import SourceContext
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.spec import EnvSpec, TimeStep
from murmurate.training.members import open_only_source
from murmurate.worlds import mazes
from murmurate.worlds.mazes import MazeWorld
from murmurate.worlds.registry import world
from murmurate.worlds.served import ServedSimulators

if importlib.util.find_spec("miniworld") is None:
    pytest.skip("needs the extra mazes", allow_module_level=True)
LEFT, RIGHT, FORWARD, BACK = range(4)


def play(simulators: ServedSimulators, *actions: int) -> TimeStep:
    simulators.send(torch.tensor(actions))
    return simulators.receive()


def opened(request: pytest.FixtureRequest, level: int, size: int = 1, **options: Any) -> ServedSimulators:
    known = {field.name for field in dataclasses.fields(MazeWorld)}
    chosen = MazeWorld(level, **{k: options.pop(k) for k in known & options.keys()})
    try:
        simulators = chosen.open(size, training=options.pop("training", True), **options)
        simulators.reset(0)
    except Refusal as missing:
        pytest.skip(str(missing))
    request.addfinalizer(simulators.close)
    return simulators


@pytest.fixture(scope="module")
def game() -> Iterator[Any]:
    """A game in this process, to look into."""
    from murmurate.worlds._game_server import Unusable

    try:
        from murmurate.worlds._maze_game import MazeGame

        made = MazeGame(level=1, advance_every=10, frame_skip=5, seconds=(45.0, 75.0), picture=False)
    except Unusable as missing:
        pytest.skip(str(missing))
    yield made
    made.close()


def begin(game: Any, level: int, seed: int = 3) -> Any:
    game._level = level
    game.begin(seed, 0)
    return game._maze


def put(maze: Any, x: float, z: float, turn: float = 0.0) -> None:
    maze.agent.pos, maze.agent.dir = np.array([x, 0.0, z]), turn


def reachable(maze: Any) -> bool:
    """Whether the gold can be reached without lava: a flood over a grid of 35 cm."""
    step, seen = 0.35, set()
    border = [(0, 0)]
    start = maze.agent.pos.copy()
    while border:
        at = border.pop()
        if at in seen:
            continue
        seen.add(at)
        put(maze, start[0] + at[0] * step, start[2] + at[1] * step)
        if maze.touches_gold:
            return True
        here = maze.agent.pos.copy()
        for dx, dz in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            put(maze, *here[[0, 2]], turn=math.atan2(-dz, dx))
            maze.move(step)
            if np.allclose(maze.agent.pos, here + step * np.array([dx, 0, dz])) and not maze.burns:
                border.append((at[0] + dx, at[1] + dz))
    return False


def test_names_and_settings() -> None:
    assert world("maze-curriculum") == MazeWorld(0)
    assert world("maze-l3") == MazeWorld(3)
    assert world("maze-l3").name == "maze-l3"
    assert MazeWorld(0).spec() == EnvSpec(
        "maze-curriculum", (12, 84, 84), torch.uint8, actions=4, frames_per_step=5, stacked=True, channels=3
    )
    assert MazeWorld(0).shared_by(16).advance_every == 3_906
    with pytest.raises(Refusal, match="level is 6; it must be from 0 to 5"):
        MazeWorld(6)


def test_without_miniworld_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miniworld", None)
    with pytest.raises(MissingExtra, match=r"miniworld.*murmurate\[mazes\]"):
        world("maze-l1")


def test_without_opengl_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has the library, but no driver."""
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nowhere")
    simulators = MazeWorld(1).open(1, training=True)
    with pytest.raises(Refusal, match=r"OpenGL draws nothing here.*apt-get install libegl1 libegl-mesa0"):
        simulators.reset(0)
    found = doctor._starts("mazes", "mazes", mazes, MazeWorld(5))
    assert (found["status"], found["found"]) == ("bad", "does not start")
    assert "apt-get install libegl1" in found["advice"]


@pytest.mark.parametrize(
    ("level", "rooms", "bridges"),
    [(1, 1, (0,)), (2, 3, (1,)), (3, 3, (0,)), (4, 5, (1,)), (5, 7, (0, 1, 2, 3))],
)
def test_layouts(game: Any, level: int, rooms: int, bridges: tuple[int, ...]) -> None:
    """Rooms, and one between each two of them; the gold can be reached, but not from where one begins."""
    found, places = set(), set()
    for seed in range(8):
        maze = begin(game, level, seed)
        assert len(maze.rooms) == rooms
        assert len(maze.lava) == len(maze.bridges)
        found.add(len(maze.lava))
        places.add(tuple(maze.gold.pos))
        assert not maze.burns
        if seed < 2:
            assert reachable(maze)
    assert found <= set(bridges)
    assert level < 5 or len(found) >= 3, "separators are random"
    assert len(places) == 8


def test_lava_ends_an_episode_and_a_bridge_does_not(game: Any) -> None:
    maze = begin(game, 2)
    (lava,), (bridge,) = maze.lava, maze.bridges
    low_x, high_x, low_z, high_z = lava.where
    assert (high_x - low_x, high_z - low_z) == (7.0, 1.0)
    middle = (bridge.where[0] + bridge.where[1]) / 2
    put(maze, middle, low_z - 0.5, turn=-math.pi / 2)  # along z
    _, reward, terminated, truncated = game.step(FORWARD)
    assert (reward, terminated, truncated) == (-1.0, False, False)
    assert maze.agent.pos[2] == pytest.approx(low_z - 0.5 + 4.317 / 4)
    beside = low_x + 0.5 if middle > low_x + 3.5 else high_x - 0.5
    put(maze, beside, low_z - 0.5, turn=-math.pi / 2)
    _, reward, terminated, _ = game.step(FORWARD)
    assert (reward, terminated) == (-1001.0, True)
    assert game.success is False


def test_gold_ends_an_episode(game: Any) -> None:
    maze = begin(game, 1)
    x, _, z = maze.gold.pos
    towards = math.atan2(z - 3.5, 3.5 - x)  # of the middle of the room, from the gold
    put(maze, x + 1.9 * math.cos(towards), z - 1.9 * math.sin(towards), towards + math.pi)
    assert not maze.touches_gold
    _, reward, terminated, truncated = game.step(FORWARD)
    assert (reward, terminated, truncated) == (999.0, True, False)
    assert game.success is True


def test_turns_moves_and_walls(game: Any) -> None:
    maze = begin(game, 1)
    put(maze, 3.5, 3.5, 0.3)
    maze.gold.pos = np.array([100.0, 0.0, 100.0])
    game.step(LEFT)
    assert maze.agent.dir == pytest.approx(0.3 + math.pi / 4)
    game.step(RIGHT), game.step(RIGHT)
    assert maze.agent.dir == pytest.approx(0.3 - math.pi / 4)
    before = maze.agent.pos.copy()
    game.step(FORWARD)
    assert np.linalg.norm(maze.agent.pos - before) == pytest.approx(4.317 / 4)
    game.step(BACK)
    assert np.allclose(maze.agent.pos, before)
    for _ in range(20):
        game.step(FORWARD)
    x, _, z = maze.agent.pos
    assert 0.4 <= x <= 6.6
    assert 0.4 <= z <= 6.6


@pytest.mark.parametrize(("level", "steps", "penalty"), [(4, 4, -1000.0), (5, 6, 0.0)])
def test_time_outs(request: pytest.FixtureRequest, level: int, steps: int, penalty: float) -> None:
    simulators = opened(request, level, 2, seconds=0.9, last_seconds=1.5)
    for t in range(steps):
        step = play(simulators, LEFT, RIGHT)
        assert step.truncated.tolist() == [t == steps - 1] * 2
    assert not step.terminated.any()
    assert step.final_observation is not None
    assert step.reward.tolist() == pytest.approx([0.001 * (penalty - 1)] * 2)
    assert [e.episode_return for e in step.episodes] == [penalty - steps] * 2
    assert [e.length for e in step.episodes] == [steps] * 2


def test_jins_time_outs(game: Any) -> None:
    for level, steps in ((1, 180), (5, 300)):
        begin(game, level)
        ends = [game.step(LEFT)[3] for _ in range(steps)]
        assert ends == [False] * (steps - 1) + [True]


def test_the_level_advances_with_the_runs_steps(request: pytest.FixtureRequest) -> None:
    """30 env steps of 2 simulators a level, episodes of 5: levels advance with the next episode."""
    chosen = dataclasses.replace(MazeWorld(0), advance_every=30, seconds=1.25, last_seconds=1.25).shared_by(2)
    simulators = opened(
        request, **{f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen)}, size=2
    )
    levels = []
    for _ in range(80):
        play(simulators, LEFT, RIGHT)
        saved = simulators.state()
        assert saved is not None
        levels.append([one["game"]["level"] for one in saved["games"]])
    assert levels == [[min(5, 1 + 5 * (t // 5) // 15)] * 2 for t in range(1, 81)]
    assert [game["game"]["level"] for game in opened(request, 0, training=False).state()["games"]] == [5]


@dataclasses.dataclass(frozen=True)
class Shown(RolloutSourceConfig):
    """A source that shows what it is opened with."""

    def open(self, context: SourceContext) -> Any:
        return context


def test_a_run_divides_the_schedule_among_all_its_simulators() -> None:
    run = dataclasses.replace(recipe("maze-curriculum-a2c"), replicas=2, source=Shown(simulators=4))
    assert open_only_source(run, None).run.world == MazeWorld(0, advance_every=62_500 // 8)
    other = dataclasses.replace(run, world=world("cartpole"))
    assert open_only_source(other, None).run.world is other.world


def draw(steps: int, size: int) -> Tensor:
    return torch.randint(4, (steps, size), generator=torch.Generator().manual_seed(1))


def test_it_goes_on_from_its_state(request: pytest.FixtureRequest) -> None:
    settings = {"level": 0, "size": 2, "advance_every": 20, "seconds": 2.5}
    one, other = opened(request, **settings), opened(request, **settings)
    actions = draw(50, 2)
    for action in actions[:27]:
        play(one, *action.tolist())
    saved = one.state()
    other.reset(9)
    assert torch.equal(other.load(saved).observation, saved["observation"])
    ends = 0
    for action in actions[27:]:
        a, b = play(one, *action.tolist()), play(other, *action.tolist())
        assert torch.equal(a.observation, b.observation)
        assert torch.equal(a.reward, b.reward)
        assert a.episodes == b.episodes
        ends += len(a.episodes)
    assert ends >= 3


def test_a_state_of_another_kind_is_refused(request: pytest.FixtureRequest) -> None:
    simulators = opened(request, 1, 2)
    saved = simulators.state()
    simulators._process.kill()
    simulators._process.wait()
    assert simulators.state() is None, "there is none while the server is gone"
    assert play(simulators, LEFT, LEFT).truncated.all()
    for damage in ({"games": saved["games"][:1]}, {"games": [{}, {}]}):
        with pytest.raises(ValueError, match="does not go on from this state"):
            simulators.load(saved | damage)


def test_games_of_one_process_do_not_disturb_one_another(request: pytest.FixtureRequest) -> None:
    whole = opened(request, 5, 2)
    alone = [opened(request, 5, 1, first=first) for first in range(2)]
    start = whole.reset(4).observation
    assert torch.equal(start, torch.cat([each.reset(4).observation for each in alone]))
    for action in draw(25, 2):
        together = play(whole, *action.tolist()).observation
        parts = [play(each, its).observation for each, its in zip(alone, action.tolist(), strict=True)]
        assert torch.equal(together, torch.cat(parts))


def test_pictures(request: pytest.FixtureRequest) -> None:
    simulators = opened(request, 1, picture=True)
    small = play(simulators, LEFT).observation[0, -3:].numpy().astype(int)
    picture = simulators.picture()
    assert picture.shape == (240, 320, 3)
    shrunk = picture[1::3, 1::4].transpose(2, 0, 1)[:, :80, :80].astype(int)
    assert np.abs(shrunk.mean(axis=(1, 2)) - small.mean(axis=(1, 2))).max() < 6, "the same scene"
