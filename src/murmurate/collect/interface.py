"""One batched protocol for every kind of simulator."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from murmurate.spec import EnvSpec, TimeStep


class Simulators(Protocol):
    """``B`` simulators of one world, stepped together, resetting themselves within a step."""

    @property
    def spec(self) -> EnvSpec: ...
    @property
    def size(self) -> int:
        """B."""
        ...

    def reset(self, seed: int) -> TimeStep:
        """Start all over; simulator ``b`` gets a seed derived from (seed, b)."""
        ...

    def send(self, action: Tensor) -> None:
        """Hand over one action each, [B] int64 or [B, D] float32; may go on in native threads."""
        ...

    def receive(self) -> TimeStep:
        """Wait for the step begun by ``send``."""
        ...

    def state(self) -> dict[str, Any] | None:
        """All that is needed to go on bit for bit: tensors and plain JSON values, nested in dicts and
        lists; None where the simulator cannot be saved (then a resume starts new episodes)."""
        ...

    def load(self, state: dict[str, Any]) -> TimeStep:
        """Go back to a saved state; the observation is the one that was current when it was saved."""
        ...

    def close(self) -> None: ...


class World(Protocol):
    """A frozen config that opens simulators: picklable, so that any process can."""

    @property
    def name(self) -> str: ...
    def open(self, simulators: int, *, training: bool, threads: int = 1) -> Simulators:
        """Open ``simulators`` of them. ``training`` switches on what is for learning only (reward
        clipping, life-loss episodes). Raises ``MissingExtra`` where the package is not installed."""
        ...
