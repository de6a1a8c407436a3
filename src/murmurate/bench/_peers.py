"""Peers that cannot share our environment: each runs in its own, through ``benchmarks/peers/<name>/run.py``.

A runner prints one JSON object as its last line, with at least ``env_steps`` and ``cpu_seconds`` of its
whole process tree, start-up excluded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from murmurate.bench._result import Log

PEERS = ("sample-factory", "cleanrl")
_DEADLINE_SECONDS = 600.0


def entries(full: bool, log: Log) -> list[dict[str, Any]]:
    """One entry a peer: its figures, or why there are none."""
    return [_entry(name, full, log) for name in PEERS]


def home() -> Path:
    """Where the peers' folders are: ``MURMURATE_PEERS``, or ``benchmarks/peers`` of the checkout."""
    given = os.environ.get("MURMURATE_PEERS")
    if given:
        return Path(given)
    checkout = Path(__file__).parents[3] / "benchmarks" / "peers"
    return checkout if checkout.is_dir() else Path("benchmarks", "peers")


def _entry(name: str, full: bool, log: Log) -> dict[str, Any]:
    folder = home() / name
    python = folder / ".venv" / "bin" / "python"
    if not python.exists():
        how = f"benchmarks/peers/{name}/README.md says how, or set MURMURATE_PEERS"
        return {"peer": name, "status": f"not installed: it needs its own virtual environment; {how}"}
    if not full:
        return {"peer": name, "status": f"not run: murmurate bench {'atari-throughput'} --full"}
    log(f"running {name}")
    process = subprocess.Popen(
        [str(python), str(folder / "run.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    try:
        said, complaint = process.communicate(timeout=_DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"peer": name, "status": f"failed: not done within {_DEADLINE_SECONDS:g} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has started ends with it
    try:
        told: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        rate = told["env_steps"] / told["cpu_seconds"]
    except (ValueError, KeyError, IndexError):
        return {"peer": name, "status": f"failed: {complaint.strip()[-300:]}"}
    return {"peer": name, "status": "ran", "env_steps_per_cpu_second": rate, **told}
