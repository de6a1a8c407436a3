"""One batched protocol for every kind of simulator.

A module of this folder, or one that joins it by an entry point of the group ``murmurate.worlds``, offers its
worlds by name with two functions::

    def names() -> list[str]: ...              # for lists; those that can be opened here
    def world(name: str) -> World | None: ...  # None for a name that is not one of its worlds

Neither opens a simulator. ``world`` raises ``MissingExtra`` where the name may belong to a package that is
not installed. A field of the world that its name determines has the metadata ``{"in_name": True}``; every
other field is an option ``--world.FIELD``. Recipes choose settings by ``images``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.agents.interface import Action
from murmurate.datasets.tables import TableWorld
from murmurate.fabric.interface import Channel
from murmurate.sources.examples import CorpusWorld
from murmurate.spec import Batch, EnvSpec, TimeStep

Picture = npt.NDArray[np.uint8]  # [H, W, 3], RGB
ExampleWorld = CorpusWorld | TableWorld  # where nobody acts


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


class World(Protocol):
    """A frozen config that opens simulators: picklable, so that any process can."""

    @property
    def name(self) -> str:
        """What its module's ``world`` finds it by."""
        ...

    @property
    def images(self) -> bool:
        """Whether observations are images (``EnvSpec.images``). Opens a simulator only if it must."""
        ...

    def spec(self) -> EnvSpec:
        """Shapes of observations and actions. The first call opens a simulator for a moment."""
        ...

    def fingerprint(self) -> str | None:
        """What a run folder keeps to tell this set of examples from another; None for simulators."""
        ...

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        """Open ``simulators`` of them. ``training`` switches on what is for learning only (reward
        clipping, life-loss episodes). ``first`` is the index of the first one, for its seed: two
        halves opened with first 0 and B/2 play what one whole of B plays. Raises ``MissingExtra``
        where the package is not installed."""
        ...


def spec_of(world: World | ExampleWorld) -> EnvSpec:
    """What can be seen and done in ``world``."""
    return world.spec if isinstance(world, ExampleWorld) else world.spec()


class Actor(Protocol):
    """The part of an agent that collecting and evaluating need (every ``Agent`` is one)."""

    def initial_memory(self, batch: int) -> Tensor | None: ...

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action: ...


class Source(Protocol):
    """Where a replica's batches come from, without end; or until ``alive`` asks for one: then the
    last batch may come without data.

    alive: to be called with the env steps played since the last batch, every now and then while a batch is
    long in coming; says whether to stop. Whoever learns sets it.
    """

    alive: Callable[[int], bool]

    def __iter__(self) -> Source: ...
    def __next__(self) -> Batch: ...

    @property
    def exact(self) -> bool:
        """Whether ``state`` holds all that is needed to go on bit for bit."""
        ...

    def share(self, channel: Channel, learners: int) -> None:
        """Weigh batches as if all learners drew from one replay (see ``banks``)."""
        ...

    def fields(self) -> dict[str, Any]:
        """What ``metrics.jsonl`` is to tell of it, by name."""
        ...

    def events(self) -> list[tuple[str, str]]:
        """What has happened since the last question: (kind, in words)."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...
