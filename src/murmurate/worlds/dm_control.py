"""The DeepMind Control Suite (Tassa et al. 2018): observations are states, or pixels.

A picture is drawn by EGL, which needs no display, with a shadow map of 512 texels and without multisampling.
Without a GPU this is several times faster than the suite's own settings; the mean difference is less than one
grey level. Simulators that draw run in a separate process.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from murmurate import errors
from murmurate.ranges import NonNegativeInt, PositiveInt, Range, StackLength, check_ranges
from murmurate.spec import EnvSpec
from murmurate.worlds._dmc_env import SCREEN, DmcEnv, is_installed, suite
from murmurate.worlds._spaces import action_format, observation_format
from murmurate.worlds.gym_simulators import GymSimulators, spec_of
from murmurate.worlds.interface import Simulators
from murmurate.worlds.served import served_environments
from murmurate.worlds.terminations import never
from murmurate.worlds.viewed import ViewedWorld, viewed_spec

_PREFIX, _PIXELS = "dmc-", "-pixels"
_MAKE = "murmurate.worlds._dmc_env:make"
# domain -> tasks that ``names`` lists: the suite's "benchmarking" tasks
_TASKS = {
    "acrobot": ("swingup", "swingup_sparse"),
    "ball_in_cup": ("catch",),
    "cartpole": ("balance", "balance_sparse", "swingup", "swingup_sparse"),
    "cheetah": ("run",),
    "finger": ("spin", "turn_easy", "turn_hard"),
    "fish": ("upright", "swim"),
    "hopper": ("stand", "hop"),
    "humanoid": ("stand", "walk", "run"),
    "manipulator": ("bring_ball",),
    "pendulum": ("swingup",),
    "point_mass": ("easy",),
    "reacher": ("easy", "hard"),
    "swimmer": ("swimmer6", "swimmer15"),
    "walker": ("stand", "walk", "run"),
}
# steps that an action lasts where observations are pixels, as in Hafner et al. 2019 (PlaNet) and Yarats et
# al. 2021 (DrQ); 2 in other domains
_REPEATS = {"ball_in_cup": 4, "cartpole": 8, "cheetah": 4, "reacher": 4}
_CAMERAS = {"quadruped": 2}  # number of the camera that sees the task best; 0 in other domains


def names() -> list[str]:
    """The suite's "benchmarking" tasks, each from states and from pixels; none without dm_control."""
    if not is_installed():
        return []
    listed = [_name(domain, task) for domain, tasks in _TASKS.items() for task in tasks]
    return [name + ending for name in listed for ending in ("", _PIXELS)]


def vector_names() -> list[str]:
    """The worlds of ``names`` whose actions are vectors: all of them."""
    return names()


def world(name: str) -> DmcWorld | None:
    """The world called ``dmc-cheetah-run`` or ``dmc-cheetah-run-pixels``, of any task of the suite, or None.

    Raises ``MissingExtra`` without dm_control.
    """
    if not name.startswith(_PREFIX):
        return None
    if not is_installed():
        raise errors.MissingExtra("dm_control", "control", "The DeepMind Control Suite")
    plain, pixels = name.removesuffix(_PIXELS), name.endswith(_PIXELS)
    listed = _by_name((domain, task) for domain, tasks in _TASKS.items() for task in tasks)
    domain_and_task = listed.get(plain) or _by_name(suite(pictures=False).ALL_TASKS).get(plain)
    if domain_and_task is None:
        return None
    domain, task = domain_and_task
    repeat = _REPEATS.get(domain, 2) if pixels else 1
    return DmcWorld(domain, task, pixels, action_repeat=repeat, camera=_CAMERAS.get(domain, 0))


