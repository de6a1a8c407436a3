"""Tensor units: systolic arrays of multiply-accumulate elements (Zhang 2022, section 4.2.2.3).

The pipeline's stages: FW (forward pass), BW (backward pass), WA (gradients of weights), WU (weight update).
"""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import stream, wiring
from amaranth.lib.data import ArrayLayout, StructLayout
from amaranth.lib.wiring import In, Out

from murmurate.errors import Refusal
from murmurate.fpga.fixed_point import LFSR_BITS, LFSR_TAPS, OPERAND_BITS, limits
from murmurate.fpga.learner import MASTER_BITS


class TensorUnit(wiring.Component):
    """Computes [M, R] @ [R, C] with stationary weights, for FW and (with the transposed matrix) BW.

    weights: R rows of C operands, the last row first; each new row shifts the earlier rows down by one. The
    array must be empty while another matrix is loaded. inputs: a row ``x`` of R operands, and C ``partial``
    sums of the tiles that hold the matrix's rows above this tile (0 for the first tile). sums: ``partial + x
    @ weights``. One row per cycle; valid and ready as in AXI. The whole array stalls while the receiver is
    not ready.
    """

    def __init__(self, rows: int, columns: int, accumulator_bits: int = 40) -> None:
        self.rows, self.columns, self.bits = rows, columns, accumulator_bits
        sums = ArrayLayout(signed(accumulator_bits), columns)
        operands = ArrayLayout(signed(OPERAND_BITS), rows)
        super().__init__(
            {
                "weights": In(stream.Signature(ArrayLayout(signed(OPERAND_BITS), columns))),
                "inputs": In(stream.Signature(StructLayout({"x": operands, "partial": sums}))),
                "sums": Out(stream.Signature(sums)),
            }
        )

    @property
    def latency(self) -> int:
        """Cycles from an accepted row to its sums."""
        return self.rows + self.columns - 1

    def elaborate(self, platform: object) -> Module:
        m, rows, columns = Module(), self.rows, self.columns
        go = Signal()
        m.d.comb += [
            go.eq(~self.sums.valid | self.sums.ready),
            self.inputs.ready.eq(go),
            self.weights.ready.eq(1),
        ]
        weight = [
            [Signal(signed(OPERAND_BITS), name=f"w{i}_{j}") for j in range(columns)] for i in range(rows)
        ]
        with m.If(self.weights.valid):
            for j in range(columns):
                m.d.sync += weight[0][j].eq(self.weights.payload[j])
                m.d.sync += [weight[i][j].eq(weight[i - 1][j]) for i in range(1, rows)]
        valid = Signal(self.latency)
        with m.If(go):
            m.d.sync += valid.eq(Cat(self.inputs.valid, valid[:-1]))

        def delayed(signal: Signal, cycles: int, name: str) -> Signal:
            for cycle in range(cycles):
                later = Signal(signal.shape(), name=f"{name}_{cycle}", reset_less=True)
                with m.If(go):
                    m.d.sync += later.eq(signal)
                signal = later
            return signal

        # row i of the array works i cycles after row 0, and column j works j cycles after column 0
        x = [delayed(self.inputs.payload.x[i], i, f"x{i}") for i in range(rows)]
        above = [delayed(self.inputs.payload.partial[j], j, f"partial{j}") for j in range(columns)]
        for i in range(rows):
            below = []
            for j in range(columns):
                total = Signal(signed(self.bits), name=f"sum{i}_{j}", reset_less=True)
                with m.If(go):
                    m.d.sync += total.eq(above[j] + x[i] * weight[i][j])
                below.append(total)
                if j < columns - 1:
                    x[i] = delayed(x[i], 1, f"right{i}_{j}")
            above = below
        m.d.comb += self.sums.valid.eq(valid[-1])
        for j in range(columns):
            m.d.comb += self.sums.payload[j].eq(delayed(above[j], columns - 1 - j, f"deskew{j}"))
        return m


