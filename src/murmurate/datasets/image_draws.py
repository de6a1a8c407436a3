"""Random numbers for each image of a mini-batch, from (run seed, pass, number of the image) alone.

So an image is augmented alike whichever process decodes it, in whichever order, and after a resume.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from murmurate.spec import derive_seed

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


class ImageDraws:
    """The random numbers of G images: a SplitMix64 generator (Steele, Lea and Flood 2014) for each, which all
    draw at once."""

    def __init__(self, seed: int, passes: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """seed: of the run. passes, numbers: [G], the pass that an image is seen in, and its number."""
        key = np.uint64(derive_seed(seed, "augmentation"))
        passes_, numbers_ = passes.astype(np.uint64), numbers.astype(np.uint64)
        self._state = _mixed(_mixed(key + _GOLDEN * (passes_ + np.uint64(1))) ^ _mixed(numbers_ + _GOLDEN))

    def __len__(self) -> int:
        return len(self._state)

    def uniform(self, least: float = 0.0, most: float = 1.0) -> NDArray[np.float64]:
        """[G], the next number of each, in [least, most)."""
        self._state = self._state + _GOLDEN
        share = (_mixed(self._state) >> np.uint64(11)).astype(np.float64) * _UNIT
        return least + (most - least) * share

    def integers(self, count: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """[G], the next number of each, from 0 to count - 1."""
        return (self.uniform() * count).astype(np.int64)

    def normal(self) -> NDArray[np.float64]:
        """[G], standard normal, by Box and Muller's method from two numbers of each."""
        radius = np.sqrt(-2 * np.log1p(-self.uniform()))
        return np.asarray(radius * np.cos(2 * np.pi * self.uniform()))


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
