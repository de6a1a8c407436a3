"""One batched protocol for every kind of simulator.

A module of this folder, or one that joins it by an entry point of the group ``murmurate.worlds``, offers its
worlds by name with two functions::

    def names() -> list[str]: ...  # of the worlds that can be opened here, for listings
    def world(name: str) -> SimulatorWorld | None: ...  # None for the name of no world of this module

Neither opens a simulator. ``world`` raises ``MissingExtra`` where the name may belong to a package that is
not installed. A field of the world that its name determines has the metadata ``{"in_name": True}``; every
other field is an option ``--world.FIELD``. Recipes choose settings by ``images`` and ``first_person``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.spec import EnvSpec, TimeStep, World

Picture = npt.NDArray[np.uint8]  # [H, W, 3], RGB


@dataclass(frozen=True)
class Formats:
    """How what a user's environment gives and takes becomes an agent's.

    shape: shape of one observation for the agent, before several are stacked along their first dimension, the
    newest last. observe: an environment's observation as an array of that shape; it raises ``ValueError`` for
    another one.
    act: the environment's own actions, one for each row of an agent's, [B] or [B, *action_shape].
    low, high: bounds [*action_shape] to which actions from -1 to 1 are scaled; None: they are not.
    """

    shape: tuple[int, ...]
    observe: Callable[[Any], npt.NDArray[Any]]
    act: Callable[[npt.NDArray[Any]], Any]
    low: npt.NDArray[np.float32] | None = None
    high: npt.NDArray[np.float32] | None = None


class Simulators(Protocol):
    """``B`` simulators of one world that step together. They reset themselves within the step that ends an
    episode."""

    @property
    def spec(self) -> EnvSpec: ...
    @property
    def size(self) -> int:
        """B."""
        ...

    def reset(self, seed: int) -> TimeStep:
        """Begin new episodes; simulator ``b`` gets a seed derived from (seed, ``first`` + b)."""
        ...

    def send(self, action: Tensor) -> None:
        """Begin a step with one action each, [B] int64 or [B, D] float32, possibly in native threads.

        Raises ``ValueError`` for an action that does not exist; vectors are clipped to their bounds.
        """
        ...

    def receive(self) -> TimeStep:
        """The result of the step begun by ``send``, whose tensors are never written to again.

        ``terminated`` and ``truncated`` are never both set: termination takes precedence.
        """
        ...

    def state(self) -> dict[str, Any] | None:
        """All that is needed to continue bit for bit: tensors and plain JSON values, nested in dicts and
        lists; None if these simulators cannot be saved (then a resumed run starts new episodes)."""
        ...

    def load(self, state: dict[str, Any]) -> TimeStep:
        """Restore a saved state; the observation is the one that was current when it was saved."""
        ...

    def picture(self) -> Picture:
        """An image of simulator 0 now. Raises ``ValueError`` unless opened with ``picture=True``."""
        ...

    def close(self) -> None: ...


class SimulatorWorld(World, Protocol):
    """A frozen config that opens simulators: picklable, so that any process can."""

    def spec(self, fingerprint: object = None) -> EnvSpec:
        """The first call opens a simulator for a moment; the result is cached."""
        return self._spec

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        simulators = self.open(1, training=True)
        simulators.close()
        return simulators.spec

    # whether observations are images in colour of a first-person view
    first_person: ClassVar[bool] = False

    @property
    def images(self) -> bool:
        """Whether observations are images (``EnvSpec.images``). Opens a simulator only if it must."""
        ...

    def formats(self) -> Formats | None:
        """How observations and actions of the environment itself become the agent's; None where an agent sees
        and does what ``open`` gives and takes."""
        return None

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        """Open ``simulators`` of them.

        training: enables what only serves learning (reward clipping, episodes that end with a life). first:
        index of the first one, for its seed: two halves opened with first 0 and B/2 play the same games as
        all B opened together. picture: whether simulator 0 can be drawn. Raises ``MissingExtra`` if a package
        is not installed.
        """
        ...


def first_step(observation: Tensor) -> TimeStep:
    """The result of a reset: observations [B, ...] without rewards and ends."""
    no = torch.zeros(len(observation), dtype=torch.bool)
    return TimeStep(observation, torch.zeros(len(observation)), no, no.clone())
