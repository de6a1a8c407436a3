"""Learners that share one GPU: env steps per second, mean utilisation, energy a frame (GALA, Fig. 3)."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from murmurate.bench import _commands
from murmurate.bench._result import Log, median
from murmurate.errors import RunFailed

LEARNERS = (1, 2, 4, 8)
_QUERY = "utilization.gpu,power.draw"
_SAMPLE_SECONDS = 0.2
_WINDOW_CPU_SECONDS = 5.0  # for each learner


class Meter:
    """Samples a GPU's utilisation (per cent) and power (watts) while it is open."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.utilisation: list[float] = []
        self.watts: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)

    def _watch(self) -> None:
        while not self._over.is_set():
            sample = read_out(self.device)
            if sample is not None:
                self.utilisation.append(sample[0])
                self.watts.append(sample[1])
            self._over.wait(_SAMPLE_SECONDS)


def read_out(device: int) -> tuple[float, float] | None:
    """(utilisation in per cent, power in watts) as ``nvidia-smi`` says it; None where it does not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--id={device}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)
        return parse(answer.stdout)
    except (subprocess.SubprocessError, OSError):
        return None


def parse(answer: str) -> tuple[float, float] | None:
    """``"37, 71.20"`` as numbers; None for what a driver says instead where it cannot tell."""
    try:
        used, watts = (float(field) for field in answer.strip().splitlines()[0].split(","))
    except (ValueError, IndexError):
        return None
    return used, watts


def measure(log: Log) -> dict[str, Any]:
    """Env steps a second with 1, 2, 4 and 8 gossiping learners on the first GPU.

    ``energy_joules_per_frame`` is the mean power times the wall time over the emulator frames. A number
    of learners that does not fit is reported with its reason.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
        for learners in LEARNERS:
            log(f"{learners} learner(s) on one GPU")
            rows.append(_row(learners, Path(folder)))
    return {"device": torch.cuda.get_device_name(0), "learners": rows}


def _row(learners: int, where: Path) -> dict[str, Any]:
    options = ("--replicas", str(learners), "--placement.devices", "cuda:0")
    racer = _commands.ours(f"gpu-{learners}", "pong-gala", where, *options)
    try:
        racer.start(warm_up_cpu_seconds=3.0 * learners)
        with Meter() as meter:
            done = racer.window(_WINDOW_CPU_SECONDS * learners)
    except RunFailed as failure:
        return {"learners": learners, "status": f"failed: {failure}"}
    finally:
        racer.stop()
    row: dict[str, Any] = {
        "learners": learners,
        "status": "ran",
        "env_steps_per_second": done.per_second,
        "env_steps_per_cpu_second": done.per_cpu_second,
        "utilisation_percent_mean": None,
        "energy_joules_per_frame": None,
    }
    if meter.watts:
        row["utilisation_percent_mean"] = sum(meter.utilisation) / len(meter.utilisation)
        joules = sum(meter.watts) / len(meter.watts) * done.wall_seconds
        row["energy_joules_per_frame"] = joules / (4 * done.env_steps)
        row["power_watts_median"] = median(meter.watts)
    else:
        row["note"] = "nvidia-smi gave no utilisation and power"
    return row
