"""A memory with one read port, one write port, and an output register."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from murmurate.fpga.shape import READ_CYCLES, read_cycles

# word width in bits of one block RAM, by its number of words. LaneMemory cuts a memory into columns of this
# width; left to itself, Yosys would stack block RAMs, with multiplexers between them and the output register.
# It still stacks them above 16,384 words: the rows of 32,768 leaves and more, and the leaves of K = 2 and N =
# 65,536, a tree that does not fit on an LFE5U-85F with W = 16
_COLUMN_BITS = {16_384: 1, 8_192: 2, 4_096: 4, 2_048: 9, 1_024: 18}


class LaneMemory(wiring.Component):
    """``words`` of ``lanes`` x ``width`` bits; a write changes one lane.

    Data appear ``shape.read_cycles(words)`` cycles after their address. A lane that is written in the cycle
    in which it is read is undefined (an ECP5's block RAM does not define which port comes first). bypass:
    such a lane has the new data, and all data appear ``shape.BYPASS_CYCLES`` cycles later.
    """

    def __init__(self, words: int, lanes: int, width: int, bypass: bool = False) -> None:
        self.words, self.lanes, self.width, self.bypass = words, lanes, width, bypass
        self.column_bits = next((bits for depth, bits in sorted(_COLUMN_BITS.items()) if words <= depth), 1)
        address = max(1, (words - 1).bit_length())
        super().__init__(
            {
                "read_address": In(address),
                "read_data": Out(lanes * width),
                "write_enable": In(lanes),
                "write_address": In(address),
                "write_data": In(width),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        read_address, write_address = self.read_address, self.write_address
        write_enable, write_data = self.write_enable, self.write_data
        if read_cycles(self.words) > READ_CYCLES:
            read_address, write_address, write_enable, write_data = (
                self._later(m, x) for x in (read_address, write_address, write_enable, write_data)
            )
        data = Signal(self.lanes * self.width, reset_less=True)  # to become the block RAM's output register
        for lane in range(self.lanes):
            for low in range(0, self.width, self.column_bits):
                bits = slice(low, min(low + self.column_bits, self.width))
                memory = Memory(shape=unsigned(bits.stop - bits.start), depth=max(2, self.words), init=[])
                m.submodules[f"memory_{lane}_{low}"] = memory
                write, read = memory.write_port(), memory.read_port()
                m.d.sync += data.word_select(lane, self.width)[bits].eq(read.data)
                m.d.comb += [
                    read.addr.eq(read_address),
                    write.addr.eq(write_address),
                    write.en.eq(write_enable[lane]),
                    write.data.eq(write_data[bits]),
                ]
        if not self.bypass:
            m.d.comb += self.read_data.eq(data)
            return m
        # a write to the address that is being read is kept for two cycles, until the data arrive
        hit_1, hit_2 = Signal(self.lanes), Signal(self.lanes)  # one and two cycles later
        new_1, new_2 = (Signal(self.width, reset_less=True, name=name) for name in ("new_1", "new_2"))
        same = Mux(read_address == write_address, write_enable, 0)
        m.d.sync += [hit_1.eq(same), hit_2.eq(hit_1), new_1.eq(write_data), new_2.eq(new_1)]
        m.d.sync += [
            self.read_data.word_select(k, self.width).eq(
                Mux(hit_2[k], new_2, data.word_select(k, self.width))
            )
            for k in range(self.lanes)
        ]
        return m

    @staticmethod
    def _later(m: Module, signal: Signal) -> Signal:
        """``signal`` one cycle later."""
        later = Signal.like(signal)
        m.d.sync += later.eq(signal)
        return later
