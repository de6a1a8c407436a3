"""The Adroit hand's environments with the sign of their rewards corrected. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import gymnasium
import numpy as np

from murmurate import errors
from murmurate.worlds.env_state import silence_mujoco
from murmurate.worlds.modules import import_triton

# task -> (gymnasium-robotics' name, steps at the goal that a successful episode exceeds)
TASKS = {"door": ("Door", 25), "hammer": ("Hammer", 25), "pen": ("Pen", 20), "relocate": ("Relocate", 25)}
_MAGNITUDE = 0.1  # absolute value of the factor by which the distance enters the reward
_LIFT = 0.05  # m by which the palm's marker is moved to measure that factor


class CorrectedHand(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds ``factor`` times the distance from palm to object to the reward, and tells which episodes succeed.

    An episode is a success if the task's goal is reached in more than ``needed`` of its steps, as in
    Rajeswaran et al. 2018.
    """

    def __init__(self, env: Any, task: str, needed: int, factor: float) -> None:
        super().__init__(env)
        self._task, self._needed, self._factor = task, needed, factor
        self._reached = 0

    def reset(self, **options: Any) -> Any:
        self._reached = 0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._factor:
            reward = float(reward) + self._factor * palm_distance(self._task, self.env)
        self._reached += bool(info["success"])
        info["success"] = self._reached > self._needed
        return observation, reward, terminated, truncated, info


def make(task: str, max_episode_steps: int, picture: bool = False) -> Any:
    """The environment with corrected rewards and its time limit. Raises as ``factor`` does."""
    name, needed = TASKS[task]
    hand = CorrectedHand(_plain(name, picture), task, needed, factor(task))
    return gymnasium.wrappers.TimeLimit(hand, max_episode_steps)


def palm_distance(task: str, env: Any) -> float:
    """The distance in m from the palm to what it must take: the door's handle, the hammer or the ball."""
    data = env.data
    if task == "door":
        palm, target = env.grasp_site_id, data.site_xpos[env.handle_site_id]
    else:
        palm, target = env.S_grasp_site_id, data.xpos[env.obj_body_id]
    return float(np.linalg.norm(data.site_xpos[palm] - target))


@functools.cache
def factor(task: str) -> float:
    """The factor of the distance from palm to object that must be added to the installed version's reward.

    The dense rewards of door, hammer and relocate were published with -0.1 times that distance (Rajeswaran et
    al. 2018, and version 0 of the environments). gymnasium-robotics 1.4.2 has +0.1 instead. To find out which
    sign is installed, one step is made twice from the same state, with the palm's marker at two heights; no
    physics depends on the marker.

    Raises ``Refusal`` for a reward with another factor, ``MissingExtra`` without gymnasium-robotics.
    """
    if task == "pen":
        return 0.0
    env = _plain(TASKS[task][0])
    palm = env.grasp_site_id if task == "door" else env.S_grasp_site_id
    measured = []
    for lift in (0.0, _LIFT):
        env.model.site_pos[palm, 2] += lift
        env.reset(seed=0)
        reward = float(env.step(np.zeros(env.action_space.shape, np.float32))[1])
        measured.append((reward, palm_distance(task, env)))
    env.close()
    (reward, distance), (other_reward, other_distance) = measured
    slope = (other_reward - reward) / (other_distance - distance)
    for sign, correction in ((-1, 0.0), (1, -2 * _MAGNITUDE)):
        if abs(slope - sign * _MAGNITUDE) < 1e-6:
            return correction
    raise errors.Refusal(
        f"The reward of adroit-{task} changes by {slope:.3g} for each metre between palm and object; it is "
        f"known with -{_MAGNITUDE} and, wrongly, with {_MAGNITUDE}. Install gymnasium-robotics 1.4.2."
    )


def _plain(name: str, picture: bool = False) -> Any:
    """The package's environment without wrappers. Raises ``MissingExtra``."""
    import_triton()
    try:
        # the import warns about the sign that ``factor`` corrects
        with contextlib.redirect_stderr(io.StringIO()):
            import gymnasium_robotics
    except ImportError as problem:
        raise errors.MissingExtra("gymnasium-robotics", "adroit", "An Adroit hand") from problem
    gymnasium.register_envs(gymnasium_robotics)
    options: dict[str, Any] = {"render_mode": "rgb_array"} if picture else {}
    ident = f"AdroitHand{name}-v1"
    with silence_mujoco("mujoco"):
        return gymnasium.make(ident, reward_type="dense", disable_env_checker=True, **options).unwrapped
