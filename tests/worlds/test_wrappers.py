"""Registered wrappers of a gymnasium environment have their effect, and are saved where possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.envs.registration import WrapperSpec
from test_gym import assert_equals_gymnasium, assert_resumes

from murmurate.errors import Refusal
from murmurate.worlds.gym import GymWorld
from murmurate.worlds.gym_simulators import GymSimulators


@pytest.fixture
def register() -> Iterator[Callable[..., str]]:
    """Registers an environment until the test is over, and returns its id."""
    made: list[str] = []

    def one(entry_point: Any, *additional: WrapperSpec, **settings: Any) -> str:
        made.append(f"Wrapped{len(made)}-v0")
        gymnasium.register(made[-1], entry_point, additional_wrappers=additional, **settings)
        return made[-1]

    yield one
    for ident in made:
        del gymnasium.registry[ident]


def additional(kind: type, **settings: Any) -> WrapperSpec:
    return WrapperSpec(kind.__name__, f"{kind.__module__}:{kind.__name__}", settings)


RESCALE = additional(wrappers.RescaleAction, min_action=-1.0, max_action=1.0)
STACK = additional(wrappers.FrameStackObservation, stack_size=3)
NORMALIZE = additional(wrappers.NormalizeObservation)
DOUBLE = additional(wrappers.TransformReward, func=lambda r: 2 * r)


class Fading(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Rewards that become smaller with every push to the right, and are different after each."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.taken, self.noise, self.last = 0, np.random.default_rng(0), [(0.0, "none")]

    def step(self, action: Any) -> Any:
        seen, reward, *others = self.env.step(action)
        if action == 1:
            self.taken += 1
            self.last = [(float(self.noise.normal()), "drawn")]
        return seen, float(reward) / (1 + self.taken) + self.last[0][0], *others


class Thrice(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Each action three times."""

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(3):
            seen, reward, terminated, truncated, about = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return seen, total, terminated, truncated, about


