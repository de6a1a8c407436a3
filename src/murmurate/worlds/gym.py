"""Gymnasium's environments.

Where gymnasium's argument checks, order checks and time limit are the only wrappers of an environment, they
are removed, and the time limit is counted here. With any other wrapper all of them remain.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

from murmurate.ranges import PositiveInt, check_ranges
from murmurate.worlds import _gym_env
from murmurate.worlds._gym_env import PREFIX as _PREFIX
from murmurate.worlds.cartpole import CartPoleSimulators
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.interface import Simulators, SimulatorWorld
from murmurate.worlds.served import served_environments

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
    _gym_env.registered(ident)
    return GymWorld(ident)


@dataclass(frozen=True)
class GymWorld(SimulatorWorld):
    """One gymnasium environment with its wrappers.

    id: as registered; ``my_module:MyEnv-v0`` imports ``my_module`` first, which registers it.
    max_episode_steps: replaces the registered time limit.
    served: simulators run in a process of their own, where one that hangs is noticed too.
    """

    id: str = field(metadata={"in_name": True})
    max_episode_steps: PositiveInt | None = None
    served: bool = field(default=False, metadata={"since": 4})

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
        registered = _gym_env.registered(self.id)
        options: dict[str, Any] = {
            "ident": self.id,
            "name": self.name,
            "max_episode_steps": self.max_episode_steps,
        }
        if self.served and not picture:
            spec = dataclasses.replace(self, served=False).spec()
            return served_environments(spec, "murmurate.worlds._gym_env:make", options, simulators, first)
        plain = not (registered.additional_wrappers or registered.kwargs)
        if registered.entry_point == _CARTPOLE and plain and not picture:
            limit: int = self.max_episode_steps or registered.max_episode_steps or sys.maxsize
            return CartPoleSimulators(self.name, simulators, limit, first)

        def make(b: int) -> tuple[Any, int]:
            return _gym_env.without_checks(_gym_env.make(**options, picture=picture and b == 0))

        return GymSimulators(self.name, make, simulators, first)
