"""Classic control and MuJoCo through gymnasium: many simulators stepped in one process.

gymnasium's wrappers (argument checks, order checks, time limit) are left out: the raw environments are
stepped, and the time limit is counted here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate import errors
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.cartpole import CartPoleSimulators
from murmurate.worlds.episodes import EpisodeCounter
from murmurate.worlds.generators import load_generators, save_generators, simulator_seed
from murmurate.worlds.interface import Picture, Simulators
from murmurate.worlds.physics import Keeper, keeper, quiet_models

CLASSIC = {
    "cartpole": "CartPole-v1",
    "acrobot": "Acrobot-v1",
    "mountain-car": "MountainCar-v0",
    "mountain-car-continuous": "MountainCarContinuous-v0",
    "pendulum": "Pendulum-v1",
}
MUJOCO = {
    "ant": "Ant-v5",
    "halfcheetah": "HalfCheetah-v5",
    "hopper": "Hopper-v5",
    "humanoid": "Humanoid-v5",
    "humanoid-standup": "HumanoidStandup-v5",
    "inverted-double-pendulum": "InvertedDoublePendulum-v5",
    "inverted-pendulum": "InvertedPendulum-v5",
    "pusher": "Pusher-v5",
    "reacher": "Reacher-v5",
    "swimmer": "Swimmer-v5",
    "walker2d": "Walker2d-v5",
}
_NAMES = {ident: name for name, ident in (CLASSIC | MUJOCO).items()}


@dataclass(frozen=True)
class GymWorld:
    """One gymnasium environment by its id; its own time limit unless ``max_episode_steps`` is given."""

    id: str
    max_episode_steps: int | None = None

    @property
    def name(self) -> str:
        return _NAMES.get(self.id, self.id.lower())

    def spec(self) -> EnvSpec:
        return self._spec

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        simulators = self.open(1, training=True)
        simulators.close()
        return simulators.spec

    def fingerprint(self) -> None:
        return None

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        """Nothing here is for training only, and nothing has threads: both are ignored."""
        spec = self._look_up()
        limit: int = self.max_episode_steps or spec.max_episode_steps or sys.maxsize
        if self.id == "CartPole-v1" and not picture:
            return CartPoleSimulators(self.name, simulators, limit, first)
        environments = [self._make(spec, picture and b == 0) for b in range(simulators)]
        return GymSimulators(self.name, environments, limit, first)

    def _look_up(self) -> Any:
        try:
            return gymnasium.spec(self.id)
        except gymnasium.error.Error as problem:
            raise errors.unknown("world", self.id, gymnasium.registry) from problem

    def _make(self, spec: Any, picture: bool) -> Any:
        kwargs: dict[str, Any] = {"render_mode": "rgb_array"} if picture else {}
        try:
            with quiet_models(spec.entry_point):
                made = gymnasium.make(spec, max_episode_steps=-1, disable_env_checker=True, **kwargs)
            return made.unwrapped
        except gymnasium.error.DependencyNotInstalled as problem:
            if "mujoco" in str(problem).lower():
                raise errors.MissingExtra("mujoco", "mujoco", f"The world {self.name}") from problem
            raise errors.Refusal(f"The world {self.name} cannot be opened: {problem}") from problem


class GymSimulators:
    """``B`` raw gymnasium environments, one after the other.

    Observations are [B, ...] float32 (uint8 stays uint8). Vector actions are clipped to their bounds.
    Classic control and MuJoCo are exactly resumable; of others ``state()`` is None.
    """

    def __init__(self, name: str, environments: list[Any], limit: int, first: int) -> None:
        self._envs = environments
        self._limit = limit
        self._first = first
        self._spec = _spec(name, environments[0])
        space = environments[0].action_space
        self._choose: Callable[[Tensor], Any] = (
            _discrete(space, name) if self._spec.actions else _bounded(space)
        )
        self._keepers: list[Keeper | None] = [keeper(env) for env in environments]
        self._counter = EpisodeCounter(len(environments))
        self._dtype = np.uint8 if self._spec.observation_dtype == torch.uint8 else np.float32
        self._observation: npt.NDArray[Any] = self._blank()
        self._actions: Any = None

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def size(self) -> int:
        return len(self._envs)

    def reset(self, seed: int) -> TimeStep:
        self._counter.clear()
        self._observation = self._blank()
        for b, env in enumerate(self._envs):
            self._observation[b] = env.reset(seed=simulator_seed(seed, self._first + b))[0]
        return self._still()

    def send(self, action: Tensor) -> None:
        self._actions = self._choose(action)

    def receive(self) -> TimeStep:
        observation = self._blank()
        reward = np.empty(self.size, np.float64)
        terminated = np.empty(self.size, np.bool_)
        truncated = np.empty(self.size, np.bool_)
        for b, (env, action) in enumerate(zip(self._envs, self._actions, strict=True)):
            observation[b], reward[b], terminated[b], truncated[b], _ = env.step(action)
        self._counter.tick(reward)
        truncated = (truncated | (self._counter.length >= self._limit)) & ~terminated
        over = terminated | truncated
        step = TimeStep(
            observation=torch.from_numpy(observation),
            reward=torch.from_numpy(reward.astype(np.float32)),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
        )
        if over.any():
            step.episodes = self._counter.finish(over)
            if truncated.any():
                step.final_observation = step.observation.clone()
            for b in np.flatnonzero(over).tolist():
                observation[b] = self._envs[b].reset()[0]
        self._observation = observation
        return step

    def state(self) -> dict[str, Any] | None:
        if any(keep is None for keep in self._keepers):
            return None
        return {
            "observation": torch.from_numpy(self._observation.copy()),
            "physics": [keep.save() for keep in self._keepers if keep is not None],
            "generators": save_generators([env.np_random for env in self._envs]),
            "episodes": self._counter.state(),
        }

    def load(self, state: dict[str, Any]) -> TimeStep:
        for env, keep, physics, source in zip(
            self._envs, self._keepers, state["physics"], load_generators(state["generators"]), strict=True
        ):
            if keep is None:
                raise ValueError(f"{self._spec.name} cannot be saved, so there is no state to load: reset it")
            # Some environments begin an attribute or two only in reset.
            env.reset()
            keep.load(physics)
            env.np_random = source
        self._counter.load(state["episodes"])
        self._observation = state["observation"].numpy().copy()
        return self._still()

    def picture(self) -> Picture:
        if self._envs[0].render_mode != "rgb_array":
            raise ValueError("no picture: open the world with picture=True")
        try:
            return np.asarray(self._envs[0].render(), np.uint8)
        except gymnasium.error.DependencyNotInstalled as problem:
            raise errors.MissingExtra("pygame", "video", f"A picture of {self._spec.name}") from problem
        except Exception as problem:  # MuJoCo's drawing fails in a different way on each platform.
            raise errors.Refusal(
                f"A picture of {self._spec.name} cannot be drawn here ({problem}). On a machine without a "
                "display set the environment variable MUJOCO_GL to egl or osmesa."
            ) from problem

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _blank(self) -> npt.NDArray[Any]:
        return np.empty((self.size, *self._spec.observation_shape), self._dtype)

    def _still(self) -> TimeStep:
        nothing = torch.zeros(self.size, dtype=torch.bool)
        observation = torch.from_numpy(self._observation)
        return TimeStep(observation, torch.zeros(self.size), nothing, nothing.clone())


def _spec(name: str, env: Any) -> EnvSpec:
    """Raises ``Refusal`` for spaces that no agent here can take."""
    seen, done = env.observation_space, env.action_space
    if not isinstance(seen, gymnasium.spaces.Box):
        raise errors.Refusal(
            f"The observations of {name} are {type(seen).__name__}, and only arrays (Box) can be "
            "learnt from. Wrap the environment so that it gives one array."
        )
    dtype = torch.uint8 if seen.dtype == np.uint8 else torch.float32
    if isinstance(done, gymnasium.spaces.Discrete):
        return EnvSpec(name, tuple(seen.shape), dtype, actions=int(done.n))
    if not isinstance(done, gymnasium.spaces.Box) or len({*done.low.flat}) > 1 or len({*done.high.flat}) > 1:
        raise errors.Refusal(
            f"The actions of {name} are {done}; only Discrete, or Box with equal bounds in all "
            "dimensions, can be taken. Wrap the environment with gymnasium's RescaleAction."
        )
    return EnvSpec(
        name,
        tuple(seen.shape),
        dtype,
        actions=0,
        action_shape=tuple(done.shape),
        action_low=float(done.low.flat[0]),
        action_high=float(done.high.flat[0]),
    )


def _discrete(space: Any, name: str) -> Callable[[Tensor], list[int]]:
    count, start = int(space.n), int(space.start)

    def choose(action: Tensor) -> list[int]:
        chosen: list[int] = action.tolist()
        if min(chosen) < 0 or max(chosen) >= count:
            raise ValueError(f"{name} has actions 0 to {count - 1}, got {chosen}")
        return [a + start for a in chosen] if start else chosen

    return choose


def _bounded(space: Any) -> Callable[[Tensor], npt.NDArray[Any]]:
    def choose(action: Tensor) -> npt.NDArray[Any]:
        clipped: npt.NDArray[Any] = np.clip(action.numpy(), space.low, space.high)
        return clipped

    return choose
