"""Gymnasium's vector environments: one object steps all simulators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from torch import Tensor

from murmurate.errors import Refusal, RunFailed
from murmurate.spec import TimeStep
from murmurate.worlds._failures import noted
from murmurate.worlds._gym_env import REFUSALS_OF_SEEDS, SHORT_SEEDS, running_statistics, success_of
from murmurate.worlds._numbers import LARGEST_REWARD
from murmurate.worlds._spaces import JOINT_ACTIONS, action_format, observation_format
from murmurate.worlds.episodes import EpisodeCounter
from murmurate.worlds.figures import figures_of
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.gym_simulators import spec_of
from murmurate.worlds.interface import Picture, first_step

_ADVICE = "Make it with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP, or with DISABLED."


class VectorSimulators:
    """One ``gymnasium.vector.VectorEnv`` with ``size`` environments.

    Its autoreset mode may be SAME_STEP; or DISABLED, where this class resets environments by ``reset_mask``;
    or, for gymnasium's own ``SyncVectorEnv``, and ``AsyncVectorEnv`` with shared memory, NEXT_STEP: these
    obey ``reset_mask`` too, so that no step is lost. Vector environments cannot be saved. An environment that
    raises or returns numbers that are not finite ends the run, because no environment can be replaced alone.

    observe, joint_actions: see ``_spaces.observation_format`` and ``action_format``.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        size: int,
        first: int,
        *,
        observe: Sequence[str] = (),
        joint_actions: int = JOINT_ACTIONS,
    ) -> None:
        self._make = make
        self._env = env = _checked(make(), name, size)
        self._first = first
        self._resets_itself = _mode(env) == AutoresetMode.SAME_STEP
        # other vector environments may not accept one seed for each environment
        self._takes_seed_list = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        self._observations = observation_format(env.single_observation_space, name, observe)
        self._actions = action_format(env.single_action_space, name, joint_actions)
        self.spec = spec_of(name, self._observations, self._actions)
        self._batch_space = batch_space(env.single_observation_space, size)
        self._counter = EpisodeCounter(size)
        self._action: Any = None

    @property
    def size(self) -> int:
        return int(self._env.num_envs)

    @property
    def running_statistics(self) -> tuple[str, ...]:
        """See ``interface.running_statistics``."""
        return running_statistics(self._env)

    def reset(self, seed: int) -> TimeStep:
        seeds = [simulator_seed(seed, self._first + b) for b in range(self.size)]
        self._counter.clear()
        observation = self._guarded("reset", lambda: self._converted(self._seeded(seeds)[0]))
        return first_step(torch.from_numpy(observation))

    def _seeded(self, seeds: list[int]) -> Any:
        """What the environment's ``reset`` returns. Of seeds that it refuses it gets the remainders, as in
        ``_gym_env.reset``."""
        try:
            return self._env.reset(seed=seeds if self._takes_seed_list else seeds[0])
        except REFUSALS_OF_SEEDS:
            if max(seeds) < SHORT_SEEDS:
                raise
            with contextlib.suppress(Exception):
                self._env.close()
            # made anew, as the processes of an ``AsyncVectorEnv`` that raised have ended
            self._env = _checked(self._make(), self.spec.name, self.size)
            return self._seeded([seed % SHORT_SEEDS for seed in seeds])

    def send(self, action: Tensor) -> None:
        space = self._env.single_action_space
        actions = self._actions.convert(action.numpy())
        empty: Any = create_empty_array(space, self.size)
        self._action = concatenate(space, actions, empty)

    def receive(self) -> TimeStep:
        step: TimeStep = self._guarded("step", self._step)
        return step

    def _step(self) -> TimeStep:
        raw, reward, terminated, truncated, info = self._env.step(self._action)
        reward, terminated = self._rewards(reward), self._ends("terminated", terminated)
        truncated = self._ends("truncated", truncated) & ~terminated
        observation = self._converted(raw)
        self._counter.tick(reward)
        over = terminated | truncated
        final = None
        if over.any():
            if self._resets_itself:
                final = self._final(observation, info, over)
            else:
                final = observation
                mask = {"reset_mask": over.copy()}
                raw, _ = self._guarded("reset", lambda: self._env.reset(options=mask))
                observation = np.where(_expanded(over, observation), self._converted(raw), observation)
        if not (np.abs(reward) <= LARGEST_REWARD).all():  # nan, too
            raise RunFailed(f"{self._place} gave a reward not finite in float32. Mend the environment.")
        return TimeStep(
            observation=torch.from_numpy(observation),
            reward=torch.from_numpy(reward.astype(np.float32)),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            final_observation=None if final is None else torch.from_numpy(final),
            episodes=self._counter.finish(over, *self._told(info, over)) if over.any() else (),
        )

    def state(self) -> dict[str, Any] | None:
        return None

    def load(self, state: dict[str, Any]) -> TimeStep:
        raise ValueError(f"{self.spec.name} cannot be saved, so there is no state to load: call reset")

    def picture(self) -> Picture:
        if self._env.render_mode != "rgb_array":
            raise Refusal(
                f"{self.spec.name} has no pictures: its function must take render_mode (or **kwargs), "
                "which is then 'rgb_array', and pass it on to the environments."
            )
        try:
            frames: Any = self._env.render()
        except Exception as problem:  # of a library that is missing, or has no display
            raise Refusal(f"A picture of {self.spec.name} cannot be drawn here ({problem}).") from problem
        return np.asarray(frames[0], np.uint8)

    def close(self) -> None:
        self._env.close()

    @property
    def _place(self) -> str:
        """Environment and simulators, for messages."""
        return f"the environment {self.spec.name} (simulators {self._first} and up)"

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """What ``call`` returns. Raises ``RunFailed`` if it raises, also for what cannot be converted."""
        try:
            return call()
        except (Refusal, RunFailed):
            raise
        except Exception as problem:
            raise RunFailed(
                f"{self._place} raised {type(problem).__name__} in {what}: {problem}{noted(problem)}. "
                "Mend the environment, or make environments one by one: then one that fails is replaced."
            ) from problem

    def _converted(self, raw: Any) -> npt.NDArray[Any]:
        """The environment's observations as [B, *spec.observation_shape], in a new array."""
        rows = [self._observations.convert(row) for row in iterate(self._batch_space, raw)]
        if len(rows) != self.size:
            raise ValueError(f"it returned {len(rows)} observations of {self.size} environments")
        return self._checked_finite(np.stack(rows).astype(self._observations.dtype))

    def _rewards(self, rewards: Any) -> npt.NDArray[np.float64]:
        array = np.asarray(rewards)
        if array.shape != (self.size,) or array.dtype.kind not in "biuf":
            raise RunFailed(
                f"{self._place} gave rewards of shape {array.shape} and {array.dtype}: step must return "
                f"{self.size} numbers. Mend the environment."
            )
        return array.astype(np.float64)

    def _ends(self, name: str, values: Any) -> npt.NDArray[np.bool_]:
        array = np.array(values, np.bool_)
        if array.shape != (self.size,):
            raise ValueError(f"{name} has the shape {list(array.shape)}, not [{self.size}]")
        return array

    def _checked_finite(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if rows.dtype != np.uint8 and not np.isfinite(rows).all():
            raise RunFailed(f"{self._place} gave an observation that is not finite. Mend the environment.")
        return rows

    def _final(
        self, observation: npt.NDArray[Any], info: dict[str, Any], over: npt.NDArray[np.bool_]
    ) -> npt.NDArray[Any]:
        """``observation`` with the last observation of its episode in each row of ``over``."""
        finals = info.get("final_obs")
        final = observation.copy()
        for b in np.flatnonzero(over).tolist():
            if finals is None or (row := _row(finals, b)) is None:
                raise RunFailed(
                    f"{self._place} ended an episode without its last observation: with SAME_STEP the info "
                    "holds 'final_obs'. Add it, or use autoreset_mode DISABLED."
                )
            final[b] = self._observations.convert(row)
        return self._checked_finite(final)

    def _told(
        self, info: dict[str, Any], over: npt.NDArray[np.bool_]
    ) -> tuple[list[bool | None], dict[int, dict[str, float]]]:
        """For each simulator where ``over`` is true: whether its episode was a success, None where the
        environment does not say; and its figures."""
        infos = info.get("final_info", info) if self._resets_itself else info
        successes: list[bool | None] = [None] * self.size
        figures: dict[int, dict[str, float]] = {}
        for b in np.flatnonzero(over).tolist():
            info_of_b = infos[b] if not isinstance(infos, dict) else _info_of(infos, b)
            if isinstance(info_of_b, dict):
                successes[b], figures[b] = success_of(info_of_b), figures_of(info_of_b)
        return successes, figures


def _info_of(infos: dict[str, Any], b: int) -> dict[str, Any]:
    """What ``infos``, arrays [B] by name, says of environment ``b``. Figures are such arrays, too."""
    told = _row_of(infos, ("success", "is_success"), b)
    if isinstance(figures := infos.get("figures"), dict):
        told["figures"] = _row_of(figures, [name for name in figures if not name.startswith("_")], b)
    return told


def _row_of(arrays: dict[str, Any], names: Iterable[str], b: int) -> dict[str, Any]:
    """Row ``b`` of those of the arrays in which it is set: "_success" marks the rows of "success"."""
    marks = {name: arrays.get(f"_{name}") for name in names if name in arrays}
    return {name: arrays[name][b] for name, mark in marks.items() if mark is None or np.asarray(mark)[b]}


def _checked(env: Any, name: str, size: int) -> Any:
    """``env``, if it is a vector environment of that size with a usable autoreset mode; else raises
    ``Refusal``."""
    if not isinstance(env, VectorEnv):
        raise Refusal(
            f"The world {name} takes num_envs and is of type {type(env).__name__}: return a "
            "gymnasium.vector.VectorEnv, or leave num_envs out of its parameters."
        )
    if env.num_envs != size:
        raise Refusal(f"The world {name} was asked for {size} environments and has {env.num_envs}.")
    mode = _mode(env)
    if mode is None:
        raise Refusal(f"The vector environment {name} names no autoreset mode in its metadata. {_ADVICE}")
    if mode == AutoresetMode.NEXT_STEP and not isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        raise Refusal(
            f"The vector environment {name} begins an episode with the step after the last one ended "
            f"(NEXT_STEP), which loses a step of the others. {_ADVICE}"
        )
    if mode == AutoresetMode.NEXT_STEP and not getattr(env.unwrapped, "shared_memory", True):
        # its processes would begin an episode that has just begun anew once more
        raise Refusal(
            f"The vector environment {name} is an AsyncVectorEnv without shared memory, in which NEXT_STEP "
            f"loses a step of each episode. {_ADVICE}"
        )
    return env


def _mode(env: Any) -> AutoresetMode | None:
    mode = (env.metadata or {}).get("autoreset_mode")
    return None if mode is None else AutoresetMode(mode)


def _row(values: Any, b: int) -> Any:
    """Simulator b's part of values that gymnasium has batched: an array, or a dict or tuple of arrays."""
    if isinstance(values, dict):
        return {key: _row(part, b) for key, part in values.items() if not str(key).startswith("_")}
    if isinstance(values, tuple):
        return tuple(_row(part, b) for part in values)
    return values[b]


def _expanded(mask: npt.NDArray[np.bool_], like: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """``mask`` [B] in a shape that broadcasts against ``like`` [B, ...]."""
    return mask.reshape(-1, *(1,) * (like.ndim - 1))
