"""Compares the simulated hardware with exact prefix sums, over many operations, including pipeline hazards,
and with what it promises while updates are in flight."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from murmurate.fpga.shape import MULTIPLY_CYCLES, UNIFORM_BITS, TreeShape
from murmurate.fpga.simulation import SimulatedManager


@dataclass(frozen=True)
class Verification:
    """mismatches: number of wrong indices and wrong totals. together: how many of the updates, and of the
    samples, were made in the same cycles. cycles_over_model: simulated cycles divided by the cycles that the
    latencies in ``TreeShape`` predict."""

    updates: int
    samples: int
    together: int
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
    """Simulate ``operations`` updates and as many samples, in rounds of 1,000 updates, 1,000 samples, and
    then 1,000 of both in the same cycles.

    After a round's first updates the total is compared, and then the index of every sample, or that none is
    found if all priorities are zero. Of samples in the same cycles as updates, it counts as a mismatch if the
    priority of the index was zero when it was read, and the total is compared at the end.
    """
    generator, manager = random.Random(seed), SimulatedManager(shape)
    priorities = np.zeros(shape.leaves, np.int64)
    done = together = mismatches = modelled_cycles = 0
    began = time.monotonic()

    def uniforms(count: int) -> list[int]:
        return [generator.randrange(1 << UNIFORM_BITS) for _ in range(count)]

    while done < operations:
        both = min(2_000, operations - done) // 2
        count = min(2_000, operations - done) - both
        updates = hazards(shape, count, generator)
        manager.run(updates, ())
        modelled_cycles += count + shape.update_latency + 1
        for index, priority, _ in updates:
            priorities[index] = priority
        total = int(priorities.sum())
        mismatches += manager.total != total
        given = uniforms(count)
        masses = np.array([(u * total) >> UNIFORM_BITS for u in given])
        expected = np.searchsorted(priorities.cumsum(), masses, side="right")
        drawn = manager.sample(given)
        modelled_cycles += count + shape.sample_latency
        mismatches += sum(
            (index, found) != (int(expected_index), True) if total else found
            for (index, found, _), expected_index in zip(drawn, expected, strict=True)
        )
        if both:
            updates = hazards(shape, both, generator)
            drawn = manager.run(updates, uniforms(both))
            modelled_cycles += both + max(shape.update_latency + 1, shape.sample_latency)
            mismatches += zero_when_read(shape, priorities, updates, drawn)
            mismatches += manager.total != int(priorities.sum())
        done, together = done + count + both, together + both
        log(f"{done:,} updates and samples, {mismatches} mismatches, {manager.cycles:,} cycles")
    seconds = time.monotonic() - began
    over_model = manager.cycles / modelled_cycles
    return Verification(done, done, together, mismatches, manager.cycles, over_model, seconds)


def zero_when_read(
    shape: TreeShape,
    priorities: np.ndarray,
    updates: Sequence[tuple[int, int, int]],
    drawn: Sequence[tuple[int, bool, int]],
) -> int:
    """Number of indices in ``drawn`` (index, found, row) whose priority was zero when the leaves were read.

    priorities: [N], those before; they become those after all of ``updates`` (index, priority, row). The
    first update and the first sample were accepted in the same cycle, and one of each in every cycle after
    it, so that each sample reads the updates that were accepted up to ``ahead`` cycles after it.
    """
    leaf = shape.levels - 1
    reads = MULTIPLY_CYCLES + sum(shape.sample_level_cycles(level) for level in range(leaf))
    ahead = reads - shape.update_level_cycles(leaf)
    zeros, to_come = 0, iter(updates)
    for number, (index, found, _) in enumerate(drawn):
        for changed, priority, _ in islice(to_come, 1 if number else 1 + ahead):
            priorities[changed] = priority
        zeros += found and not priorities[index]
    for changed, priority, _ in to_come:
        priorities[changed] = priority
    return zeros
