"""Names of worlds."""

import sys
from pathlib import Path

import pytest

from murmurate import plugins
from murmurate.errors import MissingExtra, Refusal
from murmurate.recipes import recipe_names
from murmurate.worlds.atari import AtariWorld, games
from murmurate.worlds.gym import GymWorld
from murmurate.worlds.registry import world, world_names


def test_classic_and_mujoco_names_need_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert world("cartpole") == GymWorld("CartPole-v1")
    assert world("halfcheetah") == GymWorld("HalfCheetah-v5")
    assert {"cartpole", "walker2d", "mountain-car"} <= set(world_names())
    with pytest.raises(MissingExtra, match=r"ale-py.*murmurate\[atari\]"):
        world("pong")
    with pytest.raises(Refusal, match="Did you mean 'cartpole'"):
        world("cartpol")


def test_games_by_their_names_in_hyphens() -> None:
    pytest.importorskip("ale_py")
    assert world("pong") == AtariWorld("pong")
    assert world("space-invaders") == AtariWorld("space_invaders")
    assert world("space-invaders").name == "space-invaders"
    assert len(games()) > 100
    assert all(world(name).name == name for name in world_names())


@pytest.mark.parametrize(
    ("given", "near"), [("space-invader", "space-invaders"), ("pongg", "pong"), ("walker", "walker2d")]
)
def test_the_nearest_name_is_offered(given: str, near: str) -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(Refusal, match=f"no world called '{given}'.*Did you mean '{near}'"):
        world(given)


def test_any_registered_environment_is_a_world() -> None:
    assert world("gym:Acrobot-v1") == world("acrobot")
    assert world("gym:MountainCar-v0").name == "mountain-car"
    lake = world("gym:FrozenLake-v1")
    assert lake == world(lake.name) == GymWorld("FrozenLake-v1")
    with pytest.raises(Refusal, match=r"registered as 'Acrobt-v1'. Did you mean 'Acrobot-v1'\?"):
        world("gym:Acrobt-v1")
    with pytest.raises(Refusal, match=r"needs the module 'nowhere'.*No module named 'nowhere'.*PYTHONPATH"):
        world("gym:nowhere:Acrobot-v1")
    with pytest.raises(Refusal, match=r"registered as 'Mine-v0'.* Name the module .*gym:my_module:Mine-v0"):
        world("Mine-v0")
    with pytest.raises(Refusal, match=r"no world called 'Acrobot-v1'.* of that id is gym:Acrobot-v1\."):
        world("Acrobot-v1")


_THEIRS = """
from dataclasses import dataclass
from typing import ClassVar
from murmurate.worlds.gym import GymWorld

@dataclass(frozen=True)
class Frozen:
    name: ClassVar[str] = "ice-rink"

def names(): return ["ice-rink"]
def world(name): return Frozen() if name == "ice-rink" else None
"""


def test_a_module_of_somebody_else_joins_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_rink.py").write_text(_THEIRS)
    about = tmp_path / "their_rink-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rink\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[murmurate.worlds]\nrink = their_rink\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.modules.cache_clear()
    try:
        assert "ice-rink" in world_names()
        assert "ice-rink-spo-dqn" in recipe_names()
        assert world("ice-rink").name == "ice-rink"
        with pytest.raises(Refusal, match="Did you mean 'ice-rink'"):
            world("ice-rin")
    finally:
        plugins.modules.cache_clear()


def test_a_world_of_an_unknown_game_is_refused() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(Refusal, match=r"no game called 'space-invader'.*'space-invaders'"):
        AtariWorld("space_invader").spec()


def test_videos_have_the_rate_of_the_world() -> None:
    assert world("cartpole").env_steps_per_second == 50
    assert world("gym:Acrobot-v1").env_steps_per_second == 15
    pytest.importorskip("ale_py")
    assert world("pong").env_steps_per_second == 15
