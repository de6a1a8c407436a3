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
_SEED, _TARGET_MHZ = 1, 150.0


def measured_units() -> list[dict[str, Any]]:
    """The committed results of ``place_and_route_unit``."""
    units: list[dict[str, Any]] = json.loads(Path(__file__).with_name("learner_units.json").read_text())
    return units


def slowest_unit() -> dict[str, Any]:
    """The committed result with the lowest clock, which whole designs are assumed to have."""
    return min(measured_units(), key=lambda unit: float(unit["mhz"]))


def place_and_route_unit(rows: int, columns: int) -> dict[str, Any]:
    """``lut``, ``ff``, ``bram``, ``dsp`` and ``mhz`` (a static timing estimate) of a ``TensorUnit`` on an
    LFE5U-85F of speed grade 6, in the module of ``framed``. Takes minutes.

    Raises Refusal for an impossible unit and without the tools, and RunFailed if the unit does not fit.
    """
    unit = Unit(rows, columns)
    versions = tool_versions()
    with tempfile.TemporaryDirectory(prefix="murmurate-pnr-") as name:
        folder = Path(name)
        netlist = synthesized(folder, _framed(unit))
        area_and_clock = routed(folder, netlist, _DEVICE[1:], _SEED, _TARGET_MHZ)
    return {
        "rows": unit.rows,
        "columns": unit.columns,
        "device": _DEVICE[0],
        "speed": 6,
        "seed": _SEED,
        **area_and_clock,
        "provenance": "measured-pnr",
        "versions": versions,
    }


def _framed(size: Unit) -> str:
    """The unit in the module of ``framed``."""
    from murmurate.fpga.frame import framed
    from murmurate.fpga.tensor_unit import TensorUnit

    unit = TensorUnit(size.rows, size.columns)
    inputs = [s for port in (unit.weights, unit.inputs) for s in (port.valid, port.payload.as_value())]
    outputs = [unit.inputs.ready, unit.sums.valid, unit.sums.payload.as_value()]
    return framed("unit", unit, [*inputs, unit.sums.ready], outputs)


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
