"""A memory with one read and one write port, whose data pass an output register."""

from __future__ import annotations

from amaranth.hdl import Module, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out


class LaneMemory(wiring.Component):
    """``words`` of ``lanes`` x ``width`` bits; a write changes one lane.

    Data appear ``shape.READ`` cycles after their address. A read in the cycle of a write to the same word, or
    before, gives undefined data: whoever reads forwards what is being written.
    """

    def __init__(self, words: int, lanes: int, width: int) -> None:
        self.words, self.lanes, self.width = words, lanes, width
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
        m.submodules.memory = memory = Memory(
            shape=unsigned(self.lanes * self.width), depth=max(2, self.words), init=[]
        )
        write = memory.write_port(granularity=self.width)
        read = memory.read_port()
        data = Signal(self.lanes * self.width)
        m.d.sync += data.eq(read.data)
        m.d.comb += [
            read.addr.eq(self.read_address),
            self.read_data.eq(data),
            write.addr.eq(self.write_address),
            write.en.eq(self.write_enable),
            *(write.data.word_select(lane, self.width).eq(self.write_data) for lane in range(self.lanes)),
        ]
        return m
