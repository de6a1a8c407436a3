"""Which part holds which rectangle of an image, and which rectangles an operation needs from others.

Rows and columns are the last two dimensions of a tensor. Intervals are half open, in pixels of the whole
image.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from murmurate.errors import Refusal

Interval = tuple[int, int]


class Rect(NamedTuple):
    """The pixels in an interval of rows and an interval of columns."""

    rows: Interval
    columns: Interval

    @property
    def is_empty(self) -> bool:
        return self.rows[0] >= self.rows[1] or self.columns[0] >= self.columns[1]

    @property
    def sizes(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def intersection(self, other: Rect) -> Rect:
        """The pixels in both; may be empty."""
        return Rect(common(self.rows, other.rows), common(self.columns, other.columns))

    def contains(self, other: Rect) -> bool:
        return self.intersection(other) == other

    def slices(self, frame: Rect) -> tuple[Any, ...]:
        """The index of this rectangle in a tensor that holds ``frame``."""
        (top, bottom), (left, right) = self
        row, column = frame.rows[0], frame.columns[0]
        return ..., slice(top - row, bottom - row), slice(left - column, right - column)


def common(a: Interval, b: Interval) -> Interval:
    """The intersection of two intervals; empty ones end where they start, or before."""
    return max(a[0], b[0]), min(a[1], b[1])


@dataclass(frozen=True)
class Layout:
    """The rectangles of all parts of one tensor, which form a grid; parts are numbered row by row.

    rows, columns: boundaries, from 0 to the size of the image: the parts in row i of the grid have the
    image's rows from ``rows[i]`` to ``rows[i + 1]``, and likewise for columns.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.rows) - 1, len(self.columns) - 1

    @property
    def whole(self) -> Rect:
        return Rect((0, self.rows[-1]), (0, self.columns[-1]))

    @property
    def sizes(self) -> tuple[int, int]:
        """(rows, columns) of the whole image."""
        return self.rows[-1], self.columns[-1]

    def rect(self, part: int) -> Rect:
        return _rects(self)[part]

    def intervals(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """(the image's rows of each row of the grid, the image's columns of each column of the grid)."""
        return _intervals(self.rows), _intervals(self.columns)


def _intervals(bounds: Sequence[int]) -> tuple[Interval, ...]:
    return tuple(itertools.pairwise(bounds))


@functools.lru_cache(maxsize=1 << 12)
def _rects(layout: Layout) -> tuple[Rect, ...]:
    rows, columns = layout.intervals()
    return tuple(Rect(r, c) for r in rows for c in columns)


@functools.lru_cache(maxsize=1 << 12)
def balanced(sizes: tuple[int, int], grid: tuple[int, int]) -> Layout:
    """``sizes`` (rows, columns) in ``grid`` parts of nearly equal size.

    Raises Refusal if there are more parts than rows or columns.
    """
    for size, parts, what in zip(sizes, grid, ("rows", "columns"), strict=True):
        if size < parts:
            raise Refusal(
                f"{parts} parts cannot share {size} {what} (of {sizes[0]} x {sizes[1]}): use fewer parts, or "
                "a larger image"
            )
    rows, columns = (
        tuple(size * i // parts for i in range(parts + 1)) for size, parts in zip(sizes, grid, strict=True)
    )
    return Layout(rows, columns)


@dataclass(frozen=True)
class Plan:
    """What one part sends and receives so that every part gets its window.

    own: the rectangle that it holds. window: the rectangle that it needs, which may reach beyond the image.
    image: the whole image. outgoing, incoming: (other part, rectangle) to send and to receive, by ascending
    part.
    is_trivial: whether every part needs exactly what it holds.
    """

    own: Rect
    window: Rect
    image: Rect
    outgoing: tuple[tuple[int, Rect], ...]
    incoming: tuple[tuple[int, Rect], ...]
    is_trivial: bool


@functools.lru_cache(maxsize=1 << 12)
def plan(layout: Layout, rows: tuple[Interval, ...], columns: tuple[Interval, ...], part: int) -> Plan:
    """The plan of ``part``. rows, columns: the image's rows that each row of the grid needs, and the image's
    columns that each column of the grid needs."""
    windows = [Rect(r, c) for r in rows for c in columns]
    owned = _rects(layout)
    outgoing = [(q, owned[part].intersection(window)) for q, window in enumerate(windows) if q != part]
    incoming = [(q, windows[part].intersection(rect)) for q, rect in enumerate(owned) if q != part]
    return Plan(
        owned[part],
        windows[part],
        layout.whole,
        tuple((q, rect) for q, rect in outgoing if not rect.is_empty),
        tuple((q, rect) for q, rect in incoming if not rect.is_empty),
        all(window == rect for window, rect in zip(windows, owned, strict=True)),
    )
