"""The parts of the learner's pipelines: a layer with its memories, LOSS, and the weight update of a layer."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.data import ArrayLayout
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out, connect, flipped

from murmurate.fpga.fixed_point import OPERAND_BITS
from murmurate.fpga.learner import MASTER_BITS, FixedPointFormats
from murmurate.fpga.learner_model import Unit
from murmurate.fpga.stages import GradientStage, ProductStage, row_address
from murmurate.fpga.tensor_unit import WeightUpdate, narrowed


def row_write(rows: int, width: int, bits: int = OPERAND_BITS) -> wiring.Signature:
    """A write of some numbers of a row, where ``enable`` has a 1; ``last`` completes the row."""
    return wiring.Signature(
        {
            "row": Out(row_address(rows)),
            "enable": Out(width),
            "data": Out(ArrayLayout(signed(bits), width)),
            "last": Out(1),
        }
    )


class RowMemory(wiring.Component):
    """Rows of ``width`` numbers, with ``readers`` read ports, whose data come one cycle after the address.

    complete: how many rows have been completed since ``clear``.
    """

    def __init__(self, rows: int, width: int, bits: int = OPERAND_BITS, readers: int = 1) -> None:
        self.rows, self.numbers = rows, ArrayLayout(signed(bits), width)
        read = wiring.Signature({"row": Out(row_address(rows)), "data": In(self.numbers)})
        super().__init__(
            {
                "clear": In(1),
                "write": In(row_write(rows, width, bits)),
                "complete": Out(range(rows + 1)),
                "reads": In(read).array(readers),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.memory = memory = Memory(shape=self.numbers, depth=max(2, self.rows), init=[])
        write = memory.write_port(granularity=1)
        m.d.comb += [
            write.addr.eq(self.write.row),
            write.en.eq(self.write.enable),
            write.data.eq(self.write.data),
        ]
        for port in self.reads:
            read = memory.read_port()
            m.d.comb += [read.addr.eq(port.row), port.data.eq(read.data)]
        with m.If(self.clear):
            m.d.sync += self.complete.eq(0)
        with m.Elif(self.write.last):
            m.d.sync += self.complete.eq(self.complete + 1)
        return m


class LayerStages(wiring.Component):
    """A layer, [K] to [N], in one pipeline: its FW, WA and BW, and the memories that they read.

    start: begin a step on ``share`` samples. inputs, outputs: the activations before and after the layer,
    the latter narrowed and, with ``relu``, not below 0. output_errors, input_errors: the errors after and
    before the layer. busy: until all gradients are complete; row ``gradient_row`` of them comes one cycle
    later. change: give the weight of ``row`` and ``column`` the value ``operand``.

    units: of FW, BW and WA; that of BW is None for the first layer, which has no ``input_errors``.
    """

    def __init__(
        self,
        share: int,
        k: int,
        n: int,
        numbers: FixedPointFormats,
        units: tuple[Unit, Unit | None, Unit],
        relu: bool,
    ) -> None:
        self.share, self.k, self.n, self.numbers, self.relu = share, k, n, numbers, relu
        self.forward_unit, self.backward_unit, self.gradient_unit = units
        members: dict[str, Any] = {
            "start": In(1),
            "inputs": In(row_write(share, k)),
            "outputs": Out(row_write(share, n)),
            "output_errors": In(row_write(share, n)),
            "busy": Out(1),
            "gradient_row": In(row_address(k + 1)),
            "gradients": Out(ArrayLayout(signed(numbers.accumulator_bits), n)),
            "change": In(1),
            "row": In(row_address(k + 1)),
            "column": In(row_address(n)),
            "operand": In(signed(OPERAND_BITS)),
        }
        if self.backward_unit is not None:
            members["input_errors"] = Out(row_write(share, k))
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        m, share, k, n = Module(), self.share, self.k, self.n
        bits = self.numbers.accumulator_bits
        has_backward = self.backward_unit is not None
        m.submodules.activations = activations = RowMemory(share, k, readers=2 + has_backward)
        m.submodules.errors = errors = RowMemory(share, n, readers=1 + has_backward)
        m.submodules.weights = weights = RowMemory(k + 1, n)
        m.submodules.gradients = gradients = RowMemory(k + 1, n, bits)
        m.submodules.forward = forward = ProductStage(share, k + 1, n, self.forward_unit, bits)
        m.submodules.gradient = gradient = GradientStage(share, k + 1, n, self.gradient_unit, bits)
        connect(m, flipped(self.inputs), activations.write)
        connect(m, flipped(self.output_errors), errors.write)
        one = Const(1 << self.numbers.activation, signed(OPERAND_BITS))
        for memory in (activations, errors):
            m.d.comb += memory.clear.eq(self.start)

        m.d.comb += [forward.start.eq(self.start), forward.available.eq(activations.complete)]
        m.d.comb += [activations.reads[0].row.eq(forward.row), weights.reads[0].row.eq(forward.weight_row)]
        m.d.comb += [forward.x[i].eq(activations.reads[0].data[i]) for i in range(k)]
        m.d.comb += [forward.x[k].eq(one), forward.weights.eq(weights.reads[0].data)]
        found = self._narrowed(m, forward, self.outputs)
        for j in range(n):
            number = found[j % len(found)]
            m.d.comb += self.outputs.data[j].eq(Mux(number < 0, 0, number) if self.relu else number)

        m.d.comb += [gradient.start.eq(self.start), gradient.available.eq(errors.complete)]
        m.d.comb += [activations.reads[1].row.eq(gradient.row), errors.reads[0].row.eq(gradient.row)]
        m.d.comb += [gradient.a[i].eq(activations.reads[1].data[i]) for i in range(k)]
        m.d.comb += [gradient.a[k].eq(one), gradient.d.eq(errors.reads[0].data), self.busy.eq(gradient.busy)]
        columns, write = self.gradient_unit.columns, gradients.write
        m.d.comb += write.row.eq(gradient.sums_row)
        for j in range(n):
            here = gradient.valid & (gradient.sums_row <= k) & (gradient.sums_tile == j // columns)
            m.d.comb += [write.enable[j].eq(here), write.data[j].eq(gradient.sums[j % columns])]
        m.d.comb += [gradients.reads[0].row.eq(self.gradient_row), self.gradients.eq(gradients.reads[0].data)]

        self._change(m, weights, self.row, self.column, self.change)
        if self.backward_unit is not None:
            m.submodules.transposed = transposed = RowMemory(n, k)
            m.submodules.backward = backward = ProductStage(share, n, k, self.backward_unit, bits)
            m.d.comb += [backward.start.eq(self.start), backward.available.eq(errors.complete)]
            m.d.comb += [errors.reads[1].row.eq(backward.row), backward.x.eq(errors.reads[1].data)]
            m.d.comb += transposed.reads[0].row.eq(backward.weight_row)
            m.d.comb += backward.weights.eq(transposed.reads[0].data)
            found, activation = self._narrowed(m, backward, self.input_errors), activations.reads[2]
            m.d.comb += activation.row.eq(backward.sums_row)
            for i in range(k):
                number = found[i % len(found)]
                m.d.comb += self.input_errors.data[i].eq(Mux(activation.data[i] > 0, number, 0))
            self._change(m, transposed, self.column, self.row, self.change)  # not the bias, row k
        return m

    def _narrowed(self, m: Module, stage: ProductStage, write: Any) -> list[Value]:
        """The results of ``stage``, narrowed, and all of ``write`` but its data; both one cycle later."""
        columns, shift = stage.unit.columns, self.numbers.weight
        found = [Signal(signed(OPERAND_BITS), name=f"narrow_{j}") for j in range(columns)]
        for j in range(columns):
            m.d.sync += found[j].eq(narrowed(stage.sums[j], shift))
        for j in range(stage.n):
            m.d.sync += write.enable[j].eq(stage.valid & (stage.sums_tile == j // columns))
        last = stage.valid & (stage.sums_tile == stage.column_tiles - 1)
        m.d.sync += [write.row.eq(stage.sums_row), write.last.eq(last)]
        return found

    def _change(self, m: Module, memory: RowMemory, row: Value, column: Value, here: Value) -> None:
        write = memory.write
        m.d.comb += write.row.eq(row)
        for j in range(len(write.data)):
            m.d.comb += [write.enable[j].eq(here & (column == j)), write.data[j].eq(self.operand)]


class Loss(wiring.Component):
    """LOSS: the errors of the outputs of a sample (see ``EmulatedLearner.errors``), and its TD error,
    target - Q, both two cycles after its address.

    available: how many rows of outputs are complete. row, outputs, action, target: address and contents of a
    sample.
    """

    def __init__(self, share: int, actions: int, numbers: FixedPointFormats) -> None:
        self.share, self.actions, self.numbers = share, actions, numbers
        super().__init__(
            {
                "start": In(1),
                "available": In(range(share + 1)),
                "row": Out(row_address(share)),
                "outputs": In(ArrayLayout(signed(OPERAND_BITS), actions)),
                "action": In(row_address(actions)),
                "target": In(signed(OPERAND_BITS)),
                "errors": Out(row_write(share, actions)),
                "valid": Out(1),
                "td_error": Out(signed(OPERAND_BITS + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m, numbers = Module(), self.numbers
        count, take = Signal(range(self.share + 1)), Signal()
        arrived, row, action = Signal(), Signal.like(self.row), Signal.like(self.action)
        m.d.comb += [take.eq(self.available > count), self.row.eq(count)]
        with m.If(self.start):
            m.d.sync += count.eq(0)
        with m.Elif(take):
            m.d.sync += count.eq(count + 1)
        m.d.sync += [
            arrived.eq(take & ~self.start),
            row.eq(count),
            self.valid.eq(arrived),
            self.errors.row.eq(row),
        ]
        m.d.sync += [
            self.td_error.eq(
                self.target - Array([self.outputs[j] for j in range(self.actions)])[self.action]
            ),
            action.eq(self.action),
        ]

        one = 1 << numbers.activation
        error = -self.td_error
        slope = Mux(error < -one, -one, Mux(error > one, one, error)) << (numbers.error - numbers.activation)
        m.d.comb += self.errors.last.eq(self.valid)
        for j in range(self.actions):
            m.d.comb += [
                self.errors.enable[j].eq(self.valid),
                self.errors.data[j].eq(Mux(action == j, slope, 0)),
            ]
        return m


class LayerUpdate(wiring.Component):
    """The sum over pipelines and WU of a layer, [K + 1, N], one weight per cycle in the order of rows.

    start: begin; busy: until the last weight has changed. gradient_row, gradients: address and contents
    of a row in each pipeline. load, loaded: a weight to be set, in the order of rows. change: the weight
    of ``row`` and ``column`` becomes ``weight``, and its copy in the tensor units ``operand``.
    """

    def __init__(
        self, k: int, n: int, pipelines: int, numbers: FixedPointFormats, shift: int, stochastic: bool
    ) -> None:
        self.k, self.n, self.pipelines, self.numbers = k, n, pipelines, numbers
        self.shift, self.stochastic = shift, stochastic
        super().__init__(
            {
                "start": In(1),
                "busy": Out(1),
                "gradient_row": Out(row_address(k + 1)),
                "gradients": In(ArrayLayout(signed(numbers.accumulator_bits), n)).array(pipelines),
                "load": In(1),
                "loaded": In(signed(MASTER_BITS)),
                "whole": Out(1),
                "change": Out(1),
                "row": Out(row_address(k + 1)),
                "column": Out(row_address(n)),
                "weight": Out(signed(MASTER_BITS)),
                "operand": Out(signed(OPERAND_BITS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m, n, numbers = Module(), self.n, self.numbers
        size = (self.k + 1) * n
        m.submodules.masters = memory = Memory(shape=signed(MASTER_BITS), depth=size, init=[])
        read, write = memory.read_port(), memory.write_port()
        operand_shift = numbers.master - numbers.weight
        m.submodules.update = unit = WeightUpdate(
            self.shift, operand_shift, numbers.accumulator_bits, self.stochastic
        )
        index, row, column, running = (
            Signal(range(size)),
            Signal.like(self.row),
            Signal.like(self.column),
            Signal(),
        )
        with m.If(self.start):
            m.d.sync += running.eq(1)
        with m.If(running | self.load):
            m.d.sync += [index.eq(index + 1), column.eq(column + 1)]
            with m.If(column == n - 1):
                m.d.sync += [column.eq(0), row.eq(row + 1)]
            with m.If(index == size - 1):
                m.d.sync += [index.eq(0), row.eq(0), running.eq(0)]

        # the sum over pipelines: of pairs, then of pairs of these
        m.d.comb += self.gradient_row.eq(row)
        places = [(running, index, row, column)]

        def later() -> None:
            now = [
                Signal.like(signal, name=f"{signal.name}_{len(places)}")
                for signal in (running, index, row, column)
            ]
            m.d.sync += [new.eq(old) for new, old in zip(now, places[-1], strict=True)]
            places.append(tuple(now))

        later()
        totals = [
            Signal(signed(numbers.accumulator_bits), name=f"gradient_{p}") for p in range(self.pipelines)
        ]
        m.d.sync += [
            total.eq(Array([row_of[j] for j in range(n)])[places[-1][3]])
            for total, row_of in zip(totals, self.gradients, strict=True)
        ]
        later()
        while len(totals) > 1:
            sums = [Signal.like(total, name=f"sum_{len(totals)}_{p}") for p, total in enumerate(totals[::2])]
            m.d.sync += [total.eq(a + b) for total, a, b in zip(sums, totals[::2], totals[1::2], strict=True)]
            totals = sums
            later()
        valid = places[-1][0]
        m.d.comb += [
            read.addr.eq(places[-2][1]),
            unit.inputs.valid.eq(valid),
            unit.inputs.payload.weight.eq(read.data),
            unit.inputs.payload.gradient.eq(totals[0]),
            unit.outputs.ready.eq(1),
        ]
        later()
        _, last_index, last_row, last_column = places[-1]
        new = unit.outputs.payload
        m.d.comb += [
            self.busy.eq(Cat(place[0] for place in places).any()),
            self.whole.eq(index == 0),
            self.change.eq(unit.outputs.valid | self.load),
            self.row.eq(Mux(self.load, row, last_row)),
            self.column.eq(Mux(self.load, column, last_column)),
            self.weight.eq(Mux(self.load, self.loaded, new.weight)),
            self.operand.eq(Mux(self.load, narrowed(self.loaded, operand_shift), new.operand)),
            write.addr.eq(Mux(self.load, index, last_index)),
            write.en.eq(self.change),
            write.data.eq(self.weight),
        ]
        return m