class OuterUnit(wiring.Component):
    """Accumulates the sum of outer products a^T d of M pairs, [R, C], for WA; the sums are stationary.

    inputs: R activations ``a``, C errors ``d``, and ``last``, which marks the last pair of a sum. sums: the R
    rows of the sum, C numbers each, from the first row on; until all have left, no pair is accepted. Then the
    sums are reset to 0.
    """

    def __init__(self, rows: int, columns: int, accumulator_bits: int = 40) -> None:
        self.rows, self.columns, self.bits = rows, columns, accumulator_bits
        a, d = ArrayLayout(signed(OPERAND_BITS), rows), ArrayLayout(signed(OPERAND_BITS), columns)
        super().__init__(
            {
                "inputs": In(stream.Signature(StructLayout({"a": a, "d": d, "last": 1}))),
                "sums": Out(stream.Signature(ArrayLayout(signed(accumulator_bits), columns))),
            }
        )

    @property
    def latency(self) -> int:
        """Cycles from the accepted last pair to the first row of sums."""
        return self.rows + self.columns

    def elaborate(self, platform: object) -> Module:
        m, rows, columns = Module(), self.rows, self.columns
        accept, drain = Signal(), Signal()
        row, wait = Signal(range(max(rows, 2))), Signal(range(self.latency + 1))
        closed = Signal()  # set from the last pair until all rows of sums have left
        m.d.comb += [
            self.inputs.ready.eq(~closed),
            accept.eq(self.inputs.valid & self.inputs.ready),
            self.sums.valid.eq(closed & (wait == 0)),
            drain.eq(self.sums.valid & self.sums.ready),
        ]
        with m.If(accept & self.inputs.payload.last):
            m.d.sync += [closed.eq(1), wait.eq(self.latency - 1), row.eq(0)]
        with m.If(closed & (wait != 0)):
            m.d.sync += wait.eq(wait - 1)
        with m.If(drain):
            m.d.sync += row.eq(row + 1)
            with m.If(row == rows - 1):
                m.d.sync += closed.eq(0)

        def delayed(signal: Signal, cycles: int, name: str) -> Signal:
            for cycle in range(cycles):
                later = Signal(signal.shape(), name=f"{name}_{cycle}")
                m.d.sync += later.eq(signal)
                signal = later
            return signal

        payload = self.inputs.payload
        a = [delayed(Mux(accept, payload.a[i], 0), i, f"a{i}") for i in range(rows)]
        d = [delayed(Mux(accept, payload.d[j], 0), j, f"d{j}") for j in range(columns)]
        totals: list[list[Signal]] = []
        for i in range(rows):
            totals.append([])
            for j in range(columns):
                total = Signal(signed(self.bits), name=f"sum{i}_{j}")
                with m.If(drain & (row == rows - 1)):
                    m.d.sync += total.eq(0)
                with m.Else():
                    m.d.sync += total.eq(total + a[i] * d[j])
                totals[i].append(total)
                a[i], d[j] = delayed(a[i], 1, f"right{i}_{j}"), delayed(d[j], 1, f"down{i}_{j}")
        for j in range(columns):
            m.d.comb += self.sums.payload[j].eq(Array(totals[i][j] for i in range(rows))[row])
        return m


class WeightUpdate(wiring.Component):
    """Computes w <- saturate(w - round(g / 2^shift)), one weight per cycle, for WU.

    inputs: ``weight`` (32 bits) and ``gradient``. outputs, one cycle later: the new ``weight`` and
    ``operand``, its rounded upper bits for the tensor units. stochastic: round by the random numbers of a
    shift register (``Lfsr``) that advances with each weight.

    Args:
        shift: at least 1; see ``EmulatedLearner.update_shift``.
        operand_shift: number of low bits of a weight that its operand omits, at least 1.
        accumulator_bits: bits of a gradient.

    Raises Refusal for a shift below 1.
    """

    def __init__(
        self, shift: int, operand_shift: int, accumulator_bits: int = 40, stochastic: bool = False
    ) -> None:
        for name, value in (("shift", shift), ("operand_shift", operand_shift)):
            if value < 1:
                raise Refusal(f"{name} is {value}; use at least 1.")
        self.shift, self.operand_shift, self.stochastic = shift, operand_shift, stochastic
        inputs = {"weight": signed(MASTER_BITS), "gradient": signed(accumulator_bits)}
        outputs = {"weight": signed(MASTER_BITS), "operand": signed(OPERAND_BITS)}
        super().__init__(
            {
                "inputs": In(stream.Signature(StructLayout(inputs))),
                "outputs": Out(stream.Signature(StructLayout(outputs))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m, go, payload = Module(), Signal(), self.inputs.payload
        m.d.comb += [go.eq(~self.outputs.valid | self.outputs.ready), self.inputs.ready.eq(go)]
        added = 1 << (self.shift - 1)
        if self.stochastic:
            state, lag = Signal(LFSR_BITS, init=1), LFSR_BITS - self.shift
            added = state >> lag if lag >= 0 else state << -lag
            bit = Cat(state[tap] for tap in LFSR_TAPS).xor()
            with m.If(go & self.inputs.valid):
                m.d.sync += state.eq(Cat(bit, state[:-1]))
        new = payload.weight - ((payload.gradient + added) >> self.shift)
        weight = Signal(signed(MASTER_BITS))
        with m.If(go):
            m.d.sync += [self.outputs.valid.eq(self.inputs.valid), weight.eq(saturated(new, MASTER_BITS))]
        m.d.comb += [
            self.outputs.payload.weight.eq(weight),
            self.outputs.payload.operand.eq(narrowed(weight, self.operand_shift)),
        ]
        return m


def saturated(number: Value, bits: int) -> Value:
    """The signed ``number``, clamped to the range of ``bits`` bits."""
    low, high = limits(bits)
    return Mux(number < low, low, Mux(number > high, high, number))


def narrowed(number: Value, shift: int) -> Value:
    """``number`` without its last ``shift`` bits, rounded to the nearest, halves upwards, and saturated: an
    operand."""
    rounded = (number + (1 << (shift - 1))) >> shift if shift else number
    return saturated(rounded, OPERAND_BITS)
