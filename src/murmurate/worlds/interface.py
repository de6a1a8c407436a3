"""One batched protocol for every kind of simulator.

A module of this folder, or one that joins it by an entry point of the group ``murmurate.worlds``, offers its
worlds by name with two functions::

    def names() -> list[str]: ...  # names of the worlds that can be opened here, for listings
    def world(name: str) -> SimulatorWorld | None: ...  # None where this module has no world of that name

Neither opens a simulator. ``world`` raises ``MissingExtra`` where the name may belong to a package that is
not installed. A field of the world that its name determines has the metadata ``{"in_name": True}``; every
other field is an option ``--world.FIELD``. Recipes choose settings by the world's ``images`` and
``first_person``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.spec import EnvSpec, TimeStep, World

Picture = npt.NDArray[np.uint8]  # [H, W, 3], RGB


@dataclass(frozen=True)
class Formats:
    """How a user's environment's observations and actions are converted to and from those of an agent.

    shape: shape of one observation for the agent, before several are stacked along their first dimension, the
    newest last.
    observe: converts an environment's observation to an array of that shape; raises ``ValueError`` for one
    that does not fit. about: in words what observations it takes.
    split: the single observations of a batch that is a mapping or tuple of arrays [B, ...]; None for anything
    else.
    act: converts an agent's actions, [B] or [B, *action_shape], to B actions of the environment.
    parts: the gymnasium space of each part of an observation that is flattened, by its name in
    ``EnvSpec.parts``.
    """

    shape: tuple[int, ...]
    observe: Callable[[Any], npt.NDArray[Any]]
    about: str
    split: Callable[[Any], list[Any] | None]
    act: Callable[[npt.NDArray[Any]], Any]
    parts: Mapping[str, Any] = field(default_factory=dict)


class Simulators(Protocol):
    """``B`` simulators of one world that step together. They reset themselves within the step that ends an
    episode."""

    @property
    def spec(self) -> EnvSpec: ...
    @property
    def size(self) -> int:
        """B, the number of simulators."""
        ...

    def reset(self, seed: int) -> TimeStep:
        """Begin new episodes; simulator ``b`` gets a seed derived from (seed, ``first`` + b), with ``first``
        as in ``SimulatorWorld.open``."""
        ...

    def send(self, action: Tensor) -> None:
        """Begin a step with one action for each simulator, [B] int64 or [B, D] float32. The step may continue
        in native threads or another process after ``send`` has returned.

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
        """Restore a saved state; the observation is the one that was current when it was saved. Raises
        ``ValueError`` if these simulators cannot be saved, or the state does not fit them."""
        ...

    def picture(self) -> Picture:
        """An image of simulator 0 now. Raises ``ValueError`` unless opened with ``picture=True``."""
        ...

    def close(self) -> None: ...


class SimulatorWorld(World, Protocol):
    """A frozen config that opens simulators. It is picklable, so that any process can open them."""

    def spec(self, fingerprint: object = None) -> EnvSpec:
        """The spec of the simulators. The first call opens a simulator for a moment; the result is cached."""
        return self._spec

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        simulators = self.open(1, training=True)
        with contextlib.suppress(Exception):  # a run is told by its own environments
            simulators.close()
        return simulators.spec

    # whether observations are colour images of a first-person view
    first_person: ClassVar[bool] = False
    # whether at an episode's beginning the earlier images of a stack are zeros, and not the first image
    begins_with_zeros: ClassVar[bool] = False

    @property
    def images(self) -> bool:
        """Whether observations are images, or have some among their parts (``EnvSpec.holds_images``). Opens a
        simulator only if it must."""
        ...

    @property
    def env_steps_per_second(self) -> float:
        """Env steps in a second of the world's own time: the rate at which a video shows them."""
        return 30.0

    @property
    def steps_in_background(self) -> bool:
        """Whether steps continue after ``Simulators.send`` has returned: otherwise a double buffer saves no
        time."""
        return True

    def formats(self) -> Formats | None:
        """Converts between the user's own environment and an agent; None for a world that is not made of
        users' environments."""
        return None

    def rescaled_bounds(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """The bounds (low, high), in the shape of an action, to which the agent's actions from -1 to 1 are
        scaled; None if they are not scaled."""
        return None

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        """Open that many simulators.

        training: enables what only serves learning (reward clipping, episodes that end when a life is lost).
        threads: number of threads that step them, in worlds that use threads. first: index of the first
        simulator, from which seeds are derived: two halves opened with first 0 and B/2 play the same games as
        all B opened together. picture: whether simulator 0 can be drawn. Raises ``MissingExtra`` if a package
        is not installed.
        """
        ...


def running_statistics(simulators: Simulators) -> tuple[str, ...]:
    """The names of wrappers of the user's environments that normalise by running statistics, which each new
    simulator begins anew. Simulators that may have such wrappers have an attribute of this name."""
    names: tuple[str, ...] = getattr(simulators, "running_statistics", ())
    return names


def first_step(observation: Tensor) -> TimeStep:
    """The result of a reset: observations [B, ...] with rewards of 0, and no episode ended."""
    terminated = torch.zeros(len(observation), dtype=torch.bool)
    return TimeStep(observation, torch.zeros(len(observation)), terminated, terminated.clone())
