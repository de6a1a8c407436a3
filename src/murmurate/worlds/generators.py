"""Random generators, one for each simulator, seeded in the same way as gymnasium's."""

from __future__ import annotations

import numpy as np

from murmurate.spec import derive_seed


def simulator_seed(seed: int, index: int) -> int:
    """The 63-bit seed of a simulator. index: ``first`` + b of simulator b (see ``SimulatorWorld.open``)."""
    return derive_seed(seed, "simulator", index)


def generators(seed: int, first: int, size: int) -> list[np.random.Generator]:
    """The generators that ``gymnasium.utils.seeding.np_random`` makes from the simulators' seeds."""
    return [
        np.random.Generator(np.random.PCG64(np.random.SeedSequence(simulator_seed(seed, first + b))))
        for b in range(size)
    ]
