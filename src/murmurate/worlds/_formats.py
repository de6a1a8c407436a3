"""``Formats`` of worlds that are made of gymnasium environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from murmurate.worlds._gym_env import close
from murmurate.worlds._spaces import (
    action_format,
    batch_size,
    description,
    observation_format,
    part_spaces,
    row_of,
)
from murmurate.worlds.interface import Formats
from murmurate.worlds.viewed import rescaled

_DISCRETE = (gymnasium.spaces.Discrete, gymnasium.spaces.MultiDiscrete, gymnasium.spaces.MultiBinary)


def formats_of(
    observation_space: Any,
    action_space: Any,
    name: str,
    *,
    observe: Sequence[str],
    joint_actions: int,
    rescale_actions: bool,
) -> Formats:
    """The ``Formats`` of an environment with these spaces of observations and actions.

    name: name of the world, for messages. The other arguments are options of the world.
    """
    observations = observation_format(observation_space, name, observe)
    actions = action_format(action_space, name, joint_actions)
    low: Any = None
    high: Any = None
    if rescale_actions:
        low, high = (np.array(x, np.float32).reshape(actions.shape) for x in (actions.low, actions.high))

    def convert_observation(observation: Any) -> npt.NDArray[Any]:
        # in these spaces ``flatten`` accepts values that are not in the space too, and would return nonsense
        if isinstance(observation_space, _DISCRETE) and not observation_space.contains(observation):
            raise ValueError(f"it is {observation!r}, and not in {observation_space}")
        return np.asarray(observations.convert(observation), observations.dtype)

    def split(batch: Any) -> list[Any] | None:
        size = batch_size(observation_space, name, observe, batch)
        return None if size is None else [row_of(batch, b) for b in range(size)]

    def convert_action(action: npt.NDArray[Any]) -> Any:
        if rescale_actions:
            action = rescaled(action, low, high - low)
        converted = actions.convert(action)
        return np.array(converted) if all(map(np.isscalar, converted)) else _stacked_arrays(converted)

    about = description(observation_space, name, observe)
    parts = part_spaces(observation_space, name, observe) if observations.parts else {}
    return Formats(observations.shape, convert_observation, about, split, convert_action, parts)


def _stacked_arrays(actions: Any) -> Any:
    """Actions that are arrays as one array [B, ...]; a list of dicts or tuples as it is."""
    are_arrays = all(isinstance(action, np.ndarray) for action in actions)
    return np.stack(list(actions)) if are_arrays else list(actions)


def spaces_of(env: Any) -> tuple[Any, Any]:
    """(observation space, action space) of a single environment, also where ``env`` is a vector environment.

    Closes ``env``.
    """
    is_vector = hasattr(env, "single_observation_space")
    spaces = (
        (env.single_observation_space, env.single_action_space)
        if is_vector
        else (env.observation_space, env.action_space)
    )
    close(env)
    return spaces
