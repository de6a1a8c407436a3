"""The simulated hardware finds what prefix sums say, whatever was updated, in as many cycles as said."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

pytest.importorskip("amaranth", reason="needs murmurate[fpga]")

from murmurate.errors import Refusal
from murmurate.fpga.shape import MULTIPLY_CYCLES, UNIFORM_BITS, TreeShape
from murmurate.fpga.simulation import SimulatedManager
from murmurate.fpga.verify import hazards, verify, zero_when_read

SHAPES = [TreeShape(16, 2, 8), TreeShape(64, 4, 16), TreeShape(128, 4, 16), TreeShape(512, 16, 12)]


def find(priorities: list[int], uniform: int) -> int:
    """The least index whose prefix sum is above the mass."""
    mass = (uniform * sum(priorities)) >> UNIFORM_BITS
    return next(i for i, total in enumerate(itertools.accumulate(priorities)) if total > mass)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_are_those_of_prefix_sums(shape: TreeShape) -> None:
    generator = random.Random(shape.leaves)
    manager = SimulatedManager(shape, row_bits=8)
    priorities, rows = [0] * shape.leaves, [0] * shape.leaves
    for _ in range(2):
        updates = hazards(shape, 100, generator)
        manager.run(updates, ())
        for index, priority, row in updates:
            priorities[index], rows[index] = priority, row
        assert manager.total == sum(priorities)
        uniforms = [0, (1 << UNIFORM_BITS) - 1, *(generator.randrange(1 << UNIFORM_BITS) for _ in range(50))]
        expected = [(i, True, rows[i]) for i in (find(priorities, u) for u in uniforms)]
        assert manager.sample(uniforms) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cycles_are_those_of_the_model(shape: TreeShape) -> None:
    manager = SimulatedManager(shape)
    manager.update(range(16), [1] * 16)
    assert manager.total == 16
    for count in (1, 50):
        before = manager.cycles
        manager.sample(list(range(count)))
        assert manager.cycles - before == count + shape.sample_latency
    manager._updates.append((0, 5, 0))
    manager._run(shape.update_latency)
    assert manager.total == 16
    manager._run(1)
    assert manager.total == 20


def test_a_tree_of_zeros_has_nothing_to_draw() -> None:
    manager = SimulatedManager(TreeShape(64, 4, 16))
    assert [found for _, found, _ in manager.sample([0, 5, 1 << 20])] == [False] * 3
    manager.update([9], [7])
    assert manager.sample([0, 1 << 23]) == [(9, True, 0)] * 2


def test_updates_in_flight_never_give_a_leaf_that_was_always_zero() -> None:
    shape, generator = TreeShape(64, 4, 16), random.Random(4)
    manager = SimulatedManager(shape)
    used = [i for i in range(shape.leaves) if i % 3]
    manager.update(used, [100] * len(used))
    updates = [(generator.choice(used), generator.randrange(1 << 16), 0) for _ in range(700)]
    uniforms = [generator.randrange(1 << UNIFORM_BITS) for _ in range(700)]
    drawn = manager.run(updates, uniforms)
    assert all(found for _, found, _ in drawn)
    assert all(index in used for index, _, _ in drawn)


@pytest.mark.parametrize("wrong", [(100, 4, 16), (64, 3, 16), (4, 4, 16), (64, 4, 1), (1 << 40, 4, 16)])
def test_shapes_that_hardware_has_not_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(Refusal):
        TreeShape(*wrong)


def test_memories_that_lie_far_apart_have_a_register_more(monkeypatch: pytest.MonkeyPatch) -> None:
    near = TreeShape(64, 4, 16).sample_latency
    monkeypatch.setattr("murmurate.fpga.shape.FAR_WORDS", 16)
    shape = TreeShape(64, 4, 16)
    assert shape.sample_latency == near + 1
    found = verify(shape, 150)
    assert (found.mismatches, found.cycles_over_model) == (0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_single_operations_take_the_cycles_of_the_model(seed: int) -> None:
    found = verify(TreeShape(64, 4, 16), 1, seed)  # a priority of zero is among them
    assert (found.mismatches, found.cycles_over_model) == (0, 1)


@pytest.mark.slow
def test_400_000_operations_with_hazards_have_no_mismatch() -> None:
    found = verify(TreeShape(4096, 4, 16), 400_000)
    assert (found.mismatches, found.samples, found.together) == (0, 400_000, 200_000)
    assert found.cycles_over_model == pytest.approx(1, abs=0.01)


def test_a_verification_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify(TreeShape(64, 4, 16), 300)
    assert (right.mismatches, right.cycles_over_model) == (0, 1)
    monkeypatch.setattr(SimulatedManager, "sample", lambda self, u: [(0, True, 0)] * len(u))
    assert verify(TreeShape(64, 4, 16), 300).mismatches > 100


def test_samples_beside_updates_have_priorities_that_were_not_zero_when_they_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = SHAPES[0]
    assert verify(shape, 400).mismatches == 0
    # as if the leaves were read two cycles earlier
    monkeypatch.setattr("murmurate.fpga.verify.MULTIPLY_CYCLES", MULTIPLY_CYCLES - 2)
    assert verify(shape, 400).mismatches > 0


def test_an_index_counts_by_the_updates_that_were_written_when_its_leaf_was_read() -> None:
    shape = TreeShape(16, 4, 8)
    ahead = MULTIPLY_CYCLES + shape.sample_level_cycles(0) - shape.update_level_cycles(1)
    updates = [(5, 0 if number == ahead + 1 else 9, 0) for number in range(ahead + 4)]
    priorities = np.ones(16, np.int64)
    wrong = [zero_when_read(shape, priorities.copy(), updates, [(5, True, 0)] * n) for n in (1, 2, 3)]
    assert wrong == [0, 1, 1]
    assert zero_when_read(shape, priorities, updates, [(5, False, 0)] * 3) == 0
    assert priorities[5] == 9
