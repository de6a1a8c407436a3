"""A design within a module of two pins, for place and route. Needs Amaranth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.back import rtlil
from amaranth.hdl import Cat, Elaboratable, Module, Signal


class _Frame(Elaboratable):
    def __init__(self, name: str, design: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.serial_in, self.serial_out = Signal(), Signal()
        self._name, self._design, self._inputs, self._outputs = name, design, inputs, outputs

    def elaborate(self, platform: Any) -> Any:
        m = Module()
        m.submodules[self._name] = self._design
        inputs, outputs = Cat(*self._inputs), Cat(*self._outputs)
        register = Signal(len(inputs))
        seen = Signal(len(outputs))
        m.d.sync += [register.eq(Cat(self.serial_in, register[:-1])), seen.eq(outputs)]
        m.d.comb += inputs.eq(register)
        parity: Any = seen
        while len(parity) > 1:  # each stage takes the parity of four bits at a time
            stage = Signal(-(-len(parity) // 4))
            m.d.sync += stage.eq(Cat(parity[i : i + 4].xor() for i in range(0, len(parity), 4)))
            parity = stage
        m.d.comb += self.serial_out.eq(parity)
        return m


def framed(name: str, design: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """The design, named, with a shift register as its inputs and the parity of its outputs as the output, in
    Yosys' intermediate language. This module has two pins instead of a hundred, so that distant pins do not
    limit the clock."""
    frame = _Frame(name, design, inputs, outputs)
    return str(rtlil.convert(frame, ports=[frame.serial_in, frame.serial_out], emit_src=False))
