"""Worlds by their names on the command line: ``cartpole``, ``halfcheetah``, ``space-invaders``."""

from __future__ import annotations

import difflib

from murmurate import errors
from murmurate.worlds.atari import AtariWorld, games
from murmurate.worlds.gym import CLASSIC, MUJOCO, GymWorld
from murmurate.worlds.interface import SimulatorWorld

_GYM = CLASSIC | MUJOCO


def world(name: str) -> SimulatorWorld:
    """The world of that name: classic control, a MuJoCo task, or any ALE game in hyphens.

    Raises ``Refusal`` with the nearest name for an unknown one; ``MissingExtra`` for what may be an
    ALE game where ale-py is not installed.
    """
    if name in _GYM:
        return GymWorld(_GYM[name])
    try:
        known = games()
    except errors.MissingExtra:
        if difflib.get_close_matches(name, _GYM, n=1, cutoff=0.8):
            raise errors.unknown("world", name, _GYM) from None
        raise
    if name not in known:
        raise errors.unknown("world", name, [*_GYM, *known])
    return AtariWorld(name.replace("-", "_"))


def world_names() -> list[str]:
    """All of them, sorted; without ale-py the ALE games are left out."""
    try:
        return sorted([*_GYM, *games()])
    except errors.MissingExtra:
        return sorted(_GYM)
