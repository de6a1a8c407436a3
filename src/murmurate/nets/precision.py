"""What ``precision = auto`` stands for on a device, and in which precision a module computes."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch
from torch import nn

Config = TypeVar("Config")

_SIDE: Final = 256  # of the matrices that are multiplied
_REPETITIONS: Final = 10


def native_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` has native bfloat16 arithmetic; emulated, it is many times slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return "avx512_bf16" in processors() or "amx_bf16" in processors()


@functools.cache
def processors() -> str:
    """What Linux says of the processors: their makers, names and instruction sets; elsewhere empty."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


@functools.cache
def faster_precision(device: torch.device) -> Literal["float32", "bfloat16"]:
    """bfloat16 where ``device`` has native arithmetic in it and multiplies matrices faster than in float32.

    Native arithmetic of GPUs is taken to be faster. On processors products are timed, once per process (about
    ten milliseconds): with AVX512_BF16 and without AMX some of Intel's take twice as long in bfloat16 as in
    float32, and some of AMD's half as long.
    """
    if not native_bfloat16(device):
        return "float32"
    if device.type == "cuda":
        return "bfloat16"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = _product_seconds()
    finally:
        torch.set_num_threads(threads)
    return "bfloat16" if seconds[torch.bfloat16] < seconds[torch.float32] else "float32"


def resolve_precision(config: Config, device: torch.device) -> Config:
    """``config`` with the ``precision`` that ``auto`` stands for on ``device``: float32 for the user's own
    nets, else see ``faster_precision``."""
    fields: Any = config
    if fields.precision != "auto":
        return config
    is_own_net = bool(getattr(fields, "network", ""))
    precision = "float32" if is_own_net else faster_precision(device)
    resolved: Config = dataclasses.replace(fields, precision=precision)
    return resolved


def first_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the module's first parameter, for forward passes: ``parameters()`` walks through the
    modules in 4 microseconds, a tenth of the pass of a small net."""
    inner = module
    while not inner._parameters and inner._modules:
        inner = next(child for child in inner._modules.values() if child is not None)
    weight = next(iter(inner._parameters.values()), None)
    return next(module.parameters()).dtype if weight is None else weight.dtype


def _product_seconds() -> dict[torch.dtype, float]:
    """The least time of a product of two matrices in each dtype, which take turns because others may use the
    processor, too."""
    ones = torch.ones(_SIDE, _SIDE)
    factors = {dtype: ones.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    least = dict.fromkeys(factors, float("inf"))
    with torch.no_grad():
        for _ in range(_REPETITIONS):
            for dtype, factor in factors.items():
                start = time.perf_counter()
                torch.mm(factor, factor)
                least[dtype] = min(least[dtype], time.perf_counter() - start)
    return least
