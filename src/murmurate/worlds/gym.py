"""Gymnasium's environments, several of them stepped in turn in one process.

Where gymnasium's argument checks, order checks and time limit are the only wrappers of an environment, they
are removed, and the time limit is counted here. With any other wrapper all of them remain.
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from torch import Tensor

from murmurate import errors
from murmurate.ranges import PositiveInt, check_ranges
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.cartpole import CartPoleSimulators
from murmurate.worlds.env_state import Saver, Unsavable, quiet_models, saver
from murmurate.worlds.episodes import EpisodeCounter, restore
from murmurate.worlds.generators import load_generators, save_generators, simulator_seed
from murmurate.worlds.interface import Picture, Simulators, SimulatorWorld, first_step

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
_NAMED = CLASSIC | MUJOCO
_VECTORS = ("mountain-car-continuous", "pendulum", *MUJOCO)
_NAMES = {ident: name for name, ident in _NAMED.items()}
_PREFIX = "gym:"
_CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"


def names() -> list[str]:
    """Classic control and MuJoCo; every other environment is ``gym:<Id>``."""
    return list(_NAMED)


def vector_names() -> list[str]:
    """Those of ``names`` whose actions are vectors."""
    return list(_VECTORS)


def world(name: str) -> GymWorld | None:
    """The world called ``cartpole``, ``gym:Acrobot-v1`` or ``gym:my_module:MyEnv-v0``; None for other names.

    Raises ``Refusal`` for an id that is not registered.
    """
    if name in _NAMED:
        return GymWorld(_NAMED[name])
    if not name.startswith(_PREFIX):
        return None
    ident = name.removeprefix(_PREFIX)
    _registered(ident)
    return GymWorld(ident)


@dataclass(frozen=True)
class GymWorld(SimulatorWorld):
    """One gymnasium environment with its wrappers.

    id: as registered; ``my_module:MyEnv-v0`` imports ``my_module`` first, which registers it.
    max_episode_steps: replaces the registered time limit.
    """

    id: str = field(metadata={"in_name": True})
    max_episode_steps: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def name(self) -> str:
        return _NAMES.get(self.id, _PREFIX + self.id)

    @property
    def images(self) -> bool:
        return self.id not in _NAMES and self.spec().images

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        """``training`` and ``threads`` have no effect."""
        spec = _registered(self.id)
        plain = not (spec.additional_wrappers or spec.kwargs)
        if spec.entry_point == _CARTPOLE and plain and not picture:
            limit: int = self.max_episode_steps or spec.max_episode_steps or sys.maxsize
            return CartPoleSimulators(self.name, simulators, limit, first)
        made = [_without_checks(self._make(spec, picture and b == 0)) for b in range(simulators)]
        return GymSimulators(self.name, [env for env, _ in made], made[0][1], first)

    def _make(self, spec: Any, picture: bool) -> Any:
        kwargs: dict[str, Any] = {"render_mode": "rgb_array"} if picture else {}
        no_pictures = f"{self.name} has no pictures: its constructor must take render_mode='rgb_array'."
        try:
            with quiet_models(spec.entry_point):
                made = gymnasium.make(
                    spec, max_episode_steps=self.max_episode_steps, disable_env_checker=True, **kwargs
                )
        except gymnasium.error.DependencyNotInstalled as problem:
            if "mujoco" in str(problem).lower():
                raise errors.MissingExtra("mujoco", "mujoco", f"The world {self.name}") from problem
            raise errors.Refusal(f"The world {self.name} cannot be opened: {problem}") from problem
        except TypeError as problem:
            if not picture:
                raise
            raise errors.Refusal(f"{no_pictures} ({problem})") from problem
        if picture and made.render_mode != "rgb_array":
            raise errors.Refusal(no_pictures)
        return made


def _registered(ident: str) -> Any:
    """Gymnasium's spec of an id. Raises ``Refusal`` if it is not registered."""
    module, _, name = ident.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
    except ImportError as problem:
        raise errors.Refusal(
            f"The world {_PREFIX}{ident} needs the module '{module}', which cannot be imported ({problem}). "
            "Install it, or put its folder on PYTHONPATH, as in: PYTHONPATH=. murmurate train ..."
        ) from problem
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as problem:
        near = difflib.get_close_matches(name, gymnasium.registry, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise errors.Refusal(
            f"No Gymnasium environment is registered as '{name}'.{hint} Name the module that registers it "
            f"too, as in {_PREFIX}my_module:{name}."
        ) from problem


def _without_checks(made: Any) -> tuple[Any, int]:
    """(the environment without wrappers, its time limit) if these are only gymnasium's checks and limits;
    else (``made``, no limit), as it limits itself."""
    inner, limit = made, sys.maxsize
    while type(inner) in (OrderEnforcing, PassiveEnvChecker, TimeLimit):
        if type(inner) is TimeLimit:
            limit = min(limit, inner._max_episode_steps)
        inner = inner.env
    return (made, sys.maxsize) if isinstance(inner, gymnasium.Wrapper) else (inner, limit)


class GymSimulators:
    """``B`` gymnasium environments, one after the other.

    Observations are [B, ...] float32; uint8 stays uint8, and images with their colours last become [C, H, W].
    Vector actions are clipped to their bounds. Classic control and MuJoCo are exactly resumable, also in
    wrappers that hold only numbers; for others ``state()`` is None.
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
        self._shape = tuple(environments[0].observation_space.shape)
        self._colours_last = _colours_last(environments[0].observation_space)
        self._savers: list[Saver | None] = [saver(env) for env in environments]
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
        b = 0
        try:
            for b, env in enumerate(self._envs):
                seed_of_b = simulator_seed(seed, self._first + b)
                self._observation[b] = self._arranged(env.reset(seed=seed_of_b)[0])
        except (Exception, SystemExit) as problem:
            raise self._failure(b, "reset", problem) from problem
        self._check(self._observation)
        return first_step(torch.from_numpy(self._observation))

    def send(self, action: Tensor) -> None:
        self._actions = self._choose(action)

    def receive(self) -> TimeStep:
        observation = self._blank()
        reward = np.empty(self.size, np.float64)
        terminated = np.empty(self.size, np.bool_)
        truncated = np.empty(self.size, np.bool_)
        b = 0
        try:
            for b, (env, action) in enumerate(zip(self._envs, self._actions, strict=True)):
                raw, reward[b], terminated[b], truncated[b], _ = env.step(action)
                observation[b] = self._arranged(raw)
        except (Exception, SystemExit) as problem:
            raise self._failure(b, "step", problem) from problem
        with np.errstate(over="ignore"):
            given = reward.astype(np.float32)
        self._check(observation, given)
        self._counter.tick(reward)
        truncated = (truncated | (self._counter.length >= self._limit)) & ~terminated
        over = terminated | truncated
        step = TimeStep(
            observation=torch.from_numpy(observation),
            reward=torch.from_numpy(given),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
        )
        if over.any():
            step.episodes = self._counter.finish(over)
            if truncated.any():
                step.final_observation = step.observation.clone()
            try:
                for b in np.flatnonzero(over).tolist():
                    observation[b] = self._arranged(self._envs[b].reset()[0])
            except (Exception, SystemExit) as problem:
                raise self._failure(b, "reset", problem) from problem
            self._check(observation)
        self._observation = observation
        return step

    def state(self) -> dict[str, Any] | None:
        try:
            physics = [None if each is None else each.save() for each in self._savers]
        except Unsavable:
            return None
        if None in physics:
            return None
        return {
            "observation": torch.from_numpy(self._observation.copy()),
            "physics": physics,
            "generators": save_generators([env.unwrapped.np_random for env in self._envs]),
            "episodes": self._counter.state(),
        }

    def load(self, state: dict[str, Any]) -> TimeStep:
        sources = load_generators(state["generators"], len(self._envs))
        for env, each, physics, source in zip(
            self._envs, self._savers, state["physics"], sources, strict=True
        ):
            if each is None:
                raise ValueError(f"{self._spec.name} cannot be saved, so there is no state to load: reset it")
            # some environments create attributes only in reset
            env.reset()
            each.load(physics)
            env.unwrapped.np_random = source
        self._counter.load(state["episodes"])
        restore(self._observation, state["observation"], "observation")
        return first_step(torch.from_numpy(self._observation))

    def picture(self) -> Picture:
        if self._envs[0].render_mode != "rgb_array":
            raise ValueError("no picture: open the world with picture=True")
        try:
            return np.asarray(self._envs[0].render(), np.uint8)
        except gymnasium.error.DependencyNotInstalled as problem:
            raise errors.MissingExtra("pygame-ce", "video", f"A picture of {self._spec.name}") from problem
        except Exception as problem:  # the type of MuJoCo's errors depends on the platform
            raise errors.Refusal(
                f"A picture of {self._spec.name} cannot be drawn here ({problem}). On a machine without a "
                "display set the environment variable MUJOCO_GL to egl or osmesa."
            ) from problem

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _check(self, observation: npt.NDArray[Any], reward: npt.NDArray[Any] | None = None) -> None:
        """Raise RunFailed, with the simulator and its step, for numbers that are not finite."""
        given = {"reward": reward, "observation": observation if self._dtype == np.float32 else None}
        for name, values in given.items():
            if values is None or np.isfinite(values).all():
                continue
            b = int(np.flatnonzero(~np.isfinite(values.reshape(self.size, -1)).all(1))[0])
            wrong = values[b].reshape(-1)
            value = wrong[~np.isfinite(wrong)][0]
            raise errors.RunFailed(
                f"the environment {self._where(b)} gave {value} as its {name}. Mend the environment, or "
                "register it with a wrapper that replaces such values."
            )

    def _failure(self, b: int, call: str, problem: BaseException) -> errors.RunFailed:
        kind = type(problem).__name__
        return errors.RunFailed(f"the environment {self._where(b)} raised {kind} in {call}: {problem}")

    def _where(self, b: int) -> str:
        step = int(self._counter.length[b]) + 1
        return f"{self._spec.name} (simulator {self._first + b}, step {step} of its episode)"

    def _arranged(self, observation: Any) -> Any:
        """An observation in the spec's shape: colours first, the images of a stack one after the other.

        Raises ``ValueError`` for another shape, which numpy might broadcast.
        """
        if np.shape(observation) != self._shape:
            raise ValueError(
                f"its observation has the shape {list(np.shape(observation))}, not {list(self._shape)}"
            )
        if not self._colours_last:
            return observation
        return np.moveaxis(observation, -1, -3).reshape(self._spec.observation_shape)

    def _blank(self) -> npt.NDArray[Any]:
        return np.empty((self.size, *self._spec.observation_shape), self._dtype)


def _colours_last(space: Any) -> bool:
    """Whether observations are images [..., H, W, C], as is usual in gymnasium."""
    shape = space.shape
    return bool(space.dtype == np.uint8 and len(shape) in (3, 4) and shape[-1] in (1, 3) and shape[-3] > 3)


def _spec(name: str, env: Any) -> EnvSpec:
    """The spec of an environment. Raises ``Refusal`` for spaces that no agent supports."""
    observed, action = env.observation_space, env.action_space
    if not isinstance(observed, gymnasium.spaces.Box):
        raise errors.Refusal(
            f"The observations of {name} are {type(observed).__name__}, but agents can only learn from "
            "arrays (Box). Register it with gymnasium's FlattenObservation among its additional_wrappers."
        )
    shape = tuple(observed.shape)
    if _colours_last(observed):
        *stack, height, width, colours = shape
        shape = (math.prod(stack) * colours, height, width)
    dtype = torch.uint8 if observed.dtype == np.uint8 else torch.float32
    if isinstance(action, gymnasium.spaces.Discrete):
        return EnvSpec(name, shape, dtype, actions=int(action.n))
    if not isinstance(action, gymnasium.spaces.Box) or not action.shape:
        raise errors.Refusal(
            f"The actions of {name} are {action}; only Discrete, or Box with at least one dimension, can be "
            "taken. Register it with an ActionWrapper among its additional_wrappers that makes them such."
        )
    return EnvSpec(
        name,
        shape,
        dtype,
        actions=0,
        action_shape=tuple(action.shape),
        action_low=tuple(map(float, action.low.flat)),
        action_high=tuple(map(float, action.high.flat)),
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
