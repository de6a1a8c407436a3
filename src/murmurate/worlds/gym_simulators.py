"""Several gymnasium environments, stepped one after the other in this process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate import errors
from murmurate.spec import EnvSpec, TimeStep, derive_seed
from murmurate.worlds._failures import noted
from murmurate.worlds._game_server import MOST_FAILURES, STEPS_TO_RECOVER
from murmurate.worlds._gym_env import reset, running_statistics, success_of
from murmurate.worlds._numbers import first_not_finite, number
from murmurate.worlds._spaces import (
    JOINT_ACTIONS,
    ActionFormat,
    ObservationFormat,
    action_format,
    observation_format,
)
from murmurate.worlds.array_trees import to_arrays, to_tensors
from murmurate.worlds.env_state import Saver, Unsavable, load, load_generators, save_generators, saver
from murmurate.worlds.episodes import EpisodeCounter, restore
from murmurate.worlds.figures import figures_of
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.interface import Picture, first_step

_MEND = "Mend the environment"
_EXPECTED = {  # of what gymnasium calls
    "reset": ": reset takes seed= and options=, and returns (observation, info)",
    "step": ": step returns (observation, reward, terminated, truncated, info)",
}


class _Failure(NamedTuple):
    """Why an environment is replaced. what: a sentence. where: place in its code, in brackets."""

    what: str
    where: str
    remedy: str


class GymSimulators:
    """``B`` gymnasium environments.

    Observations are [B, ...] float32 or uint8, and actions numbers or vectors, as ``_spaces.py`` says.
    Environments for which ``env_state.saver`` has a saver are exactly resumable, also in wrappers that hold
    only numbers; for others ``state()`` is None. An environment that raises, or returns an invalid
    observation or a number that is not finite, is replaced by a new one: its episode ends truncated, with its
    last observation and a reward of 0, and is not among ``TimeStep.episodes``. The first
    traceback of each exception is printed.

    name: name of the world; or its spec, where the environment does not tell all of it.
    make: ``make(b)`` returns the environment of simulator ``b``, and the number of steps after which its
    episodes are truncated.
    observe, joint_actions: see ``_spaces.observation_format`` and ``action_format``.

    Raises ``Refusal`` if ``make`` returns one environment for several simulators.
    """

    def __init__(
        self,
        name: str | EnvSpec,
        make: Callable[[int], tuple[Any, int]],
        size: int,
        first: int,
        *,
        observe: Sequence[str] = (),
        joint_actions: int = JOINT_ACTIONS,
    ) -> None:
        self._make = make
        envs_and_limits = [make(b) for b in range(size)]
        self._envs = [env for env, _ in envs_and_limits]
        self._limits = np.array([limit for _, limit in envs_and_limits], np.int64)
        self._first = first
        world_name = name if isinstance(name, str) else name.name
        if len({id(env.unwrapped) for env in self._envs}) < size:
            raise errors.Refusal(
                f"The world {world_name} gives the same environment whenever it is to make one, and each of "
                f"{size} simulators needs its own. Let its function make a new one each time."
            )
        observations = observation_format(self._envs[0].observation_space, world_name, observe)
        actions = action_format(self._envs[0].action_space, world_name, joint_actions)
        self.spec = name if isinstance(name, EnvSpec) else spec_of(name, observations, actions)
        self._convert_observation, self._convert_actions = observations.convert, actions.convert
        self._savers: list[Saver | None] = [saver(env) for env in self._envs]
        self._counter = EpisodeCounter(size)
        self._dtype = np.uint8 if self.spec.observation_dtype == torch.uint8 else np.float32
        self._observation: npt.NDArray[Any] = self._blank()
        self._actions: Any = None
        self._failures = np.zeros(size, np.int64)  # failures in a row of each environment
        self._steps_since_failure = np.zeros(size, np.int64)
        self._seed, self._replacements = 0, np.zeros(size, np.int64)  # of each simulator, since ``reset``

    @property
    def size(self) -> int:
        return len(self._envs)

    @property
    def running_statistics(self) -> tuple[str, ...]:
        """See ``interface.running_statistics``."""
        return running_statistics(self._envs[0])

    def reset(self, seed: int) -> TimeStep:
        self._counter.clear()
        self._failures[:] = self._steps_since_failure[:] = self._replacements[:] = 0
        self._seed = seed
        self._observation = self._blank()
        restarts: list[str] = []
        for b in range(self.size):
            restarts += self._begin(b, self._observation, simulator_seed(seed, self._first + b))
        step = first_step(torch.from_numpy(self._observation))
        step.restarts = restarts
        return step

    def send(self, action: Tensor) -> None:
        self._actions = self._convert_actions(action.numpy())

    def receive(self) -> TimeStep:
        observation = self._blank()
        reward = np.empty(self.size, np.float64)
        terminated = np.empty(self.size, np.bool_)
        truncated = np.empty(self.size, np.bool_)
        successes: list[bool | None] = [None] * self.size
        figures: dict[int, dict[str, float]] = {}
        failed: dict[int, _Failure] = {}
        for b, (env, action) in enumerate(zip(self._envs, self._actions, strict=True)):
            try:
                raw, given, terminated[b], truncated[b], info = env.step(action)
                successes[b], figures[b] = success_of(info), figures_of(info)
                reward[b] = number(given)
                observation[b] = self._convert_observation(raw)
            except (Exception, SystemExit) as problem:
                failed[b] = self._exception(b, "step", problem)
        with np.errstate(over="ignore"):  # a reward that overflows is noted as not finite
            reward_float32 = reward.astype(np.float32)
        self._note_not_finite(failed, observation, reward_float32)
        self._steps_since_failure += 1
        lost = np.zeros(self.size, np.bool_)
        for b in failed:
            lost[b], terminated[b], truncated[b] = True, False, True
            observation[b], reward[b], reward_float32[b] = self._observation[b], 0.0, 0.0
        self._counter.tick(reward)
        truncated = (truncated | (self._counter.length >= self._limits)) & ~terminated
        over = terminated | truncated
        step = TimeStep(
            observation=torch.from_numpy(observation),
            reward=torch.from_numpy(reward_float32),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
        )
        if over.any():
            if truncated.any() or self._dtype == np.float32:
                step.final_observation = step.observation.clone()
            self._counter.clear(lost)  # before ``_begin``: a reset that fails is of the next episode
            step.episodes = self._counter.finish(over & ~lost, successes, figures)
            restarts = []
            for b in np.flatnonzero(over).tolist():
                restarts += self._begin(b, observation, None, failed.get(b))
            step.restarts = restarts
        self._observation = observation
        return step

    def state(self) -> dict[str, Any] | None:
        try:
            physics = [None if env_saver is None else env_saver.save() for env_saver in self._savers]
            generators = save_generators([env.unwrapped.np_random for env in self._envs])
        except Unsavable:
            return None
        if None in physics:
            return None
        return {
            "observation": torch.from_numpy(self._observation.copy()),
            "physics": to_tensors(physics),
            "generators": generators,
            "episodes": self._counter.state(),
            "seed": self._seed,
            "replacements": torch.from_numpy(self._replacements.copy()),
            "limits": torch.from_numpy(self._limits.copy()),
        }

    def load(self, state: dict[str, Any]) -> TimeStep:
        generators = load_generators(state["generators"], len(self._envs))
        for env, env_saver, physics, generator in zip(
            self._envs, self._savers, to_arrays(state["physics"]), generators, strict=True
        ):
            if env_saver is None:
                raise ValueError(f"{self.spec.name} cannot be saved, so there is no state to load: reset it")
            load(env, env_saver, physics, generator)
        self._counter.load(state["episodes"])
        # states that were saved earlier do not have these
        self._seed = state.get("seed", 0)
        none = torch.zeros(self.size, dtype=torch.int64)
        restore(self._replacements, state.get("replacements", none), "replacements")
        restore(self._limits, state.get("limits", torch.from_numpy(self._limits)), "limits")
        restore(self._observation, state["observation"], "observation")
        return first_step(torch.from_numpy(self._observation))

    def picture(self) -> Picture:
        if self._envs[0].render_mode != "rgb_array":
            raise ValueError("no picture: open the world with picture=True")
        try:
            return np.asarray(self._envs[0].render(), np.uint8)
        except gymnasium.error.DependencyNotInstalled as problem:
            raise errors.MissingExtra("pygame-ce", "video", f"A picture of {self.spec.name}") from problem
        except Exception as problem:  # the type of MuJoCo's errors depends on the platform
            raise errors.Refusal(
                f"A picture of {self.spec.name} cannot be drawn here ({problem}). On a machine without a "
                "display set the environment variable MUJOCO_GL to egl or osmesa."
            ) from problem

    def close(self) -> None:
        """Close all environments. Raises the exception of one that fails."""
        with contextlib.ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)

    def _begin(
        self, b: int, observation: npt.NDArray[Any], seed: int | None, cause: _Failure | None = None
    ) -> list[str]:
        """Begin an episode of simulator ``b`` and write its first observation to row ``b`` of
        ``observation``.

        cause: the failure that ended the previous episode, if any: the environment is then replaced first. It
        is replaced also if ``reset`` fails. Returns a sentence for each replacement. Raises ``RunFailed``
        after too many failures in a row.
        """
        restarts: list[str] = []
        while True:
            if cause is not None:
                restarts.append(self._note_failure(b, cause))
                self._replacements[b] += 1
                own_seed = simulator_seed(self._seed, self._first + b)
                seed = derive_seed(own_seed, "replacement", int(self._replacements[b]))
                with contextlib.suppress(Exception):
                    self._envs[b].close()
            call = "reset" if cause is None else "its constructor"
            try:
                if cause is not None:
                    self._envs[b], self._limits[b] = self._make(b)
                    self._savers[b], call = saver(self._envs[b]), "reset"
                observation[b] = self._convert_observation(reset(self._envs[b], seed))
            except (Exception, SystemExit) as problem:
                cause = self._exception(b, call, problem)
                continue
            if self._dtype == np.uint8 or np.isfinite(observation[b]).all():
                return restarts
            cause = self._not_finite(b, observation, "observation")

    def _note_failure(self, b: int, failure: _Failure) -> str:
        if self._steps_since_failure[b] >= STEPS_TO_RECOVER:
            self._failures[b] = 0
        self._failures[b] += 1
        self._steps_since_failure[b] = 0
        if self._failures[b] > MOST_FAILURES:
            raise errors.RunFailed(
                f"{failure.what}. It failed {self._failures[b]} times in a row{failure.where}. "
                f"{failure.remedy}"
            )
        return f"{failure.what}{failure.where} and is started again"

    def _note_not_finite(
        self, failed: dict[int, _Failure], observation: npt.NDArray[Any], reward: npt.NDArray[Any]
    ) -> None:
        """Add to ``failed`` each simulator whose observation or reward is not finite."""
        for name, values in (("observation", observation), ("reward", reward)):
            if values.dtype == np.uint8 or np.isfinite(values).all():
                continue
            rows = ~np.isfinite(values.reshape(self.size, -1)).all(1)
            for b in set(np.flatnonzero(rows).tolist()) - set(failed):
                failed[b] = self._not_finite(b, values, name)

    def _not_finite(self, b: int, values: npt.NDArray[Any], name: str) -> _Failure:
        what = f"{self._place(b)} gave {first_not_finite(values[b], name)}"
        return _Failure(what, "", f"{_MEND}, or register it with a wrapper that replaces such values.")

    def _exception(self, b: int, call: str, problem: BaseException) -> _Failure:
        if isinstance(problem, errors.Refusal):  # of a constructor that raised
            problem = problem.__cause__ or problem
        what = f"{self._place(b)} raised {type(problem).__name__} in {call}: {problem}"
        where = noted(problem)
        # outside of the environment's own code: it was called, or what it returned was read, in vain
        is_misfit = not where and re.search("unpack|positional|keyword argument", str(problem))
        return _Failure(what, where, f"{_MEND}{_EXPECTED.get(call, '') if is_misfit else ''}.")

    def _place(self, b: int) -> str:
        """Environment, simulator and step, for messages."""
        step = int(self._counter.length[b]) + 1
        return f"the environment {self.spec.name} (simulator {self._first + b}, step {step} of its episode)"

    def _blank(self) -> npt.NDArray[Any]:
        return np.empty((self.size, *self.spec.observation_shape), self._dtype)


def spec_of(name: str, observations: ObservationFormat, actions: ActionFormat) -> EnvSpec:
    """The spec of the world ``name`` with these observations and actions."""
    return EnvSpec(
        name,
        observations.shape,
        torch.uint8 if observations.uint8 else torch.float32,
        actions=actions.actions,
        action_shape=actions.shape,
        action_low=actions.low,
        action_high=actions.high,
        factors=actions.factors,
        parts=observations.parts,
    )
