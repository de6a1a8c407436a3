"""Transitions of small observations: one packed row each, so that reading a transition is one cache miss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate import buffers, native
from murmurate.replay.async_copy import AsyncCopy
from murmurate.replay.memory import Allocate, array, private
from murmurate.replay.returns import Integers
from murmurate.spec import Shapes

Bytes = npt.NDArray[np.uint8]

_LINE_BYTES = 64


class Column(NamedTuple):
    """A field of a transition: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _ByteRange(NamedTuple):
    """Where a row holds a column."""

    offset: int
    bytes: int


class RowStore:
    """``capacity`` rows of named columns, in memory from ``allocate``.

    Rows are padded to whole cache lines, or, if shorter than one line, to a power of two of bytes.
    """

    def __init__(self, capacity: int, columns: Mapping[str, Column], allocate: Allocate = private) -> None:
        if capacity < 1:
            raise ValueError(f"a store holds at least one transition, not {capacity}")
        self.capacity, self.columns = capacity, dict(columns)
        self._ranges: dict[str, _ByteRange] = {}
        end = 0
        # widest dtype first, so that every column is aligned without a gap
        for name, column in sorted(self.columns.items(), key=lambda item: -item[1].dtype.itemsize):
            size = int(np.prod(column.shape, dtype=np.int64)) * column.dtype.itemsize
            self._ranges[name] = _ByteRange(end, size)
            end += size
        self.row_bytes = _padded(end)
        self._bytes = array(allocate, "transitions", (capacity, self.row_bytes), np.uint8)
        self._rows = torch.from_numpy(self._bytes)
        self._address = self._rows.data_ptr()
        self._columns = {name: self._view(name) for name in self.columns}
        # for the kernel: offset and size of each column in a row
        self._fields = torch.tensor([*self._ranges.values()], dtype=torch.int64, device="cpu")
        self._fields_address = self._fields.data_ptr()

    def put(self, where: slice | Integers, values: Mapping[str, Bytes]) -> None:
        """Write values[name][b] to row where[b] for each column. values: the result of ``checked``."""
        for name, value in values.items():
            span = self._ranges[name]
            self._bytes[where, span.offset : span.offset + span.bytes] = value

    def checked(self, values: Mapping[str, Tensor], count: int) -> dict[str, Bytes]:
        """Each column's values [count, ...] as bytes [count, bytes]. Raises ValueError for values that are
        missing, or of a wrong shape or dtype."""
        return {name: self.as_bytes(name, self._checked(name, values, count)) for name in self.columns}

    def as_bytes(self, name: str, values: Tensor) -> Bytes:
        """A column's values [B, ...] as bytes [B, bytes], in the same memory if they are contiguous. Works
        for dtypes that numpy lacks."""
        flat: Bytes = buffers.as_bytes(values).numpy()
        return flat.reshape(values.shape[0], self._ranges[name].bytes)

    def _checked(self, name: str, values: Mapping[str, Tensor], count: int) -> Tensor:
        column = self.columns[name]
        if name not in values:
            raise ValueError(f"a transition has no '{name}': give {', '.join(self.columns)}")
        value = values[name]
        shape = (count, *column.shape)
        if tuple(value.shape) != shape or value.dtype != column.dtype:
            raise ValueError(
                f"'{name}' is {value.dtype} {list(value.shape)}, but this replay stores {column.dtype} "
                f"{list(shape)}"
            )
        return value

    def buffers(self, count: int, pinned: bool = False) -> dict[str, Tensor]:
        """Tensors [count, ...] for ``read`` to write into."""
        if pinned:
            return {
                name: torch.empty(count, *c.shape, dtype=c.dtype, device="cpu", pin_memory=True)
                for name, c in self.columns.items()
            }
        # new_empty is a third cheaper than torch.empty with dtype and device
        return {
            name: self._columns[name].new_empty((count, *column.shape))
            for name, column in self.columns.items()
        }

    def read(
        self, slots: Tensor, out: dict[str, Tensor] | None = None, copier: AsyncCopy | None = None
    ) -> dict[str, Tensor]:
        """Each column's values [B, ...] at ``slots`` [B] int64. With a copier they are complete after its
        ``wait``."""
        out = self.buffers(len(slots)) if out is None else out
        if native.kernels is None:
            rows = self._rows.index_select(0, slots)
            for name, span in self._ranges.items():
                column = self.columns[name]
                part = rows[:, span.offset : span.offset + span.bytes].contiguous()
                out[name].copy_(part.view(column.dtype).view(len(slots), *column.shape))
            return out
        if copier is not None:
            outputs = tuple([out[name] for name in self._ranges])
            copier.split(self._rows, self.row_bytes, slots, self._fields, outputs)
            return out
        native.kernels.split(
            self._address,
            self.row_bytes,
            slots.data_ptr(),
            len(slots),
            self._fields_address,
            tuple([out[name].data_ptr() for name in self._ranges]),
        )
        return out

    def column(self, name: str) -> Tensor:
        """A view of one column [capacity, ...]."""
        return self._columns[name]

    def _view(self, name: str) -> Tensor:
        column, span = self.columns[name], self._ranges[name]
        part = self._rows[:, span.offset : span.offset + span.bytes]
        return part.view(column.dtype).view(self.capacity, *column.shape)

    def save(self, count: int) -> Tensor:
        """A view of the first ``count`` rows: [count, row_bytes] uint8."""
        return self._rows[:count]

    def load(self, rows: Tensor) -> None:
        self._rows[: len(rows)].copy_(rows)


RECORDED = "behaviour."  # prefix of the columns of behaviour outputs


def recorded_columns(behaviour: Shapes) -> dict[str, Column]:
    return {RECORDED + name: Column(shape, torch.float32) for name, shape in behaviour.items()}


def pop_behaviour(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the recorded columns from ``values`` and return them."""
    names = [name for name in values if name.startswith(RECORDED)]
    return {name.removeprefix(RECORDED): values.pop(name) for name in names}


def _padded(size: int) -> int:
    """The next multiple of a cache line; below one line, the next power of two."""
    width = 8
    while width < _LINE_BYTES:
        if size <= width:
            return width
        width *= 2
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def numbers_as_bytes(numbers: npt.NDArray[Any]) -> Bytes:
    """Contiguous numbers [B] as bytes [B, bytes]; a view."""
    return numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)
