"""Noise for updates that depends only on the seed and the update's number, so checkpoints do not hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.spec import derive_generator

_BLOCK = 64  # updates whose noise is drawn at once: far cheaper than a draw for each


class UpdateNoise:
    """Standard normal numbers of shape [K, B, D] for each update of one replica.

    shape: (K, B, D). rank: rank of the replica.
    """

    def __init__(self, seed: int, rank: int, shape: tuple[int, int, int], device: torch.device) -> None:
        self._seed, self._role, self._shape, self._device = seed, f"noise of updates of {rank}", shape, device
        self._block, self._drawn = -1, torch.empty(0)

    def of(self, update: int) -> Tensor:
        """The numbers for this update; every call for the same update returns the same numbers."""
        block, index = divmod(update, _BLOCK)
        if block != self._block:
            generator = derive_generator(self._seed, self._role, block, device=self._device)
            shape = (_BLOCK, *self._shape)
            self._drawn = torch.randn(shape, generator=generator, device=self._device)
            self._block = block
        return self._drawn[index]
