"""Area and clock of one tensor unit on an ECP5, by Yosys and nextpnr."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.fpga.learner_model import Unit
from murmurate.fpga.tools import routed, synthesized, tool_versions

_DEVICE = ("lfe5u-85f", "--85k", "--package", "CABGA756", "--speed", "6")


def measured_units() -> list[dict[str, Any]]:
    """The committed results of ``place_and_route_unit``."""
    units: list[dict[str, Any]] = json.loads(Path(__file__).with_name("learner_units.json").read_text())
    return units


def place_and_route_unit(
    rows: int, columns: int, *, seed: int = 1, target_mhz: float = 150.0
) -> dict[str, Any]:
    """``lut``, ``ff``, ``bram``, ``dsp`` and ``mhz`` (a static timing estimate) of a ``TensorUnit`` on an
    LFE5U-85F of speed grade 6, in the module of ``_framed``. Takes minutes.

    Raises Refusal for an impossible unit and without the tools, and RunFailed if the unit does not fit.
    """
    unit = Unit(rows, columns)
    versions = tool_versions()
    with tempfile.TemporaryDirectory(prefix="murmurate-pnr-") as name:
        folder = Path(name)
        netlist = synthesized(folder, _framed(unit))
        area_and_clock = routed(folder, netlist, _DEVICE[1:], seed, target_mhz)
    return {
        "rows": unit.rows,
        "columns": unit.columns,
        "device": _DEVICE[0],
        "speed": 6,
        "seed": seed,
        **area_and_clock,
        "provenance": "measured-pnr",
        "versions": versions,
    }


def _framed(size: Unit) -> str:
    """A module with two pins, so that distant pins do not limit the clock: a shift register for the unit's
    inputs, and the parity of its outputs."""
    from amaranth.back import rtlil
    from amaranth.hdl import Cat, Elaboratable, Module, Signal

    from murmurate.fpga.tensor_unit import TensorUnit

    class Frame(Elaboratable):
        def __init__(self) -> None:
            self.serial_in, self.serial_out = Signal(), Signal()

        def elaborate(self, platform: Any) -> Any:
            m = Module()
            m.submodules.unit = unit = TensorUnit(size.rows, size.columns)
            ports = [unit.weights, unit.inputs]
            inputs = [s for p in ports for s in (p.valid, p.payload.as_value())]
            inputs.append(unit.sums.ready)
            outputs = Cat(unit.inputs.ready, unit.sums.valid, unit.sums.payload.as_value())
            register, seen = Signal(sum(len(x) for x in inputs)), Signal(len(outputs))
            m.d.sync += [register.eq(Cat(self.serial_in, register[:-1])), seen.eq(outputs)]
            m.d.comb += Cat(*inputs).eq(register)
            parity: Any = seen
            while len(parity) > 1:  # each stage takes the parity of four bits at a time
                stage = Signal(-(-len(parity) // 4))
                m.d.sync += stage.eq(Cat(parity[i : i + 4].xor() for i in range(0, len(parity), 4)))
                parity = stage
            m.d.comb += self.serial_out.eq(parity)
            return m

    frame = Frame()
    return str(rtlil.convert(frame, ports=[frame.serial_in, frame.serial_out], emit_src=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m murmurate.fpga.learner_area ROWS COLUMNS``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m murmurate.fpga.learner_area",
        description="Area and clock of one tensor unit by place and route (minutes), as JSON.",
    )
    parser.add_argument("rows", type=int)
    parser.add_argument("columns", type=int)
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(place_and_route_unit(options.rows, options.columns), indent=2))
    except (Refusal, RunFailed) as error:
        print(f"murmurate: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refusal) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
