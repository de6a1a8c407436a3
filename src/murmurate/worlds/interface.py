"""One batched protocol for every kind of simulator.

A module of this folder, or one that joins it by an entry point of the group ``murmurate.worlds``, offers its
worlds by name with two functions::

    def names() -> list[str]: ...              # for lists; those that can be opened here
    def world(name: str) -> SimulatorWorld | None: ...  # None for a name that is not one of its worlds

Neither opens a simulator. ``world`` raises ``MissingExtra`` where the name may belong to a package that is
not installed. A field of the world that its name determines has the metadata ``{"in_name": True}``; every
other field is an option ``--world.FIELD``. Recipes choose settings by ``images``.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from murmurate.spec import EnvSpec, TimeStep, World

Picture = npt.NDArray[np.uint8]  # [H, W, 3], RGB


class Simulators(Protocol):
    """``B`` simulators of one world, stepped together, resetting themselves within a step."""

    @property
    def spec(self) -> EnvSpec: ...
    @property
    def size(self) -> int:
        """B."""
        ...

    def reset(self, seed: int) -> TimeStep:
        """Start all over; simulator ``b`` gets a seed derived from (seed, ``first`` + b)."""
        ...

    def send(self, action: Tensor) -> None:
        """Hand over one action each, [B] int64 or [B, D] float32; may go on in native threads.

        Raises ``ValueError`` for an action outside the world's set (vectors are clipped instead).
        """
        ...

    def receive(self) -> TimeStep:
        """Wait for the step begun by ``send``. What it returns is never written to again.

        ``terminated`` and ``truncated`` are never both set: a real end outranks a limit.
        """
        ...

    def state(self) -> dict[str, Any] | None:
        """All that is needed to go on bit for bit: tensors and plain JSON values, nested in dicts and
        lists; None where the simulator cannot be saved (then a resume starts new episodes)."""
        ...

    def load(self, state: dict[str, Any]) -> TimeStep:
        """Go back to a saved state; the observation is the one that was current when it was saved."""
        ...

    def picture(self) -> Picture:
        """Simulator 0 as a person sees it now. ``ValueError`` unless opened with ``picture=True``."""
        ...

    def close(self) -> None: ...


class SimulatorWorld(World, Protocol):
    """A frozen config that opens simulators: picklable, so that any process can."""

    def spec(self, fingerprint: object = None) -> EnvSpec:
        """The first call opens a simulator for a moment; the answer is kept with the world."""
        return self._spec

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        simulators = self.open(1, training=True)
        simulators.close()
        return simulators.spec

    @property
    def images(self) -> bool:
        """Whether observations are images (``EnvSpec.images``). Opens a simulator only if it must."""
        ...

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        """Open ``simulators`` of them. ``training`` switches on what is for learning only (reward
        clipping, life-loss episodes). ``first`` is the index of the first one, for its seed: two
        halves opened with first 0 and B/2 play what one whole of B plays. Raises ``MissingExtra``
        where the package is not installed."""
        ...