@dataclass(frozen=True)
class DmcWorld(ViewedWorld):
    """One task of the suite. Its time limit truncates an episode.

    pixels: an observation is the last ``stack`` pictures of ``size`` x ``size``; otherwise it is a state.
    size: width and height of a picture, in pixels. stack: number of latest pictures in an observation.
    action_repeat: steps of the task that an action lasts; rewards are summed.
    camera: number of the task's camera.
    max_episode_steps: number of actions after which an episode is truncated, unless the task's time limit is
        lower.
    frame_stack: from states, number of latest observations that the agent sees as one.
    rescale_actions: the agent's actions are from -1 to 1, and are scaled to the task's bounds.
    served: simulators run in a separate process, where one that hangs is detected too; simulators that draw
        always do.
    """

    domain: str = field(metadata={"in_name": True})
    task: str = field(metadata={"in_name": True})
    pixels: bool = field(default=False, metadata={"in_name": True})
    action_repeat: Annotated[int, Range(1, 1000)] = 1
    stack: StackLength = 3
    size: Annotated[int, Range(16, 1024)] = 84
    camera: NonNegativeInt = 0
    served: bool = False
    max_episode_steps: PositiveInt | None = field(default=None, metadata={"since": 6})
    frame_stack: StackLength = field(default=1, metadata={"since": 6})
    rescale_actions: bool = field(default=False, metadata={"since": 6})

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.pixels and (self.stack, self.size) != (DmcWorld.stack, DmcWorld.size):
            raise errors.Refusal(
                f"stack and size are of pictures, and {self.name} is from states. Leave them out, or use "
                f"{self.name}{_PIXELS}."
            )
        if self.pixels and self.frame_stack > 1:
            raise errors.Refusal("frame_stack is of states: pictures have stack. Use --world.stack.")

    @property
    def name(self) -> str:
        return _name(self.domain, self.task) + _PIXELS * self.pixels

    @property
    def images(self) -> bool:
        return self.pixels

    @property
    def steps_in_background(self) -> bool:
        return self.pixels or self.served

    @property
    def env_steps_per_second(self) -> float:
        env = DmcEnv(**self._options | {"pixels": False})
        seconds = float(env.env.control_timestep())
        env.close()
        return 1 / (seconds * self.action_repeat)

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        return viewed_spec(
            self._plain_spec, frame_stack=self.frame_stack, rescale_actions=self.rescale_actions
        )

    @functools.cached_property
    def _plain_spec(self) -> EnvSpec:
        env = DmcEnv(**self._options | {"pixels": False})
        observations = observation_format(env.observation_space, self.name)
        actions = action_format(env.action_space, self.name)
        spec = dataclasses.replace(
            spec_of(self.name, observations, actions), frames_per_step=self.action_repeat
        )
        env.close()
        if not self.pixels:
            return spec
        shape = (3 * self.stack, self.size, self.size)
        return dataclasses.replace(
            spec, observation_shape=shape, observation_dtype=torch.uint8, stacked=True, channels=3, parts=()
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "task": self.task,
            "pixels": self.pixels,
            "action_repeat": self.action_repeat,
            "size": self.size,
            "camera": self.camera,
            "picture": False,
        }

    def _open(self, simulators: int, training: bool, first: int, picture: bool) -> Simulators:
        spec, limit = self._plain_spec, self.max_episode_steps
        if self.pixels or (self.served and not picture):
            screen = SCREEN if picture else None
            options = self._options | {"max_episode_steps": limit}
            return served_environments(spec, _MAKE, options, simulators, first, screen)

        def make(b: int) -> tuple[DmcEnv, int]:
            return DmcEnv(**self._options | {"picture": picture and b == 0}), limit or sys.maxsize

        return GymSimulators(spec, make, simulators, first)


def _name(domain: str, task: str) -> str:
    return f"{_PREFIX}{domain}-{task}".replace("_", "-")


def _by_name(tasks: Iterable[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {_name(domain, task): (domain, task) for domain, task in tasks}


# of the tasks of ``names``, none of which overrides the suite's ``Task.get_termination``; from states
TERMINATIONS = {_name(domain, task): never for domain, tasks in _TASKS.items() for task in tasks}
