"""Reads windows of frames from a GPU's memory in one Triton kernel; its twin is torch's index_select."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from murmurate.native import gpu

_BYTES = 4096  # of a program


@triton.jit
def _gather(frames, first, out, frame_bytes, window_bytes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < window_bytes
    start = tl.load(first + row) * frame_bytes
    tl.store(out + row * window_bytes + at, tl.load(frames + start + at, mask=inside), mask=inside)


def gather(frames: Tensor, first: Tensor, out: Tensor) -> None:
    """out[b] <- the ``out.shape[1]`` frames from frame ``first[b]`` [B] int64 on; frames are
    uint8, and all is contiguous and on one device. frames: [F, (C,) H, W]. out: [B, window, (C,) H, W]."""
    if not out.numel():
        return
    window = out[0].numel()
    (parts,), size = gpu.block(window, _BYTES)
    _gather[(len(out), parts)](frames, first, out, frames[0].numel(), window, BLOCK=size)
