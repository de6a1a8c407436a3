"""A sum tree: draw an index with a probability proportional to its priority, and set priorities, in O(log N).

Zhang 2022, sections 3.2.2 and 4.2.3: a node has K children, and one node is one cache line. The compiled tree
(``_native_tree``) stores in each line the prefix sums of its 16 children, so that a search compares the mass
with all of them at once (Differs: Algorithm 1 scans the K children, adding them up). The torch tree
(``_torch_tree``) supports any fan-out and any device that has float64; on CUDA devices a Triton tree
(``_triton_tree``) replaces it.

Sums do not drift: parents are recomputed from their children, and never by adding differences, so the
rounding error of a sum comes from log2(N) additions, however many updates were made.
"""

from __future__ import annotations

from typing import Literal

import torch

from murmurate import native
from murmurate.errors import Refusal
from murmurate.native import gpu
from murmurate.replay._native_tree import NativeTree
from murmurate.replay._torch_tree import TorchTree
from murmurate.replay.tree import NATIVE_FAN_OUT, SumTree

Backend = Literal["auto", "native", "torch", "triton"]
TRITON_FAN_OUT = 64  # the maximum, because the loop over a node's children is unrolled


def sum_tree(
    capacity: int,
    *,
    seed: int = 0,
    fan_out: int = NATIVE_FAN_OUT,
    backend: Backend = "auto",
    device: torch.device | str = "cpu",
    memory: memoryview | None = None,
    threads: int = 1,
) -> SumTree:
    """The fastest available tree with these properties.

    seed: seed of the draws, which are the same for every backend (unless its sums round differently).
    memory: at least ``tree_bytes(capacity)`` bytes for the tree, all 0, possibly shared; native tree only.
    threads: number of threads that search for large batches (16,384 draws and more); the result is the same
        to the bit. The torch tree uses torch's threads.

    Raises Refusal if ``backend`` is native or triton, and that tree is unavailable or does not support one of
    these arguments, and for a device without float64.
    """
    if capacity < 1:
        raise ValueError(f"a tree has at least one leaf, not {capacity}")
    if not fan_out >= 2:
        raise ValueError(f"a node has at least two children, not {fan_out}")
    if threads < 1:
        raise ValueError(f"a search has at least one thread, not {threads}")
    device = torch.device(device)
    if device.type == "mps":
        raise Refusal("a sum tree adds up in float64, which mps devices lack. Use device='cpu'.")
    why_not_native = _why_not_native(fan_out, device)
    resolved: str = backend
    if backend == "auto" and not why_not_native:
        resolved = "native"
    elif backend == "auto":
        resolved = "triton" if device.type == "cuda" and not _why_not_triton(fan_out, device) else "torch"
    elif backend == "native" and why_not_native:
        raise Refusal(f"backend is 'native', but {why_not_native}. Use backend='auto'.")
    elif backend == "triton" and (reason := _why_not_triton(fan_out, device)):
        raise Refusal(f"backend is 'triton', but {reason}. Use backend='auto'.")
    if resolved == "native":
        return NativeTree(capacity, seed, memory, threads)
    if memory is not None:
        raise Refusal(f"only the native sum tree takes memory: {why_not_native or f'backend is {resolved}'}.")
    if resolved == "triton":
        from murmurate.replay._triton_tree import TritonTree

        return TritonTree(capacity, fan_out, seed, device)
    return TorchTree(capacity, fan_out, seed, device)


def _why_not_native(fan_out: int, device: torch.device) -> str:
    """Why the native tree cannot be used; empty if it can."""
    if native.kernels is None:
        return f"the compiled kernels do not run ({native.simd})"
    if fan_out != NATIVE_FAN_OUT:
        return f"it has a fan-out of {NATIVE_FAN_OUT}, not {fan_out}"
    return "" if device.type == "cpu" else f"it lives in host memory, not on {device}"


def _why_not_triton(fan_out: int, device: torch.device) -> str:
    """Why the Triton tree cannot be used; empty if it can."""
    if fan_out > TRITON_FAN_OUT:
        return f"it has a fan-out of at most {TRITON_FAN_OUT}, not {fan_out}"
    return gpu.why_not(device)


def tree_bytes(capacity: int) -> int:
    """Bytes that the native tree of ``capacity`` leaves takes."""
    return NativeTree.bytes_needed(capacity)
