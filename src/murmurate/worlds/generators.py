"""Random generators of simulators: one each, seeded as gymnasium seeds, saved as plain integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from murmurate.spec import derive_seed


def simulator_seed(seed: int, index: int) -> int:
    """The 63-bit seed of simulator ``index`` (counted over all halves) under ``seed``."""
    return derive_seed(seed, "simulator", index)


def generators(seed: int, first: int, size: int) -> list[np.random.Generator]:
    """What gymnasium makes of each simulator's seed (``gymnasium.utils.seeding.np_random``)."""
    return [
        np.random.Generator(np.random.PCG64(np.random.SeedSequence(simulator_seed(seed, first + b))))
        for b in range(size)
    ]


def save_generators(sources: list[np.random.Generator]) -> list[dict[str, Any]]:
    """Plain JSON values (the integers have up to 128 bits, which Python's json keeps)."""
    return [dict(source.bit_generator.state) for source in sources]


def load_generators(states: list[dict[str, Any]]) -> list[np.random.Generator]:
    """Raises ``ValueError`` for anything but PCG64 states."""
    sources = [np.random.Generator(np.random.PCG64(0)) for _ in states]
    for source, state in zip(sources, states, strict=True):
        source.bit_generator.state = state
    return sources
