"""Area and clock of a replay manager on an ECP5, by Yosys and nextpnr (from YoWASP): no board is needed."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal
from murmurate.fpga.outputs import use_output_registers
from murmurate.fpga.shape import TreeShape
from murmurate.fpga.tools import routed, synthesized, tool_versions
from murmurate.fpga.verilog import measured_rtlil

DEVICES = {"lfe5u-25f": "--25k", "lfe5u-45f": "--45k", "lfe5u-85f": "--85k"}
_PACKAGE = {"lfe5u-25f": "CABGA381", "lfe5u-45f": "CABGA554", "lfe5u-85f": "CABGA756"}


def place_and_route(
    shape: TreeShape,
    row_bits: int = 0,
    *,
    device: str = "lfe5u-85f",
    seed: int = 1,
    speed: int = 6,
    target_mhz: float = 150.0,
) -> dict[str, Any]:
    """The results of one run: ``lut``, ``ff``, ``bram``, ``dsp`` and ``mhz`` (a static timing estimate), with
    the settings and versions that they depend on. Takes minutes.

    row_bits: see ``ReplayManager``. speed: speed grade of the device. target_mhz: clock that placement aims
    at. Raises Refusal for an unknown device and without the tools, and RunFailed with the tool's last line if
    the design does not fit.
    """
    if device not in DEVICES:
        raise Refusal(f"there is no device '{device}'. Use --device {' or '.join(DEVICES)}.")
    versions = tool_versions()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="murmurate-pnr-") as name:
        folder = Path(name)
        netlist = synthesized(folder, measured_rtlil(shape, row_bits))
        absorbed = use_output_registers(netlist)
        options = (DEVICES[device], "--package", _PACKAGE[device], "--speed", str(speed))
        area_and_clock = routed(folder, netlist, options, seed, target_mhz)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "leaves": shape.leaves,
        "fan_out": shape.fan_out,
        "width": shape.width,
        "row_bits": row_bits,
        "device": device,
        "speed": speed,
        "seed": seed,
        **area_and_clock,
        "output_registers": absorbed,
        "sample_cycles": shape.sample_latency + (shape.row_cycles if row_bits else 0),
        "update_cycles": shape.update_latency,
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "versions": versions,
    }
