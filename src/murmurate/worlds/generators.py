"""Random generators, one for each simulator, seeded as by gymnasium and saved as plain integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from murmurate.spec import derive_seed


def simulator_seed(seed: int, index: int) -> int:
    """The 63-bit seed of simulator ``index`` (counted over all groups)."""
    return derive_seed(seed, "simulator", index)


def generators(seed: int, first: int, size: int) -> list[np.random.Generator]:
    """The generators that ``gymnasium.utils.seeding.np_random`` makes from the simulators' seeds."""
    return [
        np.random.Generator(np.random.PCG64(np.random.SeedSequence(simulator_seed(seed, first + b))))
        for b in range(size)
    ]


def save_generators(generators: list[np.random.Generator]) -> list[dict[str, Any]]:
    """Plain JSON values (the integers have up to 128 bits, which Python's json keeps)."""
    return [dict(generator.bit_generator.state) for generator in generators]


def load_generators(states: list[dict[str, Any]], size: int) -> list[np.random.Generator]:
    """Raises ``ValueError`` for anything but ``size`` PCG64 states."""
    if len(states) != size:
        raise ValueError(f"there are {len(states)} saved generators for {size} simulators")
    loaded = [np.random.Generator(np.random.PCG64(0)) for _ in states]
    for generator, state in zip(loaded, states, strict=True):
        generator.bit_generator.state = state
    return loaded
