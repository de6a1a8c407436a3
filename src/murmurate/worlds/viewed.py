"""Wraps the simulators of any world to stack their observations, or to rescale their actions.

A world's ``open`` passes its simulators and its own options to ``viewed``, as ``ViewedWorld`` does. The
stacked observations are saved and loaded with the state of the simulators.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.interface import Picture, Simulators, SimulatorWorld, running_statistics


def viewed(simulators: Simulators, *, frame_stack: int = 1, rescale_actions: bool = False) -> Simulators:
    """``simulators``, wrapped: an observation is the last ``frame_stack`` ones of an episode; if
    ``rescale_actions``, actions from -1 to 1 are scaled to the bounds.

    Raises ``Refusal``, with ``simulators`` closed, if ``rescale_actions`` is given for discrete actions or
    for bounds that are not finite.
    """
    try:
        viewed_spec(simulators.spec, frame_stack=frame_stack, rescale_actions=rescale_actions)
    except Refusal:
        simulators.close()
        raise
    if rescale_actions:
        simulators = RescaledActions(simulators)
    return StackedObservations(simulators, frame_stack) if frame_stack > 1 else simulators


def viewed_spec(spec: EnvSpec, *, frame_stack: int = 1, rescale_actions: bool = False) -> EnvSpec:
    """The spec that simulators with ``spec`` have after ``viewed``. Raises ``Refusal`` as ``viewed`` does."""
    if rescale_actions:
        vectors = bool(spec.action_shape) and not spec.factors
        if not vectors or not all(map(math.isfinite, (*spec.action_low, *spec.action_high))):
            raise Refusal(
                f"rescale_actions is for vectors with finite bounds, and the actions of {spec.name} are "
                f"{'unbounded' if vectors else 'discrete'}. Leave it out."
            )
        size = len(spec.action_low)
        spec = dataclasses.replace(spec, action_low=(-1.0,) * size, action_high=(1.0,) * size)
    if frame_stack > 1:
        first, *rest = spec.observation_shape
        spec = dataclasses.replace(
            spec,
            observation_shape=(frame_stack * first, *rest),
            stacked=spec.images,
            channels=(spec.channels if spec.stacked else first) if spec.images else 1,
            history=1 if spec.images else frame_stack * spec.history,
        )
    return spec


Array = TypeVar("Array", Tensor, npt.NDArray[Any])


def rescaled(action: Array, low: Array, span: Array) -> Array:
    """Actions, clipped to [-1, 1] and scaled linearly to the bounds from ``low`` to ``low + span``."""
    scaled: Array = low + (action.clip(-1.0, 1.0) + 1.0) / 2.0 * span
    return scaled


class ViewedWorld(SimulatorWorld):
    """A world whose simulators pass through ``viewed``: subclasses are dataclasses with these fields."""

    served: bool
    frame_stack: int
    rescale_actions: bool

    @property
    def steps_in_background(self) -> bool:
        return self.served

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        """``threads`` has no effect, and ``training`` only on functions of the user's own that take it."""
        plain = self._open(simulators, training, first, picture)
        return viewed(plain, frame_stack=self.frame_stack, rescale_actions=self.rescale_actions)

    def rescaled_bounds(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        if not self.rescale_actions:
            return None
        plain: Self = dataclasses.replace(cast(Any, self), rescale_actions=False)
        spec = plain.spec()
        low, high = (np.array(x, np.float32) for x in (spec.action_low, spec.action_high))
        return low.reshape(spec.action_shape), high.reshape(spec.action_shape)

    @abstractmethod
    def _open(self, simulators: int, training: bool, first: int, picture: bool) -> Simulators:
        """The simulators before ``viewed``."""

    def _served_spec(self) -> EnvSpec:
        """The spec of simulators in a separate process, before ``viewed``: that of one in this process."""
        plain: Self = dataclasses.replace(cast(Any, self), served=False, frame_stack=1, rescale_actions=False)
        return plain.spec()


class _Wrapper:
    """A ``Simulators`` that passes every call to the simulators ``inside``."""

    def __init__(self, inside: Simulators, spec: EnvSpec) -> None:
        self.inside = inside
        self.spec = spec

    @property
    def size(self) -> int:
        return self.inside.size

    @property
    def running_statistics(self) -> tuple[str, ...]:
        """See ``interface.running_statistics``."""
        return running_statistics(self.inside)

    def reset(self, seed: int) -> TimeStep:
        return self.inside.reset(seed)

    def send(self, action: Tensor) -> None:
        self.inside.send(action)

    def receive(self) -> TimeStep:
        return self.inside.receive()

    def state(self) -> dict[str, Any] | None:
        return self.inside.state()

    def load(self, state: dict[str, Any]) -> TimeStep:
        return self.inside.load(state)

    def picture(self) -> Picture:
        return self.inside.picture()

    def close(self) -> None:
        self.inside.close()


class RescaledActions(_Wrapper):
    """Clips vector actions to [-1, 1], and scales them linearly to the bounds of ``inside``."""

    def __init__(self, inside: Simulators) -> None:
        spec = inside.spec
        super().__init__(inside, viewed_spec(spec, rescale_actions=True))
        self._low = torch.tensor(spec.action_low).view(spec.action_shape)
        self._span = torch.tensor(spec.action_high).view(spec.action_shape) - self._low

    def send(self, action: Tensor) -> None:
        self.inside.send(rescaled(action, self._low, self._span))


class StackedObservations(_Wrapper):
    """Concatenates the last ``count`` observations of an episode, the newest last; at its beginning the first
    one is repeated. Vectors [D] become [count * D], images [C, H, W] become [count * C, H, W]."""

    def __init__(self, inside: Simulators, count: int) -> None:
        super().__init__(inside, viewed_spec(inside.spec, frame_stack=count))
        self._count, self._rows = count, inside.spec.observation_shape[0]
        self._stack = torch.zeros(
            inside.size, *self.spec.observation_shape, dtype=self.spec.observation_dtype
        )

    def reset(self, seed: int) -> TimeStep:
        step = self.inside.reset(seed)
        self._stack = self._repeated(step.observation)
        return dataclasses.replace(step, observation=self._stack)

    def receive(self) -> TimeStep:
        step, before = self.inside.receive(), self._stack
        stack, final = self._shifted(before, step.observation), step.final_observation
        over = step.terminated | step.truncated
        if over.any():
            stack[over] = self._repeated(step.observation[over])
            if final is not None:
                final = self._shifted(before, final)
        self._stack = stack
        return dataclasses.replace(step, observation=stack, final_observation=final)

    def state(self) -> dict[str, Any] | None:
        inside = self.inside.state()
        return None if inside is None else {"inside": inside, "stack": self._stack.clone()}

    def load(self, state: dict[str, Any]) -> TimeStep:
        step = self.inside.load(state["inside"])
        if state["stack"].shape != self._stack.shape:
            raise ValueError(f"the saved stack has shape {list(state['stack'].shape)}")
        self._stack = state["stack"].clone()
        return dataclasses.replace(step, observation=self._stack)

    def _repeated(self, observation: Tensor) -> Tensor:
        return torch.cat([observation] * self._count, 1)

    def _shifted(self, before: Tensor, newest: Tensor) -> Tensor:
        return torch.cat([before[:, self._rows :], newest], 1)
