"""A memory with one read and one write port, whose data pass an output register."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out


class LaneMemory(wiring.Component):
    """``words`` of ``lanes`` x ``width`` bits; a write changes one lane.

    Data appear ``shape.READ`` cycles after their address. The lane that is written in the cycle in which it
    is read is undefined (block RAMs of an ECP5 have no order of their ports). bypass: it has the new data,
    and all appear ``shape.BYPASS`` later.
    """

    def __init__(self, words: int, lanes: int, width: int, bypass: bool = False) -> None:
        self.words, self.lanes, self.width, self.bypass = words, lanes, width, bypass
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
        data = Signal(self.lanes * self.width, reset_less=True)  # as the register of a block RAM
        m.d.sync += data.eq(read.data)
        m.d.comb += [
            read.addr.eq(self.read_address),
            write.addr.eq(self.write_address),
            write.en.eq(self.write_enable),
            *(write.data.word_select(lane, self.width).eq(self.write_data) for lane in range(self.lanes)),
        ]
        if not self.bypass:
            m.d.comb += self.read_data.eq(data)
            return m
        # two cycles later, beside the data
        hit, hits = Signal(self.lanes), Signal(self.lanes)
        new, news = (Signal(self.width, reset_less=True, name=name) for name in ("new", "news"))
        same = Mux(self.read_address == self.write_address, self.write_enable, 0)
        m.d.sync += [hit.eq(same), hits.eq(hit), new.eq(self.write_data), news.eq(new)]
        m.d.sync += [
            self.read_data.word_select(k, self.width).eq(Mux(hits[k], news, data.word_select(k, self.width)))
            for k in range(self.lanes)
        ]
        return m
