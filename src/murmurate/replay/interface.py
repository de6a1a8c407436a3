"""What a replay takes in and gives out, whatever it keeps and however it draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from murmurate.replay.async_copy import Courier
from murmurate.replay.priorities import Chances
from murmurate.replay.sum_tree import Draw


@dataclass
class Sample:
    """A batch of B transitions. keys: [B] int64, to be handed back with their errors. weights: [B] float32,
    over the greatest that any transition could have (learners take them over the greatest of the batch).

    reward: [B], n-step returns. discount: [B], of what follows; 0 after a termination.
    behaviour: [B, ...] by name, what was recorded beside the actions (see ``Requirement.behaviour``).
    """

    keys: Tensor
    weights: Tensor
    observation: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_observation: Tensor
    behaviour: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A part of something large, of which little is written between two checkpoints: under the same ``name``
    the same ``values``."""

    name: str
    values: Tensor


class Chosen(NamedTuple):
    """Which transitions a batch will have: ``keys`` name them for good, ``draw`` says where they lie now."""

    keys: Tensor
    draw: Draw


class Steps(NamedTuple):
    """One step of b simulators, as a replay is told of it.

    next_observation: [b, ...], what followed; where an episode was cut off its last one, not the next one's
    first. It is not looked at where an episode was terminated.
    taken, following: [b], the values of the action and of what followed, as who acted saw them: transitions
    are first drawn by their errors then (Horgan et al. 2018, section 3). None: by the highest so far.
    behaviour: [b, ...] float32 by name, what was recorded beside the actions.
    """

    observation: Tensor
    action: Tensor
    reward: Tensor
    next_observation: Tensor
    terminated: Tensor
    truncated: Tensor
    taken: Tensor | None = None
    following: Tensor | None = None
    behaviour: Mapping[str, Tensor] = MappingProxyType({})


class Replay(Protocol):
    """Transitions in, batches of them out."""

    @property
    def chances(self) -> Chances: ...

    def __len__(self) -> int:
        """How many transitions can be drawn."""
        ...

    @property
    def inserted(self) -> int:
        """Transitions so far, those that were overwritten too."""
        ...

    @property
    def full(self) -> bool:
        """Whether the next step may overwrite what somebody draws."""
        ...

    def observe(self, low: int, steps: Steps) -> int:
        """One step of the simulators from number ``low`` on; returns how many transitions it completed.

        Raises ValueError for a step that does not fit; then nothing has changed.
        """
        ...

    def restart(self, low: int, count: int) -> None:
        """These simulators begin new episodes, though the old ones have not ended."""
        ...

    def choose(self, count: int, beta: float, out: Draw | None = None) -> Chosen:
        """out: to be written into, instead of new tensors; what is chosen lies there until it is used again.

        Raises ValueError if there are fewer than ``count`` transitions.
        """
        ...

    def room(self, count: int, pinned: bool = False) -> Any:
        """Memory for ``gather`` to write into."""
        ...

    def gather(self, chosen: Chosen, room: Any = None, courier: Courier | None = None) -> Sample:
        """The batch itself; with a courier, once it has been waited for. What it holds lies in ``room``, if
        there is one, until that is used again."""
        ...

    def sample(self, count: int, beta: float) -> Sample:
        """``gather(choose(count, beta))``"""
        ...

    def update(self, keys: Tensor, error: Tensor) -> None:
        """New errors of what was drawn; of what has been overwritten meanwhile they are dropped."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
