"""Shared memory between a learner and the processes that decode its images. Nothing here needs torch.

There are a few slots, each for one mini-batch. The learner writes into a slot which images to decode, and the
processes write the pixels into the slot: process w of W decodes the images w, w + W, w + 2 W, ... No lock is
needed, as each counter has one writer: the learner counts the batches assigned, each process those it has
done.
"""

from __future__ import annotations

import math
import mmap
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.replica.fence import fence

_PAGE = mmap.ALLOCATIONGRANULARITY
_LINE_CELLS = 8  # int64 values in a cache line
_LONGEST_PATH = 4096
# of each image: its pass (epoch) and number, its place in a file, and where the file's path ends in "paths"
_TASK = np.dtype([("pass", "i8"), ("number", "i8"), ("offset", "i8"), ("size", "i8"), ("end", "i8")])
# of each image: why it could not be decoded, if so; and whether it must be skipped, as processes died at it
_RESULT = np.dtype([("cause", "S40"), ("detail", "S200"), ("left_out", "?")])


@dataclass(frozen=True)
class MemoryLayout:
    """slots: number of mini-batches in memory at once. batch: number of images in a mini-batch. shape:
    (H, W, C) of an image. workers: number of processes that decode."""

    slots: int
    batch: int
    shape: tuple[int, int, int]
    workers: int

    @property
    def pixel_bytes(self) -> int:
        return self.slots * self.batch * math.prod(self.shape)

    def _regions(self) -> tuple[tuple[str, tuple[int, ...], Any], ...]:
        """(name, shape, dtype) of each array in the file."""
        per_image = (self.slots, self.batch)
        return (
            ("counters", (1 + self.workers, _LINE_CELLS), np.int64),
            ("tasks", per_image, _TASK),
            ("paths", (self.slots, self.batch * _LONGEST_PATH), np.uint8),
            ("results", per_image, _RESULT),
            ("pixels", (*per_image, *self.shape), np.uint8),
        )

    @property
    def size_bytes(self) -> int:
        """The size of the file. Most of the space for paths is never written, and takes no memory."""
        return sum(_padded_bytes(shape, dtype) for _, shape, dtype in self._regions())


class BatchMemory:
    """The slots, in a file of ``layout.size_bytes`` bytes that the learner and the processes have open."""

    def __init__(self, descriptor: int, layout: MemoryLayout) -> None:
        self.layout = layout
        self._lock = threading.Lock()
        mapped = memoryview(mmap.mmap(descriptor, layout.size_bytes, flags=mmap.MAP_SHARED))
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, shape, dtype in layout._regions():
            count = math.prod(shape)
            arrays[name] = np.frombuffer(mapped, dtype, count, offset).reshape(shape)
            offset += _padded_bytes(shape, dtype)
        # First the number of assigned batches; then, in a cache line for each process, the number of batches
        # of which it has decoded its part, and 1 + position of the image that it is decoding, or 0 for none.
        # They are polled often: reading them through a memoryview is several times as fast as through numpy.
        self._counters = mapped[: (1 + layout.workers) * _LINE_CELLS * 8].cast("q")
        self._tasks, self._paths, self.results = arrays["tasks"], arrays["paths"], arrays["results"]
        self.pixels: NDArray[np.uint8] = arrays["pixels"]  # [slots, batch, H, W, C]

    # -- the learner's side -------------------------------------------------------------------------

    @property
    def assigned(self) -> int:
        """Number of batches assigned to the processes so far."""
        return self._counters[0]

    def assign(
        self, passes: NDArray[np.int64], numbers: NDArray[np.int64], places: list[tuple[str, int, int]]
    ) -> None:
        """Assign the next batch; each image has a pass, a number and a place (path, offset, size)."""
        slot = self.assigned % self.layout.slots
        tasks = self._tasks[slot]
        paths = [path.encode("utf-8", "surrogateescape") for path, _, _ in places]
        tasks["pass"], tasks["number"] = passes, numbers
        tasks["offset"], tasks["size"] = [p[1] for p in places], [p[2] for p in places]
        tasks["end"] = np.cumsum([len(path) for path in paths])
        joined_paths = np.frombuffer(b"".join(paths), np.uint8)
        self._paths[slot, : len(joined_paths)] = joined_paths
        self.results[slot] = np.zeros((), _RESULT)
        fence(self._lock)
        self._counters[0] += 1

    def is_decoded(self, batch: int) -> bool:
        """Whether all processes have decoded their parts of a batch."""
        if any(self._counters[_LINE_CELLS * (1 + w)] <= batch for w in range(self.layout.workers)):
            return False
        fence(self._lock)
        return True

    def done(self, worker: int) -> int:
        """Number of batches of which the process has decoded its part."""
        return self._counters[_LINE_CELLS * (1 + worker)]

    def current(self, worker: int) -> int | None:
        """Position, in its batch, of the image that the process is decoding; None if it decodes none."""
        position = self._counters[_LINE_CELLS * (1 + worker) + 1]
        return position - 1 if position else None

    # -- the decoding process's side ----------------------------------------------------------------

    def has_work(self, worker: int) -> bool:
        """Whether a batch is assigned of which the process has not decoded its part."""
        if self.assigned <= self.done(worker):
            return False
        fence(self._lock)
        return True

    def task(self, slot: int, position: int) -> tuple[str, int, int]:
        """(path, offset, size) of an image."""
        tasks = self._tasks[slot]
        first = int(tasks["end"][position - 1]) if position else 0
        encoded_path = self._paths[slot, first : int(tasks["end"][position])].tobytes()
        path = encoded_path.decode("utf-8", "surrogateescape")
        return path, int(tasks["offset"][position]), int(tasks["size"][position])

    def keys(self, slot: int, positions: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(passes, numbers) of the images at these positions."""
        tasks = self._tasks[slot][positions]
        return tasks["pass"], tasks["number"]

    def begin(self, worker: int, position: int) -> None:
        """Note which image the process decodes now; ``position`` -1: none, as the learner notes for a process
        that it starts again."""
        self._counters[_LINE_CELLS * (1 + worker) + 1] = position + 1

    def finish(self, worker: int) -> None:
        """Note that the process has decoded its part of a batch."""
        fence(self._lock)
        self._counters[_LINE_CELLS * (1 + worker) + 1] = 0
        self._counters[_LINE_CELLS * (1 + worker)] += 1


def _padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Size of an array in bytes, rounded up to whole pages."""
    size: int = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // _PAGE) * _PAGE
