"""``Formats`` of worlds that are made of gymnasium environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from murmurate.worlds._spaces import acted, observed
from murmurate.worlds.interface import Formats

_EXACT = (gymnasium.spaces.Discrete, gymnasium.spaces.MultiDiscrete, gymnasium.spaces.MultiBinary)


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
    observing = observed(observation_space, name, observe)
    acting = acted(action_space, name, joint_actions)
    low: Any = None
    high: Any = None
    if rescale_actions:
        low, high = (np.array(x, np.float32).reshape(acting.shape) for x in (acting.low, acting.high))

    def arrange(observation: Any) -> npt.NDArray[Any]:
        # ``flatten`` accepts an array of wrong numbers too, and would return nonsense
        if isinstance(observation_space, _EXACT) and not observation_space.contains(observation):
            raise ValueError(f"it is {observation!r}, and not in {observation_space}")
        return np.asarray(observing.arrange(observation), observing.dtype)

    def choose(action: npt.NDArray[Any]) -> Any:
        if rescale_actions:
            action = low + (np.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (high - low)
        chosen = acting.choose(action)
        return np.array(chosen) if all(map(np.isscalar, chosen)) else _stacked_arrays(chosen)

    return Formats(observing.shape, arrange, choose, low, high)


def _stacked_arrays(chosen: Any) -> Any:
    """Actions that are arrays as one array [B, ...]; a list of dicts or tuples as it is."""
    arrays = all(isinstance(action, np.ndarray) for action in chosen)
    return np.stack(list(chosen)) if arrays else list(chosen)


def spaces_of(env: Any) -> tuple[Any, Any]:
    """(observation space, action space) of a single environment, also where ``env`` is a vector environment.

    Closes ``env``.
    """
    single = hasattr(env, "single_observation_space")
    found = (
        (env.single_observation_space, env.single_action_space)
        if single
        else (env.observation_space, env.action_space)
    )
    env.close()
    return found
