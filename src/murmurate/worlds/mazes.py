"""First-person mazes of five levels in miniworld, in place of the Minecraft tasks of Jin (2.4, 2.5).

Jin's tasks are the levels of Matiisen et al. 2017 ("Teacher-Student Curriculum Learning", section 4): a room
(L1); corridors of rooms with a bridge over lava (L2), a gap in a wall (L3) and both (L4); and 2 x 2 rooms
(L5). An agent walks and turns to a block of gold. Of 20 frames a second it sees every 5th, an RGB image of
84 x 84; the last 4 that it sees are stacked.

Differs: Minecraft is not simulated. Walls, lava, bridge and gold look as miniworld draws them, and the agent
moves as in ``_maze_game.py``: 4.3 m/s and 180 degrees a second, in rooms of 7 m x 7 m. Frames are rendered
in their final size, instead of being reduced from 320 x 240, with eight samples a pixel, or as many as OpenGL
offers (Mesa by software: four).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from murmurate import errors
from murmurate.ranges import AnyFloat, PositiveInt, Range, StackLength, check_ranges
from murmurate.spec import EnvSpec
from murmurate.worlds.interface import SimulatorWorld
from murmurate.worlds.served import ServedSimulators

_NAMES = {"maze-curriculum": 0} | {f"maze-l{level}": level for level in range(1, 6)}
_SCREEN, _SIDE = (240, 320, 3), 84
_Seconds = Annotated[float, Range(0.05, 1e6)]


def names() -> list[str]:
    """The curriculum, and each level; none without miniworld."""
    return [] if importlib.util.find_spec("miniworld") is None else list(_NAMES)


def world(name: str) -> MazeWorld | None:
    """The world of that name, or None. Raises ``MissingExtra`` without miniworld."""
    if name not in _NAMES:
        return None
    _check_installed()
    return MazeWorld(_NAMES[name])


@dataclass(frozen=True)
class MazeWorld(SimulatorWorld):
    """One level (1 to 5), or all in turn (0).

    Every action costs 1, gold gives 1,000, and lava costs 1,000, as does a time-out, except on L5. Gold and
    lava terminate an episode, a time-out truncates it.

    advance_every: env steps of the whole run after which the curriculum goes on to the next level: 62500 is
        Jin's fast schedule, 93750 the slow one. An episode stays on the level on which it began. The
        curriculum is evaluated on L5.
    seconds: seconds of game time until an episode is truncated, except on L5.
    last_seconds: seconds of game time until an episode is truncated on L5.
    frame_skip: frames (1/20 s) that an action lasts. stack: number of latest images in an observation.
    reward_scale: factor of the rewards that an agent learns from; reported returns are unscaled.
    """

    level: Annotated[int, Range(0, 5)] = field(metadata={"in_name": True})
    advance_every: PositiveInt = 62_500
    seconds: _Seconds = 45.0
    last_seconds: _Seconds = 75.0
    frame_skip: Annotated[int, Range(1, 1000)] = 5
    stack: StackLength = 4
    reward_scale: AnyFloat = 0.001

    images: ClassVar[bool] = True
    first_person: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def name(self) -> str:
        return next(name for name, level in _NAMES.items() if level == self.level)

    def shared_by(self, simulators: int) -> MazeWorld:
        return dataclasses.replace(self, advance_every=max(1, self.advance_every // simulators))

    @property
    def env_steps_per_second(self) -> float:
        return 20 / self.frame_skip

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        return EnvSpec(
            name=self.name,
            observation_shape=(3 * self.stack, _SIDE, _SIDE),
            observation_dtype=torch.uint8,
            actions=4,
            frames_per_step=self.frame_skip,
            stacked=True,
            channels=3,
        )

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> ServedSimulators:
        """``threads`` has no effect: one thread draws all games."""
        _check_installed()
        options = {
            "level": self.level if training else self.level or 5,
            "advance_every": self.advance_every,
            "frame_skip": self.frame_skip,
            "seconds": (self.seconds, self.last_seconds),
            "picture": picture,
        }
        return ServedSimulators(
            self.spec(),
            "murmurate.worlds._maze_game:MazeGame",
            options,
            simulators,
            first=first,
            scale=self.reward_scale if training else 1.0,
            screen=_SCREEN if picture else None,
            savable=True,
        )


def _check_installed() -> None:
    if importlib.util.find_spec("miniworld") is None:
        raise errors.MissingExtra("miniworld", "mazes", "A maze")
