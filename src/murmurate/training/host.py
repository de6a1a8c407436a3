"""The hardware and the packages of this host, as run folders and results of benchmarks store them."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import murmurate
from murmurate import plugins

# that worlds are made of: other versions of these may be other environments
_PACKAGES = (
    "numpy", "gymnasium", "mujoco", "dm-control", "ale-py", "vizdoom", "gymnasium-robotics",
)  # fmt: skip


def versions() -> dict[str, str]:
    """The versions of Python, torch, this package, and of the packages of worlds and of plug-ins that are
    installed."""
    return {
        "murmurate": murmurate.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_package_versions(),
        **plugins.packages(),
    }


@functools.cache
def _package_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def hardware() -> dict[str, Any]:
    """The hardware of this host (``cores``: logical ones), as stored with every run and benchmark result."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
