"""Compares the simulated hardware with exact prefix sums, over many operations, including pipeline
hazards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from murmurate.fpga.shape import UNIFORM_BITS, TreeShape
from murmurate.fpga.simulation import SimulatedManager


@dataclass(frozen=True)
class Verification:
    """mismatches: number of wrong indices and wrong totals. cycles_over_model: simulated cycles divided by
    the cycles that the latencies in ``TreeShape`` predict."""

    updates: int
    samples: int
    mismatches: int
    cycles: int
    cycles_over_model: float
    wall_seconds: float


def hazards(shape: TreeShape, count: int, generator: random.Random) -> list[tuple[int, int, int]]:
    """Updates (index, priority, row) to be made in consecutive cycles: random ones of any leaf, of the leaves
    of one node, and of a single leaf. Priorities include zero and the greatest value."""
    greatest = (1 << shape.width) - 1
    return [
        (
            generator.choice((generator.randrange(shape.leaves), generator.randrange(shape.fan_out), 3)),
            generator.choice((0, 1, generator.randrange(greatest + 1), greatest)),
            number % 256,
        )
        for number in range(count)
    ]


def verify(
    shape: TreeShape, operations: int, seed: int = 0, log: Callable[[str], None] = lambda line: None
) -> Verification:
    """Simulate ``operations`` updates and as many samples, in rounds of 2,000 updates and then 2,000 samples.
    After a round's updates the total is compared, and then the index of every sample, or that none is found
    if all priorities are zero."""
    generator, manager = random.Random(seed), SimulatedManager(shape)
    priorities = np.zeros(shape.leaves, np.int64)
    done = mismatches = modelled_cycles = 0
    began = time.monotonic()
    while done < operations:
        count = min(2_000, operations - done)
        updates = hazards(shape, count, generator)
        manager.run(updates, ())
        modelled_cycles += count + shape.update_latency + 1
        for index, priority, _ in updates:
            priorities[index] = priority
        total = int(priorities.sum())
        mismatches += manager.total != total
        uniforms = [generator.randrange(1 << UNIFORM_BITS) for _ in range(count)]
        masses = np.array([(u * total) >> UNIFORM_BITS for u in uniforms])
        expected = np.searchsorted(priorities.cumsum(), masses, side="right")
        drawn = manager.sample(uniforms)
        modelled_cycles += count + shape.sample_latency
        mismatches += sum(
            (index, found) != (int(expected_index), True) if total else found
            for (index, found, _), expected_index in zip(drawn, expected, strict=True)
        )
        done += count
        log(f"{done:,} updates and samples, {mismatches} mismatches, {manager.cycles:,} cycles")
    seconds = time.monotonic() - began
    return Verification(done, done, mismatches, manager.cycles, manager.cycles / modelled_cycles, seconds)
