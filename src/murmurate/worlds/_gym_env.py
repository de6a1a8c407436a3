"""Makes gymnasium's environments by their ids, and arranges what they give.

Imports no torch, so that a server can use it (``_game_server.py``).
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from murmurate import errors
from murmurate.worlds.env_state import quiet_models

PREFIX = "gym:"


def registered(ident: str) -> Any:
    """Gymnasium's spec of an id. Raises ``Refusal`` if it is not registered."""
    module, _, name = ident.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
    except ImportError as problem:
        raise errors.Refusal(
            f"The world {PREFIX}{ident} needs the module '{module}', which cannot be imported ({problem}). "
            "Install it, or put its folder on PYTHONPATH, as in: PYTHONPATH=. murmurate train ..."
        ) from problem
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as problem:
        near = difflib.get_close_matches(name, gymnasium.registry, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise errors.Refusal(
            f"No Gymnasium environment is registered as '{name}'.{hint} Name the module that registers it "
            f"too, as in {PREFIX}my_module:{name}."
        ) from problem


def make(ident: str, name: str, max_episode_steps: int | None = None, picture: bool = False) -> Any:
    """The environment with all its wrappers. name: of the world, for messages.

    Raises ``Refusal`` for one that cannot be opened, ``MissingExtra`` without MuJoCo where it is needed.
    """
    spec = registered(ident)
    kwargs: dict[str, Any] = {"render_mode": "rgb_array"} if picture else {}
    no_pictures = f"{name} has no pictures: its constructor must take render_mode='rgb_array'."
    try:
        with quiet_models(spec.entry_point):
            made = gymnasium.make(
                spec, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs
            )
    except gymnasium.error.DependencyNotInstalled as problem:
        if "mujoco" in str(problem).lower():
            raise errors.MissingExtra("mujoco", "mujoco", f"The world {name}") from problem
        raise errors.Refusal(f"The world {name} cannot be opened: {problem}") from problem
    except TypeError as problem:
        if not picture:
            raise
        raise errors.Refusal(f"{no_pictures} ({problem})") from problem
    if picture and made.render_mode != "rgb_array":
        raise errors.Refusal(no_pictures)
    return made


def without_checks(made: Any) -> tuple[Any, int]:
    """(the environment without wrappers, its time limit) if these are only gymnasium's checks and limits;
    else (``made``, no limit), as it limits itself."""
    inner, limit = made, sys.maxsize
    while type(inner) in (OrderEnforcing, PassiveEnvChecker, TimeLimit):
        if type(inner) is TimeLimit:
            limit = min(limit, inner._max_episode_steps)
        inner = inner.env
    return (made, sys.maxsize) if isinstance(inner, gymnasium.Wrapper) else (inner, limit)


def arranger(space: Any) -> Callable[[Any], Any]:
    """A function that gives an observation of ``space`` the spec's shape: colours first, the images of a
    stack one after the other. It raises ``ValueError`` for another shape, which numpy might broadcast."""
    shape, last = tuple(space.shape), _colours_last(space)
    arranged = arranged_shape(space)

    def arrange(observation: Any) -> Any:
        if np.shape(observation) != shape:
            raise ValueError(
                f"its observation has the shape {list(np.shape(observation))}, not {list(shape)}"
            )
        return np.moveaxis(observation, -1, -3).reshape(arranged) if last else observation

    return arrange


def success_of(info: Any) -> bool | None:
    """Whether the episode that ends with this info was a success; None where the environment does not say."""
    said = info.get("success", info.get("is_success"))
    return None if said is None else bool(said)


def arranged_shape(space: Any) -> tuple[int, ...]:
    if not _colours_last(space):
        return tuple(space.shape)
    *stack, height, width, colours = space.shape
    return (math.prod(stack) * colours, height, width)


def _colours_last(space: Any) -> bool:
    """Whether observations are images [..., H, W, C], as is usual in gymnasium."""
    shape = space.shape
    return bool(space.dtype == np.uint8 and len(shape) in (3, 4) and shape[-1] in (1, 3) and shape[-3] > 3)
