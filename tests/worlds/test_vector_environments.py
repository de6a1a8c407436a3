"""Vector environments in every autoreset mode against the same environments one by one."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit
from resuming import play, same_steps

from murmurate.errors import Refusal, RunFailed
from murmurate.worlds.gym import GymWorld
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.interface import Simulators
from murmurate.worlds.own import world_of
from murmurate.worlds.vector_simulators import VectorSimulators

SEEN = gymnasium.spaces.Dict(
    {"pole": gymnasium.spaces.Box(-100, 100, (4,), np.float32), "won": gymnasium.spaces.Discrete(2)}
)


class Carts(gymnasium.Wrapper):  # type: ignore[type-arg]
    """CartPole with a Dict observation, MultiDiscrete actions, and success said at the end."""

    def __init__(self) -> None:
        super().__init__(TimeLimit(CartPoleEnv(), 14))
        self.observation_space = SEEN
        self.action_space = gymnasium.spaces.MultiDiscrete([2, 3], start=[0, 4])

    def reset(self, **options: Any) -> Any:
        seen, info = self.env.reset(**options)
        return {"pole": seen, "won": 0}, info

    def step(self, action: Any) -> Any:
        seen, reward, terminated, truncated, info = self.env.step(int(action[0]))
        told = {"success": bool(truncated)} if terminated or truncated else {}
        return {"pole": seen, "won": int(truncated)}, reward, terminated, truncated, info | told


def compare(one: Simulators, other: Simulators, steps: int) -> tuple[int, int]:
    """The numbers of terminations and truncations in steps that were equal."""
    assert one.spec == other.spec
    assert torch.equal(one.reset(6).observation, other.reset(6).observation)
    generator, ended = torch.Generator().manual_seed(0), [0, 0]
    for t in range(steps):
        actions = torch.randint(one.spec.actions, (3,), generator=generator)
        a, b = play(one, actions), play(other, actions)
        assert same_steps(a, b), t
        ended[0] += int(a.terminated.sum())
        ended[1] += int(a.truncated.sum())
    other.close()
    return ended[0], ended[1]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((SyncVectorEnv, mode) for mode in AutoresetMode),
        (AsyncVectorEnv, AutoresetMode.NEXT_STEP),
        (AsyncVectorEnv, AutoresetMode.SAME_STEP),
    ],
)
def test_every_mode_gives_the_steps_of_single_environments(kind: Any, mode: AutoresetMode) -> None:
    """The modes differ in gymnasium's own code, which processes share: the default and the one that the page
    advises suffice there."""
    one = GymSimulators("carts", lambda b: (Carts(), 10**9), 3, 2)
    other = VectorSimulators("carts", lambda: kind([Carts] * 3, autoreset_mode=mode), 3, 2)
    terminated, truncated = compare(one, other, 150)
    assert terminated >= 5
    assert truncated >= 5


def test_a_registered_environment_in_processes() -> None:
    one = GymSimulators(
        "acrobot", lambda b: (gymnasium.make("Acrobot-v1", max_episode_steps=25), 10**9), 3, 0
    )
    other = GymWorld("Acrobot-v1", 25, vectorization="async").open(3, training=True)
    assert compare(one, other, 60) == (0, 6)


def make_carts(num_envs: int, render_mode: str | None = None) -> Any:
    return SyncVectorEnv(
        [lambda: CartPoleEnv(render_mode=render_mode)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
    )


def test_a_function_that_takes_their_number() -> None:
    pytest.importorskip("pygame")
    world = world_of(make_carts)
    assert [world.open(size, training=True).size for size in (1, 4)] == [1, 4]
    drawn = world.open(1, training=False, picture=True)
    drawn.reset(0)
    assert drawn.picture().shape == (400, 600, 3)
    with pytest.raises(Refusal, match=r"--world.max-episode-steps \(world=.*several at once"):
        type(world)(world.target, max_episode_steps=3).open(2, training=True)  # type: ignore[attr-defined, call-arg]


def test_a_mode_that_loses_steps_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match=r"NEXT_STEP.*SAME_STEP, or with DISABLED"):
        VectorSimulators("carts", lambda: CartPoleVectorEnv(num_envs=2), 2, 0)
    with pytest.raises(Refusal, match=r"NEXT_STEP"):
        GymWorld("CartPole-v1", vectorization="vector_entry_point").open(2, training=True)
    with pytest.raises(Refusal, match=r"AsyncVectorEnv without shared memory.*SAME_STEP"):
        VectorSimulators("carts", lambda: AsyncVectorEnv([Carts] * 2, shared_memory=False), 2, 0)
    with pytest.raises(Refusal, match="asked for 2 environments and has 3"):
        VectorSimulators("carts", lambda: make_carts(3), 2, 0)
    with pytest.raises(Refusal, match=r"takes num_envs and is of type CartPoleEnv"):
        VectorSimulators("carts", CartPoleEnv, 2, 0)


def test_a_vector_environment_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EnvSpec("Carts-v0", vector_entry_point=CartPoleVectorEnv)
    monkeypatch.setitem(gymnasium.registry, "Carts-v0", spec)
    with pytest.raises(Refusal, match=r"gym:Carts-v0 are one vector environment.*: leave out served"):
        GymWorld("Carts-v0", served=True).open(2, training=True)
    with pytest.raises(Refusal, match="leave out served, or vectorization"):
        GymWorld("CartPole-v1", served=True, vectorization="async").open(2, training=True)


class Broken(CartPoleEnv):
    def step(self, action: Any) -> Any:
        seen, *rest = super().step(action)
        if action:
            raise ArithmeticError("lost")
        return seen * np.float32("nan"), *rest


@pytest.mark.parametrize(("action", "words"), [(1, "ArithmeticError in step: lost"), (0, "not finite")])
def test_what_fails_ends_the_run_with_its_cause(action: int, words: str) -> None:
    simulators = VectorSimulators("carts", lambda: SyncVectorEnv([Broken]), 1, 0)
    simulators.reset(0)
    with pytest.raises(RunFailed, match=words):
        play(simulators, torch.tensor([action]))


class Fails(VectorEnv):  # type: ignore[type-arg]
    """Two environments that end at once, and return something else than they should."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}
    num_envs = 2
    single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(
        self, seen: tuple[int, ...] = (2, 3), ends: tuple[int, ...] = (2,), cuts: Any = None, **info: Any
    ) -> None:
        rows, over = np.zeros(seen, np.float32), np.ones(ends, np.bool_)
        cut = over if cuts is None else np.zeros(cuts, np.bool_)
        self.result = rows, np.zeros(2), over, cut, {"final_obs": rows, "final_info": info}

    def reset(self, **options: Any) -> Any:
        return np.zeros((2, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"seen": (2, 4)}, r"ValueError in step: its observation has the shape \[4\], not \[3\]"),
        ({"seen": (1, 3)}, "ValueError in step: it returned 1 observations of 2 environments"),
        ({"seen": (3, 3)}, "ValueError in step: it returned 3 observations of 2 environments"),
        ({"ends": (3,)}, r"ValueError in step: terminated has the shape \[3\], not \[2\]"),
        ({"ends": ()}, r"ValueError in step: terminated has the shape \[\], not \[2\]"),
        ({"cuts": (2, 1)}, r"ValueError in step: truncated has the shape \[2, 1\], not \[2\]"),
        ({"success": np.zeros((2, 2))}, "in step: success in its info is .* it must be one truth value"),
        ({"figures": {"joint torque": np.ones(2)}}, "in step: a figure in its info is called 'joint torque'"),
    ],
)
def test_what_a_step_returns_by_mistake_ends_the_run_with_its_cause(wrong: Any, words: str) -> None:
    simulators = VectorSimulators("fails", lambda: Fails(**wrong), 2, 0)
    simulators.reset(0)
    with pytest.raises(RunFailed, match=words):
        play(simulators, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("shape", "words"),
    [((2, 4), r"its observation has the shape \[4\]"), ((1, 3), "it returned 1 observations")],
)
def test_what_a_reset_returns_by_mistake_ends_the_run_with_its_cause(shape: Any, words: str) -> None:
    env = Fails()
    simulators = VectorSimulators("fails", lambda: env, 2, 0)
    env.reset = lambda **options: (np.zeros(shape, np.float32), {})  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=f"ValueError in reset: {words}"):
        simulators.reset(0)
