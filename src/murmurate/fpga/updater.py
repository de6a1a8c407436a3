"""Sets priorities, from the leaf to the root, one operation per cycle (Zhang 2022, section 4.2.4)."""

from __future__ import annotations

from collections.abc import Sequence

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from murmurate.fpga.memory import LaneMemory
from murmurate.fpga.shape import TreeShape


class LevelUpdater(wiring.Component):
    """Adds differences to the lanes of a level; at the leaves it stores new values and computes the
    differences.

    An operation reads its word, selects its lane one cycle later, adds two cycles after that, and writes.
    Sums of preceding operations may not be in the memory yet: if some of these operations have the same
    place, the sum of the newest of them is used instead of the memory's.
    """

    def __init__(self, shape: TreeShape, level: int) -> None:
        self.shape, self.level = shape, level
        self.leaf = level == shape.levels - 1
        self.width = shape.lane_width(level)
        self.delta_bits = shape.width + 1
        super().__init__(
            {
                "valid": In(1),
                "index": In(shape.index_bits),
                "delta": In(signed(self.delta_bits)),  # at the leaves: the new value
                "next_valid": Out(1),
                "next_index": Out(shape.index_bits),
                "next_delta": Out(signed(self.delta_bits)),
                "write_enable": Out(shape.lanes(level)),
                "write_address": Out(max(1, (shape.words(level) - 1).bit_length())),
                "write_data": Out(self.width),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m, shape, level = Module(), self.shape, self.level
        lanes = shape.lanes(level)
        read = shape.read_cycles(level)
        # number of operations whose sums the memory does not return yet
        in_flight = shape.update_level_cycles(level)
        m.submodules.memory = memory = LaneMemory(shape.words(level), lanes, self.width)
        # place: the word and lane of an operation; element s of each list is the signal of s cycles ago
        place_bits = shape.index_bits - shape.bits_below(level)
        stages = read + in_flight + 1
        valid = self._delayed(m, self.valid, stages, "valid")
        index = self._delayed(m, self.index, in_flight + 1, "index")
        place = self._delayed(m, self.index[shape.bits_below(level) :], stages, "place")
        delta = self._delayed(m, self.delta, in_flight, "delta")
        lane_bits = lanes.bit_length() - 1
        m.d.comb += memory.read_address.eq(self.index[shape.bits_below(level) + lane_bits :])
        assert len(place[0]) == place_bits

        # in cycle read + 1 of an operation, bit d - 1: the operation d cycles before it has the same place
        matches = Signal(in_flight)
        m.d.sync += matches.eq(
            Cat(valid[read + d] & (place[read + d] == place[read]) for d in range(1, in_flight + 1))
        )
        written = Signal(self.width)  # the sum of the operation in its last cycle
        history = self._delayed(m, written, in_flight - 1, "written")

        # the lane as the memory has it, replaced by the newest sum in flight of the same place; the sum of
        # the operation just before (if ``follows``) is known only one cycle later
        memory_lanes = Array(memory.read_data.word_select(k, self.width) for k in range(lanes))
        stored = Signal(self.width)
        m.d.sync += stored.eq(memory_lanes[place[read][:lane_bits]])
        newest = stored
        for d in range(in_flight, 1, -1):  # the newest operation wins
            newest = Mux(matches[d - 1], history[d - 2], newest)
        base, follows = Signal(self.width), Signal()
        m.d.sync += [base.eq(newest), follows.eq(matches[0])]
        before = Mux(follows, written, base)
        change = Signal(signed(self.delta_bits))
        if self.leaf:
            m.d.sync += [written.eq(delta[in_flight - 1]), change.eq(delta[in_flight - 1] - before)]
        else:
            m.d.sync += [written.eq(before + delta[in_flight - 1]), change.eq(delta[in_flight - 1])]

        last = in_flight
        enable = valid[last] << place[last][:lane_bits]
        m.d.comb += [
            self.next_valid.eq(valid[last]),
            self.next_index.eq(index[last]),
            self.next_delta.eq(change),
            self.write_enable.eq(enable),
            self.write_address.eq(place[last][lane_bits:]),
            self.write_data.eq(written),
            memory.write_enable.eq(self.write_enable),
            memory.write_address.eq(self.write_address),
            memory.write_data.eq(self.write_data),
        ]
        return m

    @staticmethod
    def _delayed(m: Module, signal: Signal, stages: int, name: str) -> Sequence[Signal]:
        """[signal, signal one cycle later, ...], ``stages`` in all."""
        signals = [signal]
        for stage in range(1, stages):
            # a reset clears only the valid bits
            later = Signal.like(signals[-1], name=f"{name}_{stage}", reset_less=name != "valid")
            m.d.sync += later.eq(signals[-1])
            signals.append(later)
        return signals
