"""Learners that share one GPU: env steps per second, mean utilisation, energy per frame (GALA, Fig. 3)."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from murmurate.bench import _commands
from murmurate.bench._racer import temporary_folder
from murmurate.bench._result import Log, median
from murmurate.errors import RunFailed

LEARNERS = (1, 2, 4, 8)
_WINDOW_CPU_SECONDS = 5.0  # of each learner
_FRAMES_PER_ENV_STEP = 4
_SMI_OPTIONS = ("--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits", "--loop-ms=200")


@contextlib.contextmanager
def sampled(gpu: str) -> Iterator[list[tuple[float, float]]]:
    """A list that holds, after the context, a GPU's (utilisation in per cent, power in watts) over time.

    gpu: its name for ``nvidia-smi``. The list stays empty where there is no ``nvidia-smi``, or where it does
    not report both.
    """
    samples: list[tuple[float, float]] = []
    program = shutil.which("nvidia-smi")
    if program is None:
        yield samples
        return
    command = [program, f"--id={gpu}", *_SMI_OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield samples
        finally:
            process.terminate()
            output, _ = process.communicate()
            samples += [sample for line in output.splitlines() if (sample := parse(line))]


def first_gpu() -> str:
    """The name for ``nvidia-smi`` of torch's first GPU. Its number would not do: ``nvidia-smi`` also counts
    GPUs that ``CUDA_VISIBLE_DEVICES`` leaves out."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def parse(line: str) -> tuple[float, float] | None:
    """``"37, 71.20"`` as numbers; None for "[N/A]" and the like."""
    try:
        used, watts = (float(field) for field in line.split(","))
    except ValueError:
        return None
    return used, watts


def measure(log: Log) -> dict[str, Any]:
    """Env steps per second with 1, 2, 4 and 8 GALA learners on the first GPU that torch sees.

    ``energy_joules_per_frame`` is the mean power times the wall time, divided by the number of emulator
    frames. For a number of learners that does not fit on the GPU, the reason is reported.
    """
    rows = []
    with temporary_folder() as folder:
        for learners in LEARNERS:
            log(f"{learners} learner(s) on one GPU")
            rows.append(_row(learners, folder))
    return {"device": torch.cuda.get_device_name(0), "learners": rows}


def _row(learners: int, where: Path) -> dict[str, Any]:
    options = ("--replicas", str(learners), "--placement.devices", "cuda:0")
    racer = _commands.murmurate_train(f"gpu-{learners}", "pong-gala", where, *options)
    try:
        racer.start(warm_up_cpu_seconds=3.0 * learners)
        with sampled(first_gpu()) as samples:
            window = racer.window(_WINDOW_CPU_SECONDS * learners)
    except RunFailed as failure:
        return {"learners": learners, "status": f"failed: {failure}"}
    finally:
        racer.stop()
    row: dict[str, Any] = {
        "learners": learners,
        "status": "ran",
        "env_steps_per_second": window.per_second,
        "env_steps_per_cpu_second": window.per_cpu_second,
        "utilisation_percent_mean": None,
        "energy_joules_per_frame": None,
    }
    if not samples:
        return row | {"note": "nvidia-smi gave no utilisation and power"}
    utilisation, watts = zip(*samples, strict=True)
    joules = statistics.fmean(watts) * window.wall_seconds
    return row | {
        "utilisation_percent_mean": statistics.fmean(utilisation),
        "energy_joules_per_frame": joules / (_FRAMES_PER_ENV_STEP * window.env_steps),
        "power_watts_median": median(watts),
    }
