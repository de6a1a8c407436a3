"""Names of worlds."""

import sys

import pytest

from murmurate.errors import MissingExtra, Refusal
from murmurate.worlds.atari import AtariWorld, game_name, games
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
    assert game_name("montezuma-revenge") == "montezuma_revenge"
    assert len(games()) > 100
    assert all(world(name).name == name for name in world_names())


@pytest.mark.parametrize(
    ("given", "near"), [("space-invader", "space-invaders"), ("pongg", "pong"), ("walker", "walker2d")]
)
def test_the_nearest_name_is_offered(given: str, near: str) -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(Refusal, match=f"no world called '{given}'.*Did you mean '{near}'"):
        world(given)


def test_only_hyphens_name_a_game() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(Refusal, match=r"no game called 'space_invaders'.*'space-invaders'"):
        game_name("space_invaders")
