"""The slots of a sampler: their way round, and where their rows lie."""

from __future__ import annotations

import os

import numpy as np
import pytest

from murmurate.sources.service_slots import DRAWING, FREE, READY, USED, BatchSlots, SlotLayout

LAYOUT = SlotLayout(slots=3, block=2, batch=7, parts=3, columns=(("keys", 8), ("errors", 4), ("seen", 5)))


def test_rows_of_all_slots_batches_and_parts_are_apart_and_fill_the_columns() -> None:
    slots = BatchSlots(memoryview(bytearray(LAYOUT.size_bytes)), LAYOUT)
    written = 0
    for name, _ in LAYOUT.columns:
        for slot in range(LAYOUT.slots):
            for part in range(LAYOUT.parts):
                for number in range(LAYOUT.block):
                    rows = slots.bytes_of(name, slot, LAYOUT.rows(part, number))
                    assert not any(rows), "nothing else has been written there"
                    rows[:] = b"\1" * len(rows)
                    written += len(rows)
            assert slots.start(name, slot) % 64 == 0
    assert written == LAYOUT.slots * LAYOUT.block * LAYOUT.batch * sum(size for _, size in LAYOUT.columns)
    assert sum(slots.memory) == written, "and no cell of a slot"
    assert sum(LAYOUT.count(part) for part in range(LAYOUT.parts)) == LAYOUT.block * LAYOUT.batch


def test_a_slot_goes_round_in_two_mappings_alike() -> None:
    descriptor = os.memfd_create("slots")
    os.ftruncate(descriptor, LAYOUT.size_bytes)
    sampler, other = BatchSlots.mapped(descriptor, LAYOUT), BatchSlots.mapped(descriptor, LAYOUT)
    os.close(descriptor)
    for turn in (1, 2):
        assert other.state(1) == (FREE if turn == 1 else USED)
        for part in range(LAYOUT.parts):
            sampler.set_owner(1, part, part + turn)
        sampler.begin(1)
        assert (other.state(1), other.number(1), other.error_bits(1)) == (DRAWING, turn, 0)
        assert [other.owner(1, part) for part in range(3)] == [turn, turn + 1, turn + 2]
        for part in (2, 0, 1):
            assert not sampler.finish(1)
            assert not sampler.is_filled(1, part)
            other.fill(1, part, turn)
        assert sampler.finish(1)
        assert other.state(1) == READY
        other.release(1, error_bits=0b10)
        assert sampler.error_bits(1) == 0b10
    assert [sampler.state(slot) for slot in range(3)] == [FREE, USED, FREE]
    assert [sampler.owner(0, part) for part in range(3)] == [-1, -1, -1]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 64])
def test_parts_divide_a_batch_as_equally_as_can_be(parts: int) -> None:
    layout = SlotLayout(slots=1, block=1, batch=64, parts=parts, columns=(("keys", 8),))
    sizes = np.diff([layout.rows(part, 0).low for part in range(parts)] + [64])
    assert sizes.sum() == 64
    assert sizes.max() - sizes.min() <= 1
