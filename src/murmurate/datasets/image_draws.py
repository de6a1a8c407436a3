"""Random numbers for each image, which depend only on (run seed, pass, number of the image).

So an image is augmented in the same way whichever process decodes it, in whichever order, and after a resume.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


def image_draws(
    key: int, passes: NDArray[np.int64], numbers: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """[G, count] uniform numbers in [0, 1): the first ``count`` of a SplitMix64 generator (Steele, Lea and
    Flood 2014) for each image.

    key: derived from the run's seed. passes: [G], the pass over the data in which each image is seen.
    numbers: [G], the images' numbers.
    """
    passes_, numbers_ = passes.astype(np.uint64), numbers.astype(np.uint64)
    first = _mixed(np.uint64(key) + _GOLDEN * (passes_ + np.uint64(1))) ^ _mixed(numbers_ + _GOLDEN)
    steps = _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    states = _mixed(first)[:, None] + steps
    draws: NDArray[np.float64] = (_mixed(states) >> np.uint64(11)).astype(np.float64) * _UNIT
    return draws


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, which mixes the bits of a state."""
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
