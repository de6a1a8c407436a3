"""Histories of observations and rescaled actions around any simulators."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from resuming import assert_resumes_exactly, drawn_actions, play

from murmurate.errors import Refusal
from murmurate.worlds.gym import GymWorld
from murmurate.worlds.own import world_of
from murmurate.worlds.registry import world


def test_a_history_is_the_last_observations_of_its_own_episode() -> None:
    world, count = GymWorld("CartPole-v1", max_episode_steps=9), 3
    plain = world.open(2, training=True)
    stacked = GymWorld("CartPole-v1", max_episode_steps=9, frame_stack=count).open(2, training=True)
    assert stacked.spec.observation_shape == (12,)
    seen = plain.reset(5).observation
    histories = [[seen[b]] * count for b in range(2)]
    assert torch.equal(stacked.reset(5).observation, torch.stack([torch.cat(h) for h in histories]))
    truncated = 0
    for actions in drawn_actions(plain.spec, 60, 2, seed=1):
        one, other = play(plain, actions), play(stacked, actions)
        for b in range(2):
            if one.terminated[b] or one.truncated[b]:
                assert one.final_observation is not None
                assert other.final_observation is not None
                if one.truncated[b]:
                    truncated += 1
                    last = torch.cat([*histories[b][1:], one.final_observation[b]])
                    assert torch.equal(other.final_observation[b], last)
                histories[b] = [one.observation[b]] * count
            else:
                histories[b] = [*histories[b][1:], one.observation[b]]
            assert torch.equal(other.observation[b], torch.cat(histories[b]))
        assert torch.equal(one.reward, other.reward)
    assert truncated >= 3


def test_rescaled_actions_span_the_bounds() -> None:
    low, high = GymWorld("Pendulum-v1", rescale_actions=True).rescaled_bounds()
    assert (low.tolist(), high.tolist()) == ([-2.0], [2.0])
    assert GymWorld("Pendulum-v1").rescaled_bounds() is None
    plain = GymWorld("Pendulum-v1").open(3, training=True)
    scaled = GymWorld("Pendulum-v1", rescale_actions=True).open(3, training=True)
    assert (scaled.spec.action_low, scaled.spec.action_high) == ((-1.0,), (1.0,))
    plain.reset(2)
    scaled.reset(2)
    for share in (-1.0, -0.25, 0.0, 0.5, 1.0, 7.0):
        one = play(plain, torch.full((3, 1), 2.0 * share))
        other = play(scaled, torch.full((3, 1), share))
        assert torch.equal(one.observation, other.observation)
        assert torch.equal(one.reward, other.reward)


def test_both_resume_exactly() -> None:
    world = GymWorld("Pendulum-v1", 25, frame_stack=4, rescale_actions=True)
    assert assert_resumes_exactly(world, before=37, after=60) >= 4


def test_both_around_a_process_of_simulators() -> None:
    world = GymWorld("Pendulum-v1", 12, frame_stack=2, rescale_actions=True)
    served = GymWorld("Pendulum-v1", 12, frame_stack=2, rescale_actions=True, served=True)
    one, other = world.open(2, training=True), served.open(2, training=True)
    try:
        assert one.spec == other.spec
        assert torch.equal(one.reset(3).observation, other.reset(3).observation)
        for actions in drawn_actions(one.spec, 30, 2, seed=4):
            a, b = play(one, actions), play(other, actions)
            assert torch.equal(a.observation, b.observation)
            assert np.allclose(a.reward.numpy(), b.reward.numpy())
    finally:
        other.close()


@pytest.mark.parametrize(
    ("name", "extra", "served"),
    [("dmc-cartpole-swingup", "dm_control", False), ("dmc-cartpole-swingup", "dm_control", True),
     ("adroit-door", "gymnasium_robotics", False)],
)  # fmt: skip
def test_every_world_of_arrays_has_them(name: str, extra: str, served: bool) -> None:
    pytest.importorskip(extra)
    chosen: Any = world(name)
    limited = dataclasses.replace(chosen, max_episode_steps=5, served=served)
    fields = {"frame_stack": 2, "rescale_actions": True}
    plain, viewed = (
        limited.open(1, training=True),
        dataclasses.replace(limited, **fields).open(1, training=True),
    )
    try:
        low, high = (torch.tensor(bound) for bound in (plain.spec.action_low, plain.spec.action_high))
        before = plain.reset(1).observation
        assert torch.equal(viewed.reset(1).observation, torch.cat([before, before], 1))
        assert viewed.spec == dataclasses.replace(limited, **fields).spec()
        for t, share in enumerate(torch.rand(7, 1, len(low), generator=torch.Generator().manual_seed(0))):
            one = play(plain, low + share * (high - low))
            other = play(viewed, 2.0 * share - 1.0)
            assert bool(one.truncated) is bool(other.truncated) is (t == 4)
            previous = one.observation if t == 4 else before
            torch.testing.assert_close(other.observation, torch.cat([previous, one.observation], 1))
            before = one.observation
    finally:
        plain.close()
        viewed.close()


class Bars(gymnasium.Env):  # type: ignore[type-arg]
    """Images in which a bar moves, 6 steps an episode."""

    observation_space = gymnasium.spaces.Box(0, 255, (24, 22, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = int(self.np_random.integers(5))
        self.end = self.t + 6
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._look(), 0.0, False, self.t == self.end, {}

    def _look(self) -> Any:
        image = np.zeros((24, 22, 3), np.uint8)
        image[self.t] = 10, 20, 30
        return image


def test_a_history_of_images_is_as_replays_of_frames_expect_it() -> None:
    """Of whole images in colour, the newest last, the first repeated: so each is stored once."""
    plain_world = world_of(Bars)
    stacked_world = dataclasses.replace(plain_world, frame_stack=3)  # type: ignore[type-var]
    plain, stacked = plain_world.open(2, training=True), stacked_world.open(2, training=True)
    spec = stacked.spec
    assert (spec.observation_shape, spec.stacked, spec.channels) == ((9, 24, 22), True, 3)
    first = plain.reset(0).observation
    history = [[first[b]] * 3 for b in range(2)]
    assert torch.equal(stacked.reset(0).observation, torch.cat([first] * 3, 1))
    for t in range(15):
        one, other = play(plain, torch.zeros(2).long()), play(stacked, torch.zeros(2).long())
        for b in range(2):
            ended = bool(one.truncated[b])
            assert ended == (t % 6 == 5)
            history[b] = [one.observation[b]] * 3 if ended else [*history[b][1:], one.observation[b]]
            assert torch.equal(other.observation[b], torch.cat(history[b]))
    assert other.observation.dtype == torch.uint8


def test_discrete_actions_have_no_scale() -> None:
    with pytest.raises(Refusal, match="cartpole are discrete"):
        GymWorld("CartPole-v1", rescale_actions=True).open(1, training=True)
