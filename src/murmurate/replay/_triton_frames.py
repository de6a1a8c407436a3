"""Reads windows of frames from a GPU's memory in one Triton kernel; equivalent to torch's index_select."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from murmurate.native import gpu

_PROGRAM_BYTES = 4096  # bytes that one program copies


@triton.jit
def _gather(frames, first, out, frame_bytes, window_bytes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = byte < window_bytes
    start = tl.load(first + row) * frame_bytes
    tl.store(out + row * window_bytes + byte, tl.load(frames + start + byte, mask=valid), mask=valid)


def gather(frames: Tensor, first: Tensor, out: Tensor) -> None:
    """out[b] <- the ``out.shape[1]`` frames from frame ``first[b]`` on.

    frames: [F, (C,) H, W] uint8. first: [B] int64. out: [B, window, (C,) H, W] uint8. All tensors are
    contiguous and on one device.
    """
    if not out.numel():
        return
    window_bytes = out[0].numel()
    (blocks,), block_bytes = gpu.block(window_bytes, _PROGRAM_BYTES)
    with gpu.on(out.device):
        _gather[(len(out), blocks)](frames, first, out, frames[0].numel(), window_bytes, BLOCK=block_bytes)
