"""A hidden rectangle of an Atari screen, against ale-py's single games, frame by frame."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from filming import record_game
from murmurate.errors import Refusal
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.atari import AtariSimulators, AtariWorld
from murmurate.worlds.registry import world
from oracles.images import area_mean
from scripted import Always

ale_py = pytest.importorskip("ale_py")
LEFT, RIGHT, TOP, BOTTOM = 55, 105, 34, 194


def play(simulators: AtariSimulators, action: Tensor) -> TimeStep:
    simulators.send(action)
    return simulators.receive()


def grey(rgb: Any) -> Any:
    return np.floor(rgb @ np.array([0.299, 0.587, 0.114]) + 0.5)


class Oracle:
    """One game without no-ops: each frame in colour is hidden, turned grey, maximised with the one before."""

    def __init__(self, game: str, rectangle: tuple[int, ...], colour: tuple[int, ...]) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale = ale_py.ALEInterface()
        ale.setFloat("repeat_action_probability", 0.0)
        ale.loadROM(ale_py.roms.get_rom_path(game))
        ale.reset_game()
        self.actions, self.rectangle, self.colour = ale.getMinimalActionSet(), rectangle, colour

    def frame(self) -> Any:
        screen = self.ale.getScreenRGB().copy()
        left, right, top, bottom = self.rectangle
        for y in range(top, bottom):
            screen[y, left:right] = self.colour
        return grey(screen)

    def step(self, action: int) -> Any:
        """[84, 84]."""
        frames = []
        for _ in range(4):
            self.ale.act(self.actions[action])
            frames.append(self.frame())
        return area_mean(np.maximum(*frames[-2:]), 84, 84)


@pytest.mark.parametrize("game", ["pong", "space_invaders", "seaquest"])
def test_our_grey_is_that_of_ale(game: str) -> None:
    ale = Oracle(game, (0, 0, 0, 0), (0, 0, 0)).ale
    for action in range(100):
        ale.act(ale.getMinimalActionSet()[action % 3])
        assert np.array_equal(grey(ale.getScreenRGB()), ale.getScreenGrayscale())


@pytest.mark.parametrize("name", ["pong-occluded", "seaquest"])
def test_it_shows_the_game_but_for_the_rectangle(name: str) -> None:
    plain: Any = dataclasses.replace(world(name), noop_max=0, fire_reset=False, stack=2)
    chosen = (
        plain
        if plain.occlude
        else dataclasses.replace(plain, occlude=(3, 60, 11, 100), occlude_colour=(255, 0, 40))
    )
    oracle = Oracle(chosen.game, chosen.occlude, chosen.occlude_colour)
    simulators = chosen.open(1, training=True)
    before, seen = area_mean(oracle.frame(), 84, 84), simulators.reset(0).observation
    assert not seen[0, 0].any(), "as ale-py has it before a game's first image"
    assert np.abs(seen[0, 1].numpy() - before).max() <= 0.51
    for action in [2, 3, 2, 0, 1, 3]:
        shown, seen = oracle.step(action), play(simulators, torch.tensor([action])).observation[0].numpy()
        assert np.abs(seen[1] - shown).max() <= 0.51, "but for rounding"
        assert np.abs(seen[0] - before).max() <= 0.51
        before = shown


def both(**options: Any) -> tuple[AtariSimulators, AtariSimulators]:
    """Two of the same games, hidden in part and whole."""
    hidden = world("pong-occluded")
    return tuple(  # type: ignore[return-value]
        dataclasses.replace(each, **options).open(2, training=True) for each in (hidden, world("pong"))
    )


def outside(observation: Tensor) -> Tensor:
    """The columns of small images that no hidden pixel reaches: 55 and 105 of 160 are 28.9 and 55.1 of 84."""
    return torch.cat([observation[..., :28], observation[..., 56:]], dim=-1)


def test_ends_and_pictures_are_those_of_the_whole_game() -> None:
    hidden, whole = both(max_frames_per_episode=100)
    a, b = hidden.reset(3), whole.reset(3)
    actions = torch.randint(6, (60, 2), generator=torch.Generator().manual_seed(0))
    ends = 0
    for action in actions:
        a, b = play(hidden, action), play(whole, action)
        assert torch.equal(outside(a.observation), outside(b.observation))
        assert torch.equal(a.reward, b.reward)
        assert torch.equal(a.terminated, b.terminated)
        assert torch.equal(a.truncated, b.truncated)
        assert list(a.episodes) == list(b.episodes)
        inside = a.observation[:, -1, 14:77, 29:55]
        assert (inside == 87).all(), "Pong's own background"
        assert (a.final_observation is None) == (b.final_observation is None)
        if a.final_observation is not None and b.final_observation is not None:
            ends += 1
            ended = a.truncated
            assert torch.equal(outside(a.final_observation)[ended], outside(b.final_observation)[ended])
    assert ends >= 2


def test_lives_that_are_lost_keep_the_stack() -> None:
    plain = AtariWorld("breakout")
    hidden = dataclasses.replace(plain, occlude=(0, 160, 0, 20)).open(1, training=True)
    whole = plain.open(1, training=True)
    hidden.reset(2), whole.reset(2)
    losses = 0
    for action in torch.randint(4, (400, 1), generator=torch.Generator().manual_seed(3)):
        a, b = play(hidden, action), play(whole, action)
        losses += int(a.terminated)
        assert torch.equal(a.observation[..., 9:, :], b.observation[..., 9:, :])
        assert not a.observation[..., :8, :].any()
    assert losses >= 2


def test_names_options_and_films() -> None:
    hidden = world("pong-occluded")
    assert hidden == AtariWorld("pong", occlude=(55, 105, 34, 194), occlude_colour=(144, 72, 17))
    assert hidden.spec() == EnvSpec(
        "pong-occluded", (4, 84, 84), torch.uint8, actions=6, frames_per_step=4, stacked=True
    )
    assert dataclasses.replace(hidden, occlude_colour=(0, 0, 0)).name == "pong"
    with pytest.raises(Refusal, match="no world called 'breakout-occluded'"):
        world("breakout-occluded")
    with pytest.raises(Refusal, match="no left, right, top and bottom within a screen of 160 x 210"):
        AtariWorld("pong", occlude=(55, 161, 34, 194))
    with pytest.raises(Refusal, match="a colour has 3 numbers, not 1"):
        AtariWorld("pong", occlude_colour=(3,))
    frames, _ = record_game(hidden, Always(2), seed=0, max_steps=20)
    assert (frames[:, TOP:BOTTOM, LEFT:RIGHT] == (144, 72, 17)).all()
    assert (frames[:, :TOP] != (144, 72, 17)).any()
