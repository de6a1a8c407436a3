"""The interface of replays, and the tuples they take and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from murmurate.replay.async_copy import AsyncCopy
from murmurate.replay.priorities import SlotSampler
from murmurate.replay.tree import Draw


@dataclass
class Sample:
    """A batch of B transitions.

    keys: [B] int64, to be passed to ``update`` with the errors. weights: [B] float32 importance weights,
    divided by the greatest weight that the replay can give (sources then divide them by the greatest weight
    of the batch).
    reward: [B], n-step returns. discount: [B], factor of the value of next_observation; 0 after a
    termination.
    behaviour: outputs of the behaviour policy [B, ...] by name, stored with the actions (see
    ``Rollouts.behaviour``).
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
    """A part of a large array of which little changes between two checkpoints. Chunks with the same ``name``
    have the same ``values``, so these are saved only once."""

    name: str
    values: Tensor


class Selection(NamedTuple):
    """The transitions of a batch. keys: [B] int64, never used for other transitions. draw: their slots (valid
    until the next ``observe``) and their weights."""

    keys: Tensor
    draw: Draw


class Steps(NamedTuple):
    """One step of b simulators.

    next_observation: [b, ...]; where an episode was truncated, its final observation, not the first of the
    next episode. Ignored where an episode terminated.
    action_value, next_value: [b], the actor's estimates of Q(s, a) and of max_a Q(s', a). They give the
    initial priorities (Horgan et al. 2018, section 3). None, or a nan: these are the highest so far.
    behaviour: outputs of the behaviour policy [b, ...] float32 by name, stored with the actions.
    """

    observation: Tensor
    action: Tensor
    reward: Tensor
    next_observation: Tensor
    terminated: Tensor
    truncated: Tensor
    action_value: Tensor | None = None
    next_value: Tensor | None = None
    behaviour: Mapping[str, Tensor] = MappingProxyType({})


class Replay(Protocol):
    """Stores transitions and returns batches of them."""

    @property
    def sampler(self) -> SlotSampler: ...

    def __len__(self) -> int:
        """How many transitions can be drawn."""
        ...

    @property
    def inserted(self) -> int:
        """Transitions inserted so far, including those since overwritten."""
        ...

    @property
    def full(self) -> bool:
        """Whether the next step may overwrite a transition that can be drawn."""
        ...

    def observe(self, first_simulator: int, steps: Steps) -> int:
        """Add one step of the simulators from number ``first_simulator`` on; returns how many transitions it
        completed.

        Raises ValueError for wrong shapes, dtypes or values (see ``checks``), before any change.
        """
        ...

    def restart(self, first_simulator: int, count: int) -> None:
        """Discard the unfinished transitions of ``count`` simulators from ``first_simulator`` on, which were
        reset."""
        ...

    def choose(self, count: int, beta: float, out: Draw | None = None) -> Selection:
        """Draw ``count`` transitions. out: tensors to write the draw into; None allocates new ones.

        Raises ValueError if there are fewer than ``count`` transitions.
        """
        ...

    def buffers(self, count: int, pinned: bool = False) -> Any:
        """Memory for ``gather`` to write a batch of ``count`` into; pinned: page-locked."""
        ...

    def gather(self, selection: Selection, buffers: Any = None, copier: AsyncCopy | None = None) -> Sample:
        """The batch of a selection, written into ``buffers`` if given. With a copier it is complete after the
        copier's ``wait``."""
        ...

    def write(self, selection: Selection, columns: dict[str, Tensor]) -> None:
        """Copy a selection's values into ``columns`` [B, ...], contiguous: the fields of a ``Sample`` except
        keys and weights, and ``behaviour.NAME`` for each output of the behaviour policy."""
        ...

    def sample(self, count: int, beta: float) -> Sample:
        """``gather(choose(count, beta))``"""
        ...

    def update(self, keys: Tensor, error: Tensor) -> None:
        """Set the errors [B] of the transitions ``keys`` [B]; overwritten transitions are ignored."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
