"""Operations that slide a kernel over an image: which pixels each part's outputs need."""

from __future__ import annotations

from dataclasses import dataclass

from murmurate.errors import Refusal
from murmurate.spatial.layout import Interval, Layout
from murmurate.spatial.parts import Parts
from murmurate.spatial.tensor import arranged_evenly

Pair = tuple[int, int]


@dataclass(frozen=True)
class Sliding:
    """A kernel along one axis. before, after: pixels of padding on either side of the image."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def reach(self) -> int:
        """Number of pixels from the first to the last that one output needs."""
        return self.dilation * (self.kernel - 1) + 1

    def count(self, size: int) -> int:
        """Number of outputs along an axis of ``size`` pixels; below 1 if the kernel does not fit."""
        return (size + self.before + self.after - self.reach) // self.stride + 1

    def inputs(self, outputs: Interval) -> Interval:
        """The pixels that ``outputs`` need, those of the padding included."""
        first, last = outputs[0], outputs[1] - 1
        return first * self.stride - self.before, last * self.stride - self.before + self.reach


Kernel = tuple[Sliding, Sliding]  # along rows, along columns


def outputs_of(kernel: Kernel, arrangement: Layout, parts: Parts) -> Layout:
    """The layout of the outputs. Raises Refusal if the kernel does not fit, or if there are more parts than
    outputs along an axis."""
    rows, columns = (axis.count(size) for axis, size in zip(kernel, arrangement.sizes, strict=True))
    if rows < 1 or columns < 1:
        raise Refusal(
            f"a kernel that reaches over {kernel[0].reach} x {kernel[1].reach} pixels does not fit an image "
            f"of {arrangement.sizes[0]} x {arrangement.sizes[1]} and its padding{parts.where}"
        )
    return arranged_evenly((rows, columns), parts)


def needed_inputs(kernel: Kernel, outputs: Layout) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """(the image's rows that each row of the grid needs for its outputs, the columns that each column
    needs)."""
    rows, columns = outputs.intervals()
    return tuple(kernel[0].inputs(r) for r in rows), tuple(kernel[1].inputs(c) for c in columns)


def pair(value: int | tuple[int, ...] | list[int]) -> Pair:
    """(along rows, along columns), from torch's one or two numbers."""
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
