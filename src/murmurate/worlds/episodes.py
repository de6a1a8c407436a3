"""Counts the unclipped return and the length of each episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.spec import Episode


class EpisodeCounter:
    """Returns and lengths of the present episodes of ``B`` simulators (in Atari, of the present games)."""

    def __init__(self, size: int) -> None:
        self.episode_return = np.zeros(size, np.float64)
        self.length = np.zeros(size, np.int64)

    def clear(self, which: Any = slice(None)) -> None:
        """Restart the counts of these simulators: a mask [B], or all of them. Their episodes are not
        reported."""
        self.episode_return[which] = 0
        self.length[which] = 0

    def tick(self, reward: npt.NDArray[Any]) -> None:
        """Add one step's unclipped reward [B]."""
        self.episode_return += reward
        self.length += 1

    def finish(
        self,
        over: npt.NDArray[np.bool_],
        successes: Sequence[bool | None] | None = None,
        figures: Mapping[int, Mapping[str, float]] | None = None,
    ) -> Sequence[Episode]:
        """The episodes that have ended, in the simulators where ``over`` [B] is true; their counts restart
        from zero.

        successes: whether each simulator's episode reached its goal; None where the world does not say.
        figures: what else was measured in the episodes of some simulators, by name.
        """
        ended = [
            Episode(
                b,
                float(self.episode_return[b]),
                int(self.length[b]),
                None if successes is None else successes[b],
                (figures or {}).get(b, {}),
            )
            for b in np.flatnonzero(over).tolist()
        ]
        self.clear(over)
        return ended

    def state(self) -> dict[str, Any]:
        return {
            "episode_return": torch.from_numpy(self.episode_return.copy()),
            "length": torch.from_numpy(self.length.copy()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a ``state``. Raises ValueError for another number of simulators."""
        restore(self.episode_return, state["episode_return"], "episode_return")
        restore(self.length, state["length"], "length")


def restore(target: npt.NDArray[Any], saved: Tensor, name: str) -> None:
    """Copy ``saved`` into ``target``. Raises ValueError for another shape, which numpy might broadcast."""
    if tuple(saved.shape) != target.shape:
        raise ValueError(f"the saved {name} has shape {list(saved.shape)} instead of {list(target.shape)}")
    target[...] = saved.numpy()
