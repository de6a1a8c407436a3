"""Where kernels in Triton can run. For each of them there is an equivalent in torch."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1, set before the process starts): on a
    CPU, with numpy, one program after the other."""
    if not installed():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def why_not(device: torch.device) -> str:
    """Why Triton's kernels do not run on tensors of ``device``; empty if they run."""
    if device.type not in ("cuda", "cpu"):
        return f"Triton's kernels run on CUDA devices, not on {device}"
    if not installed():
        return "the package triton is not installed; run: pip install 'murmurate[gpu]'"
    if device.type == "cpu" and not interpreted():
        return "Triton's kernels run on CUDA devices; on a CPU its interpreter does, with TRITON_INTERPRET=1"
    return ""


def on(device: torch.device) -> AbstractContextManager[object]:
    """Within this context kernels run on ``device``: Triton launches them on torch's current device, wherever
    their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def block(count: int, size: int) -> tuple[tuple[int], int]:
    """(grid, elements of a program) for ``count`` elements: ``size`` elements on a GPU; in the interpreter,
    whose cost is per operation, up to 2**16."""
    if interpreted():
        size = min(1 << 16, 1 << max(count - 1, 0).bit_length())
    return (-(-count // size),), size
