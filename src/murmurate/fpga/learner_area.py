"""Area and clock of the learner, or of one of its units, on an ECP5, by Yosys and nextpnr."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.fpga.learner import EmulatedLearner
from murmurate.fpga.learner_model import Unit
from murmurate.fpga.tools import routed, synthesized, tool_versions
from murmurate.fpga.verilog import measured_learner_rtlil

_DEVICE = ("lfe5u-85f", "--85k", "--package", "CABGA756", "--speed", "6")
_SEED, _TARGET_MHZ = 1, 150.0
UNITS = ("tensor", "outer", "update")  # TensorUnit, OuterUnit and WeightUpdate
_SHIFTS = (5, 16)  # of WeightUpdate, for batches of 64 at a learning rate of 1/4, as in bench fpga-learner


def measured_units() -> list[dict[str, Any]]:
    """The committed results of ``place_and_route_unit``. Those before 2026-11-30 are of tensor units."""
    units: list[dict[str, Any]] = json.loads(Path(__file__).with_name("learner_units.json").read_text())
    return [{"unit": "tensor", **unit} for unit in units]


def slowest_unit() -> dict[str, Any]:
    """The committed result with the lowest clock, which whole designs are assumed to have."""
    return min(measured_units(), key=lambda unit: float(unit["mhz"]))


def place_and_route_unit(rows: int, columns: int, kind: str = "tensor") -> dict[str, Any]:
    """``lut``, ``ff``, ``bram``, ``dsp`` and ``mhz`` (a static timing estimate) of a unit of a kind in
    ``UNITS`` on an LFE5U-85F of speed grade 6, in the module of ``framed``. Takes minutes.

    Raises Refusal for an impossible unit and without the tools, and RunFailed if the unit does not fit.
    """
    unit = Unit(rows, columns)
    if kind not in UNITS:
        raise Refusal(f"there is no unit '{kind}'. Use --unit {' or '.join(UNITS)}.")
    if kind == "update" and unit != Unit(1, 1):
        raise Refusal(f"a weight update of {rows} x {columns}, and it updates one weight a cycle: give 1 1.")
    size = {"unit": kind, "rows": unit.rows, "columns": unit.columns}
    return size | _placed(lambda: _framed(kind, unit))


def place_and_route_learner(learner: EmulatedLearner, units: Sequence[Unit], batch: int) -> dict[str, Any]:
    """The same of a whole ``LearnerPipeline``, with ``layers``, ``batch`` and ``pipelines``. May take an
    hour.

    Raises Refusal as ``LearnerPipeline`` does and without the tools, and RunFailed if it does not fit.
    """
    size = {
        "layers": list(learner.layers),
        "batch": batch,
        "rate_shift": learner.rate_shift,
        "stochastic": learner.noises[0] is not None,
        "pipelines": learner.pipelines,
        "units": [[unit.rows, unit.columns] for unit in units],
    }
    return size | _placed(lambda: measured_learner_rtlil(learner, units, batch))


def _placed(rtlil: Callable[[], str]) -> dict[str, Any]:
    versions = tool_versions()
    with tempfile.TemporaryDirectory(prefix="murmurate-pnr-") as name:
        folder = Path(name)
        netlist = synthesized(folder, rtlil())
        area_and_clock = routed(folder, netlist, _DEVICE[1:], _SEED, _TARGET_MHZ)
    return {
        "device": _DEVICE[0],
        "speed": 6,
        "seed": _SEED,
        **area_and_clock,
        "provenance": "measured-pnr",
        "versions": versions,
    }


def _framed(kind: str, size: Unit) -> str:
    """The unit in the module of ``framed``."""
    from murmurate.fpga.frame import framed
    from murmurate.fpga.tensor_unit import OuterUnit, TensorUnit, WeightUpdate

    unit: Any
    if kind == "tensor":
        unit = TensorUnit(size.rows, size.columns)
    elif kind == "outer":
        unit = OuterUnit(size.rows, size.columns)
    else:
        unit = WeightUpdate(*_SHIFTS, stochastic=True)
    taken = [unit.weights, unit.inputs] if kind == "tensor" else [unit.inputs]
    given = unit.outputs if kind == "update" else unit.sums
    inputs = [s for port in taken for s in (port.valid, port.payload.as_value())]
    outputs = [unit.inputs.ready, given.valid, given.payload.as_value()]
    return framed("unit", unit, [*inputs, given.ready], outputs)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m murmurate.fpga.learner_area ROWS COLUMNS [--unit KIND]``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m murmurate.fpga.learner_area",
        description="Area and clock of one of the learner's units by place and route (minutes), as JSON.",
    )
    parser.add_argument("rows", type=int)
    parser.add_argument("columns", type=int)
    parser.add_argument("--unit", choices=UNITS, default=UNITS[0], help="its kind (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(place_and_route_unit(options.rows, options.columns, options.unit), indent=2))
    except (Refusal, RunFailed) as error:
        print(f"murmurate: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refusal) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
