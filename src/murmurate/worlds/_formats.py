"""``Formats`` of worlds whose environments are gymnasium's."""

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
    seen: Any, taken: Any, name: str, *, observe: Sequence[str], joint_actions: int, rescale_actions: bool
) -> Formats:
    """Of the spaces of observations and actions; the other arguments are options of the world."""
    observing, acting = observed(seen, name, observe), acted(taken, name, joint_actions)
    low: Any = None
    high: Any = None
    if rescale_actions:
        low, high = (np.array(x, np.float32).reshape(acting.shape) for x in (acting.low, acting.high))

    def arrange(observation: Any) -> npt.NDArray[Any]:
        # flattening a number takes an array of numbers too, and makes nonsense of it
        if isinstance(seen, _EXACT) and not seen.contains(observation):
            raise ValueError(f"it is {observation!r}, and not in {seen}")
        return np.asarray(observing.arrange(observation), observing.dtype)

    def choose(action: npt.NDArray[Any]) -> Any:
        if rescale_actions:
            action = low + (np.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (high - low)
        chosen = acting.choose(action)
        return np.array(chosen) if all(map(np.isscalar, chosen)) else _stacked(chosen)

    return Formats(observing.shape, arrange, choose, low, high)


def _stacked(chosen: Any) -> Any:
    """Arrays of one shape as one; Dicts and Tuples as they are."""
    arrays = all(isinstance(each, np.ndarray) for each in chosen)
    return np.stack(list(chosen)) if arrays else list(chosen)


def spaces_of(env: Any) -> tuple[Any, Any]:
    """The spaces of one environment of ``env``, which is closed."""
    single = hasattr(env, "single_observation_space")
    found = (
        (env.single_observation_space, env.single_action_space)
        if single
        else (env.observation_space, env.action_space)
    )
    env.close()
    return found
