"""Other libraries in virtual environments of their own, run through ``benchmarks/peers/<name>/run.py``.

The peers of ``atari-throughput`` print one JSON object as their last line, with at least ``env_steps`` and
``cpu_seconds`` of the peer's whole process tree, start-up excluded.
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


def home() -> Path:
    """The folder of all peers: ``MURMURATE_PEERS``, or ``benchmarks/peers`` of the checkout."""
    if given := os.environ.get("MURMURATE_PEERS"):
        return Path(given)
    checkout = Path(__file__).parents[3] / "benchmarks" / "peers"
    return checkout if checkout.is_dir() else Path("benchmarks", "peers")


def command(name: str, script: str = "run.py") -> list[str]:
    """The peer's Python interpreter and script."""
    return [str(home() / name / ".venv" / "bin" / "python"), str(home() / name / script)]


def absent(name: str) -> str | None:
    """Why a peer cannot be run, None if it can."""
    if Path(command(name)[0]).exists():
        return None
    remedy = f"benchmarks/peers/{name}/README.md says how, or set MURMURATE_PEERS"
    return f"not installed: it needs its own virtual environment; {remedy}"


def entries(full: bool, log: Log) -> list[dict[str, Any]]:
    """For each peer of ``atari-throughput`` its figures, or why there are none."""
    return [{"peer": name, **_entry(name, full, log)} for name in PEERS]


def _entry(name: str, full: bool, log: Log) -> dict[str, Any]:
    if reason := absent(name):
        return {"status": reason}
    if not full:
        return {"status": "not run: murmurate bench atari-throughput --full"}
    log(f"running {name}")
    with subprocess.Popen(
        command(name),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        process_group=0,
    ) as process:
        try:
            output, errors = process.communicate(timeout=_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"status": f"failed: not done within {_DEADLINE_SECONDS:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # kills whatever it has started
    failed = {"status": f"failed: {errors.strip()[-300:]}"}
    if process.returncode:
        return failed
    try:
        figures: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        rate = figures["env_steps"] / figures["cpu_seconds"]
    except (ValueError, LookupError, TypeError, ZeroDivisionError):
        return failed
    return {"status": "ran", "env_steps_per_cpu_second": rate, **figures}
