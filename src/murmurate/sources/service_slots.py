"""Blocks of batches of a replay service, in slots of shared memory. Nothing here needs torch.

A slot's state cycles: FREE, DRAWING (shards write their parts of each batch), READY, USED (the learner has
written the errors). What is to be done with a slot follows from the memory alone, so a sampler that is
started again continues where its predecessor was killed.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from dataclasses import dataclass
from typing import NamedTuple

from murmurate.fabric.processes.fence import fence

FREE, DRAWING, READY, USED = range(4)
_LINE, _CELL = 64, 8  # bytes
_STATE, _NUMBER, _HAS_ERRORS, _PARTS = range(4)  # cells of a slot; then owner and mark of each part
_NO_OWNER = -1


class Rows(NamedTuple):
    """The rows from low up to but not including high of a slot."""

    low: int
    high: int


@dataclass(frozen=True)
class SlotLayout:
    """block: batches in a slot, at most 32. parts: number of parts of each batch; each is drawn from one
    shard. columns: (name, bytes of a row); one is called ``errors``."""

    slots: int
    block: int
    batch: int
    parts: int
    columns: tuple[tuple[str, int], ...]

    def rows(self, part: int, number: int) -> Rows:
        """The rows of a part in batch ``number`` of the block."""
        first = self.batch * number
        return Rows(first + self.batch * part // self.parts, first + self.batch * (part + 1) // self.parts)

    def count(self, part: int) -> int:
        """Rows of a part in all batches of a block."""
        return self.block * (self.batch * (part + 1) // self.parts - self.batch * part // self.parts)

    @property
    def slot_cells(self) -> int:
        """Cells of a slot, rounded up to whole cache lines."""
        return _aligned(_CELL * (_PARTS + 2 * self.parts)) // _CELL

    def offsets(self) -> dict[str, int]:
        """Where each column of all slots begins; "" is the end."""
        begins = _LINE + _CELL * self.slots * self.slot_cells
        sizes = [_aligned(size * self.block * self.batch) * self.slots for _, size in self.columns]
        return dict(zip([*dict(self.columns), ""], itertools.accumulate(sizes, initial=begins), strict=True))

    @property
    def size_bytes(self) -> int:
        return self.offsets()[""]


class BatchSlots:
    """The slots of one sampler, shared with its learner and the shards.

    memory: ``layout.size_bytes`` bytes, zeros at first.
    """

    def __init__(self, memory: memoryview, layout: SlotLayout) -> None:
        self.memory, self.layout = memory, layout
        self._cells = memory[_LINE : _LINE + _CELL * layout.slots * layout.slot_cells].cast("q")
        self._floats = memory[:_LINE].cast("d")
        self._width = layout.slot_cells
        self._offsets, self._sizes = layout.offsets(), dict(layout.columns)
        self._lock = threading.Lock()

    @classmethod
    def mapped(cls, descriptor: int, layout: SlotLayout) -> BatchSlots:
        return cls(memoryview(mmap.mmap(descriptor, layout.size_bytes)), layout)

    def bytes_of(self, column: str, slot: int, rows: Rows) -> memoryview:
        start, size = self.start(column, slot), self._sizes[column]
        return self.memory[start + size * rows.low : start + size * rows.high]

    def start(self, column: str, slot: int) -> int:
        """Where a slot's rows of a column begin, in bytes."""
        size = self._sizes[column] * self.layout.block * self.layout.batch
        return self._offsets[column] + _aligned(size) * slot

    # -- exponents, written by the learner ------------------------------------------------------------

    @property
    def exponents(self) -> tuple[float, float]:
        """(beta, alpha) for the next draws; a negative alpha leaves the shards' unchanged."""
        return self._floats[0], self._floats[1]

    def set_exponents(self, beta: float, alpha: float) -> None:
        self._floats[0], self._floats[1] = beta, alpha

    # -- written by the sampler for its learner -------------------------------------------------------

    @property
    def shards(self) -> int:
        """Number of shards that the sampler is connected to."""
        return int(self._floats[2])

    def set_shards(self, count: int) -> None:
        self._floats[2] = count

    @property
    def beats(self) -> float:
        return self._floats[3]

    def beat(self) -> None:
        self._floats[3] += 1

    # -- the states of a slot -------------------------------------------------------------------------

    def state(self, slot: int) -> int:
        return self._cells[slot * self._width + _STATE]

    def number(self, slot: int) -> int:
        """The number of the slot's present draw: 1, 2, ..."""
        return self._cells[slot * self._width + _NUMBER]

    def owner(self, slot: int, part: int) -> int:
        """The shard that the part was last requested from; negative before the first request."""
        return self._cells[slot * self._width + _PARTS + 2 * part] + _NO_OWNER

    def is_filled(self, slot: int, part: int) -> bool:
        """Whether the part of the present draw has been written."""
        return self.mark(slot, part) == self.number(slot)

    def is_complete(self, slot: int) -> bool:
        cells, at = self._cells, slot * self._width
        number = cells[at + _NUMBER]
        return all(cells[at + _PARTS + 2 * part + 1] == number for part in range(self.layout.parts))

    def mark(self, slot: int, part: int) -> int:
        """The number of the draw that last filled the part."""
        return self._cells[slot * self._width + _PARTS + 2 * part + 1]

    def set_owner(self, slot: int, part: int, shard: int) -> None:
        self._cells[slot * self._width + _PARTS + 2 * part] = shard - _NO_OWNER

    def begin(self, slot: int) -> None:
        """DRAWING, set by the sampler after the owners are set and before any part is requested."""
        cells, at = self._cells, slot * self._width
        cells[at + _NUMBER] += 1
        cells[at + _HAS_ERRORS] = 0
        fence(self._lock)
        cells[at + _STATE] = DRAWING

    def fill(self, slot: int, part: int, number: int) -> None:
        """Mark a part as filled: by the shard, or by the bridge from it, once the rows are written."""
        fence(self._lock)
        self._cells[slot * self._width + _PARTS + 2 * part + 1] = number
        fence(self._lock)

    def finish(self, slot: int) -> bool:
        """READY, set by the sampler if all parts are filled; returns whether they are."""
        if not self.is_complete(slot):
            return False
        fence(self._lock)
        self._cells[slot * self._width + _STATE] = READY
        return True

    def release(self, slot: int, has_errors: int) -> None:
        """USED, set by the learner after it has written the errors. has_errors: a bit for each batch."""
        self._cells[slot * self._width + _HAS_ERRORS] = has_errors
        fence(self._lock)
        self._cells[slot * self._width + _STATE] = USED

    def has_errors(self, slot: int) -> int:
        """A bit for each batch of the former draw that has errors; cleared by ``begin``."""
        return self._cells[slot * self._width + _HAS_ERRORS]


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE
