"""The Adroit hand (Rajeswaran et al. 2018): a hand of 24 joints opens a door, hammers a nail, turns a pen or
carries a ball, with dense rewards."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, ClassVar

from murmurate.ranges import PositiveInt, StackLength, check_ranges
from murmurate.worlds import _adroit_env
from murmurate.worlds._gym_env import without_checks
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.interface import Simulators
from murmurate.worlds.served import served_environments
from murmurate.worlds.terminations import never
from murmurate.worlds.viewed import ViewedWorld

_PREFIX = "adroit-"
TERMINATIONS = {_PREFIX + task: never for task in _adroit_env.TASKS}


def names() -> list[str]:
    """The four tasks; none without gymnasium-robotics."""
    if importlib.util.find_spec("gymnasium_robotics") is None:
        return []
    return [_PREFIX + task for task in _adroit_env.TASKS]


def vector_names() -> list[str]:
    """The worlds of ``names`` whose actions are vectors: all of them."""
    return names()


def world(name: str) -> AdroitWorld | None:
    """The world of that name, or None; it opens only with gymnasium-robotics."""
    task = name.removeprefix(_PREFIX)
    return AdroitWorld(task) if name.startswith(_PREFIX) and task in _adroit_env.TASKS else None


@dataclass(frozen=True)
class AdroitWorld(ViewedWorld):
    """One task of gymnasium-robotics, version 1.

    max_episode_steps: steps after which an episode is truncated; nothing else ends an episode.
    frame_stack: number of latest observations that the agent sees as one.
    rescale_actions: the agent's actions are from -1 to 1, and are scaled to the task's bounds.
    served: simulators run in a separate process, where one that hangs is detected too.

    Differs: where the installed version rewards the hand for being far from the door's handle, the hammer or
    the ball, the sign of that term is corrected (``_adroit_env.factor``).
    """

    task: str = field(metadata={"in_name": True})
    max_episode_steps: PositiveInt = 200
    served: bool = False
    frame_stack: StackLength = field(default=1, metadata={"since": 6})
    rescale_actions: bool = field(default=False, metadata={"since": 6})

    images: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def name(self) -> str:
        return _PREFIX + self.task

    def _open(self, simulators: int, training: bool, first: int, picture: bool) -> Simulators:
        options: dict[str, Any] = {"task": self.task, "max_episode_steps": self.max_episode_steps}
        if self.served and not picture:
            spec = self._served_spec()
            return served_environments(spec, "murmurate.worlds._adroit_env:make", options, simulators, first)

        def make(b: int) -> tuple[Any, int]:
            return without_checks(_adroit_env.make(**options, picture=picture and b == 0))

        return GymSimulators(self.name, make, simulators, first)
