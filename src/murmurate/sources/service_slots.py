"""Blocks of batches of a replay service, in slots of shared memory. Nothing here needs torch.

A slot is FREE before its first draw; then its state cycles: DRAWING (shards write their parts of each batch),
READY, USED (the learner has written the batches' TD errors, from which priorities follow). What is to be done
with a slot follows from the shared memory alone, so a sampler that is started again continues where its
predecessor was killed.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from dataclasses import dataclass
from typing import NamedTuple

from murmurate.replica.fence import fence

FREE, DRAWING, READY, USED = range(4)
_CACHE_LINE, _CELL = 64, 8  # bytes of a cache line, and of a cell (an int64)
_STATE, _NUMBER, _ERROR_BITS, _PARTS = range(4)  # a slot's cells; from _PARTS on, owner and mark of each part
NO_OWNER = -1  # owners are stored plus one, so that zeroed memory reads as this


class SlotRows(NamedTuple):
    """The rows of a slot from ``low`` up to but not including ``high``."""

    low: int
    high: int


@dataclass(frozen=True)
class SlotLayout:
    """slots: number of slots. block: number of batches in a slot, at most 32. batch: rows of a batch. parts:
    number of parts of each batch; each part is drawn from one shard. columns: (name, bytes of a row) of each
    column; one is called ``errors``."""

    slots: int
    block: int
    batch: int
    parts: int
    columns: tuple[tuple[str, int], ...]

    def rows(self, part: int, batch_index: int) -> SlotRows:
        """The rows of a part in the batch with that index in the block."""
        first = self.batch * batch_index
        return SlotRows(
            first + self.batch * part // self.parts, first + self.batch * (part + 1) // self.parts
        )

    def count(self, part: int) -> int:
        """Number of rows of a part in all batches of a block."""
        return self.block * (self.batch * (part + 1) // self.parts - self.batch * part // self.parts)

    @property
    def slot_cells(self) -> int:
        """Cells of a slot, rounded up to whole cache lines."""
        return _aligned(_CELL * (_PARTS + 2 * self.parts)) // _CELL

    def offsets(self) -> dict[str, int]:
        """Byte offset of each column, which holds the rows of all slots; "" is the end of the last column."""
        first = _CACHE_LINE + _CELL * self.slots * self.slot_cells
        sizes = [_aligned(size * self.block * self.batch) * self.slots for _, size in self.columns]
        return dict(zip([*dict(self.columns), ""], itertools.accumulate(sizes, initial=first), strict=True))

    @property
    def size_bytes(self) -> int:
        return self.offsets()[""]


class BatchSlots:
    """The slots of one sampler, shared with its learner and the shards.

    memory: ``layout.size_bytes`` bytes, zeros at first.
    """

    def __init__(self, memory: memoryview, layout: SlotLayout) -> None:
        self.memory, self.layout = memory, layout
        self._cells = memory[_CACHE_LINE : _CACHE_LINE + _CELL * layout.slots * layout.slot_cells].cast("q")
        self._header = memory[:_CACHE_LINE].cast("d")  # beta, alpha, number of shards, heartbeats
        self._width = layout.slot_cells
        self._offsets, self._sizes = layout.offsets(), dict(layout.columns)
        self._lock = threading.Lock()

    @classmethod
    def mapped(cls, descriptor: int, layout: SlotLayout) -> BatchSlots:
        return cls(memoryview(mmap.mmap(descriptor, layout.size_bytes)), layout)

    def bytes_of(self, column: str, slot: int, rows: SlotRows) -> memoryview:
        start, size = self.start(column, slot), self._sizes[column]
        return self.memory[start + size * rows.low : start + size * rows.high]

    def start(self, column: str, slot: int) -> int:
        """Where a slot's rows of a column begin, in bytes."""
        size = self._sizes[column] * self.layout.block * self.layout.batch
        return self._offsets[column] + _aligned(size) * slot

    # -- exponents, written by the learner ------------------------------------------------------------

    @property
    def exponents(self) -> tuple[float, float]:
        """(beta, alpha) for the next draws; a negative alpha leaves the shards' alpha unchanged."""
        return self._header[0], self._header[1]

    def set_exponents(self, beta: float, alpha: float) -> None:
        self._header[0], self._header[1] = beta, alpha

    # -- written by the sampler for its learner -------------------------------------------------------

    @property
    def shards(self) -> int:
        """Number of shards that the sampler is connected to."""
        return int(self._header[2])

    def set_shards(self, count: int) -> None:
        self._header[2] = count

    @property
    def beats(self) -> float:
        """Number of heartbeats so far."""
        return self._header[3]

    def beat(self) -> None:
        self._header[3] += 1

    # -- the states of a slot -------------------------------------------------------------------------

    def state(self, slot: int) -> int:
        return self._cells[slot * self._width + _STATE]

    def number(self, slot: int) -> int:
        """The number of the slot's current draw: 1, 2, ..."""
        return self._cells[slot * self._width + _NUMBER]

    def owner(self, slot: int, part: int) -> int:
        """The shard that the part was last requested from; negative before the first request, and if that
        shard has been replaced."""
        return self._cells[slot * self._width + _PARTS + 2 * part] + NO_OWNER

    def is_filled(self, slot: int, part: int) -> bool:
        """Whether the part has been written for the current draw."""
        return self.mark(slot, part) == self.number(slot)

    def is_complete(self, slot: int) -> bool:
        """Whether all parts have been written for the current draw."""
        cells, first = self._cells, slot * self._width
        number = cells[first + _NUMBER]
        return all(cells[first + _PARTS + 2 * part + 1] == number for part in range(self.layout.parts))

    def mark(self, slot: int, part: int) -> int:
        """The number of the draw that last filled the part."""
        return self._cells[slot * self._width + _PARTS + 2 * part + 1]

    def set_owner(self, slot: int, part: int, shard: int) -> None:
        self._cells[slot * self._width + _PARTS + 2 * part] = shard - NO_OWNER

    def begin(self, slot: int) -> None:
        """Begin the next draw (state DRAWING); the sampler does so after it has set the owners, and before it
        requests any part."""
        cells, first = self._cells, slot * self._width
        cells[first + _NUMBER] += 1
        cells[first + _ERROR_BITS] = 0
        fence(self._lock)
        cells[first + _STATE] = DRAWING

    def fill(self, slot: int, part: int, draw_number: int) -> None:
        """Mark a part as filled by this draw. The shard does so once the rows are written, or, for a shard on
        another host, the thread that receives them."""
        fence(self._lock)
        self._cells[slot * self._width + _PARTS + 2 * part + 1] = draw_number
        fence(self._lock)

    def finish(self, slot: int) -> bool:
        """Set the state READY if all parts are filled; returns whether they are. The sampler does so."""
        if not self.is_complete(slot):
            return False
        fence(self._lock)
        self._cells[slot * self._width + _STATE] = READY
        return True

    def release(self, slot: int, error_bits: int) -> None:
        """Set the state USED; the learner does so after it has written errors. error_bits: a bit for each
        batch, set if it has errors."""
        self._cells[slot * self._width + _ERROR_BITS] = error_bits
        fence(self._lock)
        self._cells[slot * self._width + _STATE] = USED

    def error_bits(self, slot: int) -> int:
        """A bit for each batch of the last draw, set if the batch has errors; ``begin`` clears all bits."""
        return self._cells[slot * self._width + _ERROR_BITS]


def _aligned(size: int) -> int:
    return -(-size // _CACHE_LINE) * _CACHE_LINE