class Straying(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Takes actions from the space now and then."""

    def step(self, action: Any) -> Any:
        return self.env.step(self.action_space.sample() if self.np_random.random() < 0.5 else action)


class Sharing(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Draws from the environment's generator, and sees one array under two names."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.last: Any = np.zeros(4, np.float32)
        self.views = {"last": self.last}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        seen, about = self.env.reset(seed=seed, options=options)
        self.drawn = self.unwrapped.np_random
        self.last[:] = seen
        return seen, about

    def step(self, action: Any) -> Any:
        seen, reward, *others = self.env.step(action)
        self.last[:] = seen
        return seen, float(reward) + float(self.views["last"].sum()) + self.drawn.random(), *others


def _three_times(env: Any) -> Any:
    return Thrice(env)


STACKS: dict[str, tuple[Any, tuple[WrapperSpec, ...]]] = {
    "rewards": (CartPoleEnv, (DOUBLE,)),
    "actions": (PendulumEnv, (RESCALE,)),
    "a stack of observations": (CartPoleEnv, (STACK,)),
    "running means": (PendulumEnv, (NORMALIZE, RESCALE, STACK)),
    "an entry point's own": (lambda **_: Fading(CartPoleEnv()), ()),
    "shared objects": (lambda **_: Sharing(CartPoleEnv()), ()),
    "fewer steps than the environment makes": (
        PendulumEnv,
        (WrapperSpec("Thrice", f"{__name__}:_three_times", {}),),
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_they_act_and_are_saved_bit_for_bit(name: str, register: Callable[..., str]) -> None:
    entry_point, more = STACKS[name]
    ident = register(entry_point, *more, max_episode_steps=23)
    terminated, truncated = assert_equals_gymnasium(ident, None, 80)
    assert terminated + truncated >= 3
    assert_equals_gymnasium(ident, 11, 40)
    assert_resumes(ident, None, before=37, after=100)


def test_the_limit_counts_steps_of_the_environment_where_a_wrapper_makes_several(
    register: Callable[..., str],
) -> None:
    ident = register(PendulumEnv, WrapperSpec("Thrice", f"{__name__}:_three_times", {}), max_episode_steps=30)
    simulators = GymWorld(ident).open(1, training=True)
    simulators.reset(0)
    for number in range(1, 11):
        simulators.send(torch.zeros(1, 1))
        step = simulators.receive()
        assert bool(step.truncated) == (number == 10)
    assert step.final_observation is not None
    assert [episode.length for episode in step.episodes] == [10]


def test_plain_environments_are_stepped_without_gymnasiums_checks(register: Callable[..., str]) -> None:
    simulators = GymWorld(register(PendulumEnv, max_episode_steps=5)).open(2, training=True)
    assert isinstance(simulators, GymSimulators)
    assert all(type(env) is PendulumEnv for env in simulators._envs)


class Told(gymnasium.RewardWrapper):  # type: ignore[type-arg]
    """Rewards from a function that nobody can look into."""

    def __init__(self, env: Any, change: Callable[[float], float]) -> None:
        super().__init__(env)
        self.change = change

    def reward(self, reward: Any) -> float:
        return self.change(float(reward))


def test_what_may_change_unseen_is_not_saved(register: Callable[..., str]) -> None:
    total = [0.0]

    def so_far(reward: float) -> float:
        total[0] += reward
        return total[0]

    for change in (so_far, abs, object().__eq__):
        simulators = GymWorld(register(lambda change=change, **_: Told(CartPoleEnv(), change))).open(
            2, training=True
        )
        simulators.reset(0)
        assert (simulators.state() is None) == (change is not abs), change


class Picture(gymnasium.Env):  # type: ignore[type-arg]
    """30 x 20 pixels in colours; takes two numbers with bounds of their own."""

    observation_space = gymnasium.spaces.Box(0, 255, (30, 20, 3), np.uint8)
    action_space = gymnasium.spaces.Box(np.array([-1.0, 0.0]), np.array([2.0, 5.0]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.count = 0
        return self._look(), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self.count += 1
        return self._look(), float(action[0] + 10 * action[1]), False, self.count == 4, {}

    def _look(self):  # type: ignore[no-untyped-def]
        return np.random.default_rng(self.count).integers(0, 256, (30, 20, 3), np.uint8)


@pytest.mark.parametrize("depth", [1, 4])
def test_images_come_with_their_colours_first(depth: int, register: Callable[..., str]) -> None:
    stack = (additional(wrappers.FrameStackObservation, stack_size=4),) if depth > 1 else ()
    world = GymWorld(register(Picture, *stack))
    assert world.images
    assert world.spec().observation_shape == (3 * depth, 30, 20)
    simulators = world.open(2, training=True)
    simulators.reset(0)
    for t in range(1, 10):
        simulators.send(torch.zeros(2, 2))
        seen = simulators.receive().observation
        newest = np.random.default_rng(t % 4).integers(0, 256, (30, 20, 3), np.uint8)
        for channel in range(3):
            assert np.array_equal(seen[1, 3 * (depth - 1) + channel].numpy(), newest[:, :, channel])


def test_each_dimension_of_an_action_has_its_own_bounds(register: Callable[..., str]) -> None:
    world = GymWorld(register(Picture))
    assert world.spec().action_low == (-1.0, 0.0)
    assert world.spec().action_high == (2.0, 5.0)
    simulators = world.open(2, training=True)
    simulators.reset(0)
    simulators.send(torch.tensor([[-3.0, -3.0], [9.0, 9.0]]))
    assert simulators.receive().reward.tolist() == [-1.0, 52.0]


@pytest.mark.parametrize("entry_point", [Picture, lambda **_: Picture()])
def test_a_world_without_pictures_is_refused_where_one_is_wanted(
    entry_point: Any, register: Callable[..., str]
) -> None:
    world = GymWorld(register(entry_point))
    world.open(1, training=False).close()
    with pytest.raises(Refusal, match="has no pictures: its constructor must take render_mode"):
        world.open(1, training=False, picture=True)


class Several(Picture):
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])  # type: ignore[assignment]


class Named(Picture):
    observation_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Box(0, 1, (2,)))  # type: ignore[assignment]

    def _look(self):  # type: ignore[no-untyped-def]
        return {"a": np.zeros(2, np.float32)}


def test_spaces_that_used_to_need_a_wrapper_need_none(register: Callable[..., str]) -> None:
    several = GymWorld(register(Several)).spec()
    assert several.actions == int(np.prod(Several.action_space.nvec))
    plain = GymWorld(register(Named)).open(1, training=True)
    flat = GymWorld(register(Named, additional(wrappers.FlattenObservation))).open(1, training=True)
    assert plain.spec.parts
    assert dataclasses.replace(plain.spec, name="", parts=()) == dataclasses.replace(flat.spec, name="")
    assert torch.equal(plain.reset(0).observation, flat.reset(0).observation)


def make_straying(**_: Any) -> Any:
    cart = CartPoleEnv()
    return Straying(gymnasium.wrappers.TransformReward(cart, lambda reward: reward))


class Saved(CartPoleEnv):
    """Can be saved in its own way, and takes actions from its space."""

    def step(self, action: Any) -> Any:
        return super().step(self.action_space.sample())

    def save_state(self) -> Any:
        return {"state": np.array(self.state)}

    def load_state(self, saved: Any) -> None:
        self.state = saved["state"]


@pytest.mark.parametrize("entry_point", [make_straying, lambda **_: Saved()])
def test_the_generators_of_spaces_are_seeded_and_saved(
    entry_point: Any, register: Callable[..., str]
) -> None:
    ident = register(entry_point, max_episode_steps=23)
    assert_resumes(ident, None, before=37, after=100)

    def pushes(seed: int) -> torch.Tensor:
        """[5, 8]: whether each cart was pushed to the right, as its speed tells."""
        simulators = GymWorld(ident).open(8, training=True)
        before, found = simulators.reset(seed).observation, []
        for _ in range(5):
            simulators.send(torch.zeros(8, dtype=torch.int64))
            after = simulators.receive().observation
            found.append(after[:, 1] > before[:, 1])
            before = after
        return torch.stack(found)

    assert torch.equal(pushes(3), pushes(3))
    assert not torch.equal(pushes(3), pushes(4))
    assert not (pushes(3) == pushes(3)[:, :1]).all(), "each simulator draws its own"


def test_a_space_that_has_a_generator_keeps_it(register: Callable[..., str]) -> None:
    class Seeded(CartPoleEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gymnasium.spaces.Discrete(2, seed=7)

    simulators = GymWorld(register(lambda **_: Seeded())).open(1, training=True)
    assert isinstance(simulators, GymSimulators)
    simulators.reset(0)
    drawn = [simulators._envs[0].action_space.sample() for _ in range(20)]
    space = gymnasium.spaces.Discrete(2, seed=7)
    assert drawn == [space.sample() for _ in range(20)]
