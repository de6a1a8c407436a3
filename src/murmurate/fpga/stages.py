"""Stages of the learner's pipeline: a tensor unit, and the tiles that it works on one after another.

Each reads a row of its inputs from a memory that the stage before fills, as soon as the row is complete,
and once for every tile. A row that is read arrives one cycle after its address. Cycles are those of
``learner_model``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from amaranth.hdl import Array, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.data import ArrayLayout
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import In, Out

from murmurate.fpga.fixed_point import OPERAND_BITS
from murmurate.fpga.learner_model import Unit
from murmurate.fpga.tensor_unit import OuterUnit, TensorUnit


def row_address(rows: int) -> int:
    """Bits of the address of one of ``rows`` rows, at least 1."""
    return max(1, (rows - 1).bit_length())


class _Stage(wiring.Component):
    """What both stages have: a unit of R x C, M rows of inputs, a matrix of K x N in tiles, and ports."""

    def __init__(
        self, m: int, k: int, n: int, unit: Unit, accumulator_bits: int, ports: dict[str, Any]
    ) -> None:
        self.m, self.k, self.n, self.unit, self.bits = m, k, n, unit, accumulator_bits
        self.row_tiles, self.column_tiles = math.ceil(k / unit.rows), math.ceil(n / unit.columns)
        shared = {
            "start": In(1),
            "available": In(range(m + 1)),
            "row": Out(row_address(m)),
            "valid": Out(1),
            "sums": Out(ArrayLayout(signed(accumulator_bits), unit.columns)),
            "sums_tile": Out(range(self.column_tiles)),
        }
        super().__init__(shared | ports)


class ProductStage(_Stage):
    """FW or BW of a layer: [M, K] @ [K, N] by a ``TensorUnit`` of R x C.

    Tiles of the matrix follow one another from the top to the bottom, then from the left to the right.
    The sums of a tile wait in a queue for the tile below it, as its partial sums. Parts of a tile outside
    of the matrix are 0.

    start: begin, by loading the first tile. available: how many rows of inputs are complete. weight_row,
    weights: address and contents of a row of the matrix. row, x: address and contents of a row of inputs.
    valid: ``sums`` holds C of the results of row ``sums_row``, those from column C * ``sums_tile``
    on.
    """

    def __init__(self, m: int, k: int, n: int, unit: Unit, accumulator_bits: int) -> None:
        ports = {
            "weight_row": Out(row_address(k)),
            "weights": In(ArrayLayout(signed(OPERAND_BITS), n)),
            "x": In(ArrayLayout(signed(OPERAND_BITS), k)),
            "sums_row": Out(row_address(m)),
        }
        super().__init__(m, k, n, unit, accumulator_bits, ports)

    def elaborate(self, platform: object) -> Module:
        m, rows, columns = Module(), self.unit.rows, self.unit.columns
        m.submodules.unit = unit = TensorUnit(rows, columns, self.bits)
        top = Signal(range(self.row_tiles * rows))  # the first row of the tile
        tile_row, tile_column = Signal(range(self.row_tiles)), Signal(range(self.column_tiles))
        count = Signal(range(max(rows, self.m, rows + columns)))
        load = Signal()
        next_weight = Signal(range(self.row_tiles * rows))
        bottom, rightmost = tile_row == self.row_tiles - 1, tile_column == self.column_tiles - 1
        m.d.comb += [
            next_weight.eq(top + (rows - 1) - count),
            self.weight_row.eq(next_weight),
            self.row.eq(count),
        ]
        with m.FSM():
            with m.State("idle"):
                with m.If(self.start):
                    m.d.sync += [top.eq(0), tile_row.eq(0), tile_column.eq(0), count.eq(0)]
                    m.next = "load"
            with m.State("load"):
                m.d.comb += load.eq(1)
                m.d.sync += count.eq(count + 1)
                with m.If(count == rows - 1):
                    m.d.sync += count.eq(0)
                    m.next = "feed"
            feed = _feed_state(m, self, count)
            with m.State("drain"):  # until the last row has left the array
                m.d.sync += count.eq(count + 1)
                with m.If(count == rows + columns - 2):
                    m.d.sync += count.eq(0)
                    m.next = "load"
                    with m.If(~bottom):
                        m.d.sync += [top.eq(top + rows), tile_row.eq(tile_row + 1)]
                    with m.Else():
                        m.d.sync += [top.eq(0), tile_row.eq(0), tile_column.eq(tile_column + 1)]
                        with m.If(rightmost):
                            m.next = "idle"

        # what a memory gives is registered behind the choice of the tile, before it is multiplied
        inside, arriving, loading = Signal(), Signal(), Signal()
        m.d.sync += [loading.eq(load), inside.eq(next_weight < self.k), arriving.eq(feed)]
        m.d.sync += [unit.weights.valid.eq(loading), unit.inputs.valid.eq(arriving)]
        for j in range(columns):
            weight = chosen(self.weights, j, columns, tile_column)
            m.d.sync += unit.weights.payload[j].eq(Mux(inside, weight, 0))
        for i in range(rows):
            m.d.sync += unit.inputs.payload.x[i].eq(chosen(self.x, i, rows, tile_row))
        # rows enter two cycles after their address, so that the last ones leave after the next tile has begun
        below_top, earlier = Signal(), [Signal(), Signal.like(tile_column)]
        from_bottom = Signal()
        m.d.sync += [below_top.eq(tile_row != 0), earlier[0].eq(bottom), earlier[1].eq(tile_column)]
        m.d.sync += [from_bottom.eq(earlier[0]), self.sums_tile.eq(earlier[1])]
        if self.row_tiles > 1:
            # one place more: a row may arrive while the one before it moves to the output register
            m.submodules.partial = queue = SyncFIFOBuffered(width=columns * self.bits, depth=self.m + 1)
            m.d.comb += [
                queue.w_data.eq(unit.sums.payload.as_value()),
                queue.w_en.eq(unit.sums.valid & ~from_bottom),
                queue.r_en.eq(unit.inputs.valid & below_top),
                unit.inputs.payload.partial.eq(Mux(below_top, queue.r_data, 0)),
            ]
        m.d.comb += [unit.sums.ready.eq(1), self.valid.eq(unit.sums.valid & from_bottom)]
        m.d.comb += self.sums.eq(unit.sums.payload)
        with m.If(self.valid):
            m.d.sync += self.sums_row.eq(Mux(self.sums_row == self.m - 1, 0, self.sums_row + 1))
        return m


class GradientStage(_Stage):
    """WA of a layer: [K, M] @ [M, N], the sum over M samples, by an ``OuterUnit`` of R x C.

    start: begin. available: how many rows of errors are complete (those of the activations are by then).
    row, a, d: address of a sample, and its activations and errors. busy: not finished. valid: ``sums``
    holds C of the gradients of row ``sums_row``, those from column C * ``sums_tile`` on; the row may be K
    or beyond.
    """

    def __init__(self, m: int, k: int, n: int, unit: Unit, accumulator_bits: int) -> None:
        ports = {
            "a": In(ArrayLayout(signed(OPERAND_BITS), k)),
            "d": In(ArrayLayout(signed(OPERAND_BITS), n)),
            "busy": Out(1),
            "sums_row": Out(range(math.ceil(k / unit.rows) * unit.rows)),
        }
        super().__init__(m, k, n, unit, accumulator_bits, ports)

    def elaborate(self, platform: object) -> Module:
        m, rows, columns = Module(), self.unit.rows, self.unit.columns
        m.submodules.unit = unit = OuterUnit(rows, columns, self.bits)
        tile_row, tile_column = Signal(range(self.row_tiles)), Signal(range(self.column_tiles))
        count = Signal(range(max(self.m, 2 * rows + columns)))
        idle = Signal()
        m.d.comb += self.row.eq(count)
        with m.FSM():
            with m.State("idle"):
                m.d.comb += idle.eq(1)
                with m.If(self.start):
                    m.d.sync += [tile_row.eq(0), tile_column.eq(0), count.eq(0)]
                    m.next = "feed"
            feed = _feed_state(m, self, count)
            with m.State("drain"):  # until the last row of sums has left
                m.d.sync += count.eq(count + 1)
                with m.If(count == 2 * rows + columns - 2):
                    m.d.sync += [count.eq(0), tile_row.eq(tile_row + 1)]
                    m.next = "feed"
                    with m.If(tile_row == self.row_tiles - 1):
                        m.d.sync += [tile_row.eq(0), tile_column.eq(tile_column + 1)]
                        with m.If(tile_column == self.column_tiles - 1):
                            m.next = "idle"

        payload, last_row = unit.inputs.payload, self.row_tiles * rows - 1
        arriving, last, earlier = Signal(), Signal(), Signal.like(tile_column)
        m.d.sync += [arriving.eq(feed), last.eq(count == self.m - 1)]
        m.d.sync += [unit.inputs.valid.eq(arriving), payload.last.eq(last)]
        m.d.sync += [payload.a[i].eq(chosen(self.a, i, rows, tile_row)) for i in range(rows)]
        m.d.sync += [payload.d[j].eq(chosen(self.d, j, columns, tile_column)) for j in range(columns)]
        m.d.comb += [unit.sums.ready.eq(1), self.valid.eq(unit.sums.valid), self.sums.eq(unit.sums.payload)]
        m.d.sync += [earlier.eq(tile_column), self.sums_tile.eq(earlier)]  # as in ``ProductStage``
        with m.If(self.valid):
            m.d.sync += self.sums_row.eq(Mux(self.sums_row == last_row, 0, self.sums_row + 1))
        leaving = Signal()  # of the last row
        m.d.sync += leaving.eq(~idle)
        m.d.comb += self.busy.eq(~idle | leaving)
        return m


def _feed_state(m: Module, stage: _Stage, count: Signal) -> Signal:
    """The state in which all rows of inputs are addressed, each when it is complete; then comes
    ``drain``. Returns whether ``count`` is the address of one. count: 0 before and afterwards."""
    feed = Signal(name="feed")
    with m.State("feed"):
        m.d.comb += feed.eq(stage.available > count)
        with m.If(feed):
            m.d.sync += count.eq(count + 1)
            with m.If(count == stage.m - 1):
                m.d.sync += count.eq(0)
                m.next = "drain"
    return feed


def chosen(numbers: Sequence[Value], place: int, size: int, tile: Value) -> Value:
    """Number ``place`` of the ``tile``-th of the tiles of ``size`` numbers that ``numbers`` are cut into;
    0 beyond their end."""
    starts = range(0, len(numbers), size)
    of_tiles = [numbers[i + place] if i + place < len(numbers) else 0 for i in starts]
    return Array(of_tiles)[tile] if len(of_tiles) > 1 else of_tiles[0]
