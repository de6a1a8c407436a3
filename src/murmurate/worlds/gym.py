"""Gymnasium's environments.

Where gymnasium's own checks and time limit are the only wrappers of an environment, they are removed for
speed, and the simulators count the time limit. If there is any other wrapper, all remain.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeInt, PositiveInt, StackLength, check_ranges
from murmurate.worlds import _gym_env
from murmurate.worlds._formats import formats_of, spaces_of
from murmurate.worlds._gym_env import PREFIX as _PREFIX
from murmurate.worlds._spaces import JOINT_ACTIONS, holds_image
from murmurate.worlds.cartpole import CartPoleSimulators
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.interface import Formats, Simulators
from murmurate.worlds.modules import import_module
from murmurate.worlds.served import served_environments
from murmurate.worlds.vector_simulators import VectorSimulators
from murmurate.worlds.viewed import ViewedWorld

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
_IDS = CLASSIC | MUJOCO  # name -> id
_VECTORS = ("mountain-car-continuous", "pendulum", *MUJOCO)
_NAMES = {ident: name for name, ident in _IDS.items()}
_CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"


def names() -> list[str]:
    """Classic control and MuJoCo; every other environment is ``gym:<Id>``."""
    return list(_IDS)


def vector_names() -> list[str]:
    """The worlds of ``names`` whose actions are vectors."""
    return list(_VECTORS)


def world(name: str) -> GymWorld | None:
    """The world called ``cartpole``, ``gym:Acrobot-v1`` or ``gym:my_module:MyEnv-v0``; None for other names.

    Raises ``Refusal`` for an id that is not registered, and for a module that cannot be imported.
    """
    if name in _IDS:
        return GymWorld(_IDS[name])
    if not name.startswith(_PREFIX):
        return None
    ident = name.removeprefix(_PREFIX)
    module, _, _ = ident.rpartition(":")
    _, folder = import_module(module, "", f"The world {name}") if module else (None, "")
    _gym_env.registered(ident)
    return GymWorld(ident, folder=folder)


@dataclass(frozen=True)
class GymWorld(ViewedWorld):
    """One gymnasium environment with its wrappers.

    id: as registered; ``my_module:MyEnv-v0`` imports ``my_module`` first, which registers it.
    folder: where the module was found, if it is not installed.
    max_episode_steps: replaces the registered time limit.
    served: simulators run in a separate process, where one that hangs is detected too.
    observe: keys of a Dict that are observed (``outer.inner`` in a nested one); empty for all.
    frame_stack: number of latest observations that the agent sees as one.
    rescale_actions: the agent's vector actions are from -1 to 1, and are scaled to the environment's bounds.
    joint_actions: a MultiDiscrete or MultiBinary action is one number if there are at most this many
        combinations; otherwise its parts are chosen independently, which a2c, ppo, trpo and impala can do.
    vectorization: ``async`` steps the simulators at the same time, each in its own process;
        ``vector_entry_point`` uses the vector environment that is registered for the id. With either, the
        state of the simulators cannot be saved.
    """

    id: str = field(metadata={"in_name": True})
    max_episode_steps: PositiveInt | None = None
    served: bool = field(default=False, metadata={"since": 4})
    folder: str = field(default="", metadata={"in_name": True, "since": 6})
    observe: tuple[str, ...] = field(default=(), metadata={"since": 6})
    frame_stack: StackLength = field(default=1, metadata={"since": 6})
    rescale_actions: bool = field(default=False, metadata={"since": 6})
    joint_actions: NonNegativeInt = field(default=JOINT_ACTIONS, metadata={"since": 6})
    vectorization: Literal["none", "async", "vector_entry_point"] = field(
        default="none", metadata={"since": 6}
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def name(self) -> str:
        return _NAMES.get(self.id, _PREFIX + self.id)

    @functools.cached_property
    def images(self) -> bool:
        """Also true for a Dict that holds an image among what is observed."""
        if self.id in _NAMES:
            return False
        if self.observe or _gym_env.registered(self.id, self.folder).entry_point is None:
            return self.spec().holds_images
        env = _gym_env.make(self.id, self.name, folder=self.folder)
        _gym_env.close(env)
        return holds_image(env.observation_space)

    @property
    def env_steps_per_second(self) -> float:
        if self._registered.entry_point is None:  # a vector environment alone
            return super().env_steps_per_second
        env = _gym_env.make(self.id, self.name, folder=self.folder)
        return _gym_env.frame_rate(env, super().env_steps_per_second)

    def is_tried(self) -> bool:
        return not self.served and self.id not in _NAMES

    def formats(self) -> Formats:
        if self.vectorization == "vector_entry_point" or self._registered.entry_point is None:
            limit = self.max_episode_steps
            env = _gym_env.make_vector(self.id, 1, "vector_entry_point", limit, False, self.folder)
        else:
            env = _gym_env.make(self.id, self.name, self.max_episode_steps, folder=self.folder)
        return formats_of(
            *spaces_of(env),
            self.name,
            observe=self.observe,
            joint_actions=self.joint_actions,
            rescale_actions=self.rescale_actions,
        )

    @property
    def _registered(self) -> Any:
        return _gym_env.registered(self.id, self.folder)

    def _open(self, simulators: int, training: bool, first: int, picture: bool) -> Simulators:
        registered = self._registered
        options: dict[str, Any] = {
            "ident": self.id,
            "name": self.name,
            "max_episode_steps": self.max_episode_steps,
            "folder": self.folder,
        }
        space_options: dict[str, Any] = {"observe": self.observe, "joint_actions": self.joint_actions}
        mode = self.vectorization
        if registered.entry_point is None:
            mode = "vector_entry_point"
        if mode != "none":
            if self.served:
                raise Refusal(
                    f"the simulators of {self.name} are one vector environment, which steps them itself: "
                    "leave out served, or vectorization if it is given."
                )
            limit = self.max_episode_steps

            def make_vector() -> Any:
                return _gym_env.make_vector(self.id, simulators, mode, limit, picture, self.folder)

            return VectorSimulators(self.name, make_vector, simulators, first, **space_options)
        if self.served and not picture:
            spec = self._served_spec()
            return served_environments(
                spec, "murmurate.worlds._gym_env:make", options, simulators, first, **space_options
            )
        is_unchanged = not (registered.additional_wrappers or registered.kwargs or self.observe)
        if registered.entry_point == _CARTPOLE and is_unchanged and not picture:
            limit = self.max_episode_steps or registered.max_episode_steps or sys.maxsize
            return CartPoleSimulators(self.name, simulators, limit, first)

        def make(b: int) -> tuple[Any, int]:
            return _gym_env.without_checks(_gym_env.make(**options, picture=picture and b == 0))

        return GymSimulators(self.name, make, simulators, first, **space_options)
