"""First-person worlds in Doom's engine (ViZDoom, Kempka et al. 2016); observations as in Jin (2.5, "Doom").

The screen is rendered in 160 x 120 RGB and reduced to 84 x 84; an action is repeated for 4 tics, of which
only the last is rendered; the last 4 frames are stacked, which makes 12 channels. An agent sees nothing else:
neither its health nor the time that has passed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from murmurate import errors
from murmurate.ranges import AnyFloat, NonNegativeInt, PositiveInt, Range, StackLength, check_ranges
from murmurate.spec import EnvSpec
from murmurate.worlds.interface import SimulatorWorld
from murmurate.worlds.occlusion import check_rectangle
from murmurate.worlds.served import ServedSimulators

_PREFIX, _OCCLUDED = "doom-", "-occluded"
_SCREEN, _SIDE = (120, 160, 3), 84
_SHOOT, _TURN = ("move-left", "move-right", "attack"), ("turn-left", "turn-right")
# name -> (ViZDoom's scenario file, fields of ``DoomWorld`` that differ from their defaults)
_WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "my-way-home": ("my_way_home", {"buttons": (*_TURN, "move-forward"), "combine": True}),
    "corridor-plus": (
        "deadly_corridor",
        {"buttons": ("move-right", *_TURN), "combine": True, "skill": 5, "reward_scale": 0.01},
    ),
    "basic": ("basic", {"buttons": _SHOOT}),
    "deadly-corridor": ("deadly_corridor", {"buttons": (*_SHOOT, "move-forward", "move-backward", *_TURN)}),
    "defend-the-center": ("defend_the_center", {"buttons": (*_TURN, "attack")}),
    "defend-the-line": ("defend_the_line", {"buttons": (*_TURN, "attack")}),
    "health-gathering": ("health_gathering", {"buttons": (*_TURN, "move-forward")}),
    "health-gathering-supreme": ("health_gathering_supreme", {"buttons": (*_TURN, "move-forward")}),
    "predict-position": ("predict_position", {"buttons": (*_TURN, "attack")}),
    "take-cover": ("take_cover", {"buttons": ("move-left", "move-right")}),
}
_THREADS = 2  # threads that step games: a thread mostly waits for its game's own process
_JINS_RECTANGLES = {"corridor-plus": (30, 130, 10, 110)}  # hidden by Jin: left, right, top, bottom


def names() -> list[str]:
    """Every scenario, and the occluded variants of Jin; none without vizdoom."""
    if importlib.util.find_spec("vizdoom") is None:
        return []
    return [_PREFIX + name for name in (*_WORLDS, *(name + _OCCLUDED for name in _JINS_RECTANGLES))]


def world(name: str) -> DoomWorld | None:
    """The world of that name, or None. Raises ``MissingExtra`` without vizdoom or OpenCV."""
    scenario = name.removeprefix(_PREFIX).removesuffix(_OCCLUDED)
    occlude = _JINS_RECTANGLES.get(scenario, ()) if name.endswith(_OCCLUDED) else ()
    doom_world = scenario in _WORLDS and DoomWorld(scenario, **_WORLDS[scenario][1], occlude=occlude)
    if not doom_world or doom_world.name != name:
        return None
    _check_installed()
    return doom_world


@dataclass(frozen=True)
class DoomWorld(SimulatorWorld):
    """One scenario of ViZDoom.

    buttons: ViZDoom's names of the buttons, with hyphens. combine: an action presses any combination of the n
        buttons (2^n actions; button k is bit k of the action's number); otherwise none or one of them (n + 1
        actions).
    skill: difficulty, from 1 to 5; none: the scenario's.
    frame_skip: tics (1/35 s) that an action lasts. stack: number of latest frames in an observation.
    reward_scale: factor of the rewards that an agent learns from; reported returns are unscaled.
    timeout: tics after which an episode is truncated; none: the scenario's.
    occlude: left, right, top and bottom of a hidden rectangle of the 160 x 120 screen: columns left to
        right - 1, rows top to bottom - 1; empty for none. occlude_colour: red, green, blue.

    Differs: Jin does not name MyWayHome's keys. We take turn-left, turn-right and move-forward, combined as
    in Corridor+ (8 actions).
    """

    scenario: str = field(metadata={"in_name": True})
    buttons: tuple[str, ...] = (*_TURN, "move-forward")
    combine: bool = False
    skill: Annotated[int, Range(1, 5)] | None = None
    frame_skip: Annotated[int, Range(1, 1000)] = 4
    stack: StackLength = 4
    reward_scale: AnyFloat = 1.0
    timeout: PositiveInt | None = None
    occlude: tuple[NonNegativeInt, ...] = ()
    occlude_colour: tuple[Annotated[int, Range(0, 255)], ...] = (0, 0, 0)

    images: ClassVar[bool] = True
    first_person: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self)
        check_rectangle(self.occlude, self.occlude_colour, _SCREEN[1], _SCREEN[0])
        if not 1 <= len(self.buttons) <= 16:
            raise errors.Refusal(
                f"{len(self.buttons)} buttons: use from 1 to 16, as in --world.buttons attack,use."
            )
        if len(set(self.buttons)) < len(self.buttons):
            raise errors.Refusal("a button is given twice. Give each of --world.buttons once.")

    @property
    def name(self) -> str:
        occluded = bool(self.occlude) and self.occlude == _JINS_RECTANGLES.get(self.scenario)
        return _PREFIX + self.scenario + _OCCLUDED * occluded

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        buttons = len(self.buttons)
        return EnvSpec(
            name=self.name,
            observation_shape=(3 * self.stack, _SIDE, _SIDE),
            observation_dtype=torch.uint8,
            actions=2**buttons if self.combine else buttons + 1,
            frames_per_step=self.frame_skip,
            stacked=True,
            channels=3,
        )

    @property
    def env_steps_per_second(self) -> float:
        return 35 / self.frame_skip

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> ServedSimulators:
        _check_installed()
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("scenario", "stack", "reward_scale"):
            del options[name]
        return ServedSimulators(
            self.spec(),
            "murmurate.worlds._doom_game:DoomGame",
            {**options, "file": _WORLDS[self.scenario][0]},
            simulators,
            first=first,
            scale=self.reward_scale if training else 1.0,
            threads=max(threads, _THREADS),
            screen=_SCREEN if picture else None,
        )


def _check_installed() -> None:
    for package in ("vizdoom", "cv2"):
        if importlib.util.find_spec(package) is None:
            raise errors.MissingExtra(package, "doom", "Doom")
