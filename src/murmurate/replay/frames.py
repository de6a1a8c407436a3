"""Transitions of stacked images: each image is stored once, and stacks are assembled when they are drawn.

A stream (the frames of one simulator) is a ring. A transition's slot is the slot of its observation's newest
frame. The window of frames around this slot contains s and s', which become views of one copy. At the start
of an episode all frames of its first stack are appended, so that neither s nor s' contains frames of another
episode; slots that belong to no transition are never drawn.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from murmurate import native
from murmurate.buffers import Pool, as_tensor
from murmurate.native import gpu
from murmurate.replay.async_copy import AsyncCopy
from murmurate.replay.interface import Chunk
from murmurate.replay.memory import Allocate, array, on_device, private
from murmurate.replay.returns import Integers

_CHUNK_BYTES = 16 << 20  # a checkpoint saves rings in chunks of this size


class FrameWindow(NamedTuple):
    """frames: [B, stack + n, (C,) H, W] uint8: s is the first ``stack`` frames, s' the last ``stack``.
    after: s' [B, stack, (C,) H, W] if some transitions are shorter than n steps; else None.

    Observations are [B, stack * C, H, W]."""

    frames: Tensor
    stack: int
    after: Tensor | None = None

    @property
    def observation(self) -> Tensor:
        return _joined(self.frames[:, : self.stack])

    @property
    def next_observation(self) -> Tensor:
        return _joined(self.frames[:, -self.stack :] if self.after is None else self.after)


def _joined(stack: Tensor) -> Tensor:
    """[B, S, C, H, W] as [B, S * C, H, W]; a view, also of a part of a window."""
    return stack.flatten(1, 2) if stack.dim() == 5 else stack


class Frames:
    """``streams`` rings of ``length`` frames each; slots are numbered stream after stream.

    shape: shape of a frame, [H, W] or [C, H, W]. stack: frames of an observation. steps: n, the number of
    steps from s to s'.
    The first stack + n - 1 frames of each ring are repeated behind its end, so that every window is
    contiguous.

    device: device whose memory holds the rings and the windows read from them (a learner's GPU); None: host
    memory from ``allocate``. Raises Refusal if a GPU has not enough memory, and ValueError for a ring shorter
    than two windows of stack + n frames.
    """

    def __init__(
        self,
        length: int,
        shape: tuple[int, ...],
        *,
        streams: int = 1,
        stack: int = 4,
        steps: int = 1,
        allocate: Allocate = private,
        device: torch.device | None = None,
    ) -> None:
        self.window = stack + steps
        if length < 2 * self.window:
            raise ValueError(
                f"a ring of {length} frames is too short for windows of {self.window}: give it at least "
                f"{2 * self.window}"
            )
        self.length, self.streams, self.stack, self.steps = length, streams, stack, steps
        self.shape = shape
        self.frame_bytes = int(np.prod(shape, dtype=np.int64))
        self._pitch = length + self.window - 1  # frames of a ring, with the repeated ones
        self._device = device
        if device is None:
            self._frames_array = array(allocate, "frames", (streams * self._pitch, *shape), np.uint8)
            self._frames = torch.from_numpy(self._frames_array)
        else:
            self._frames = on_device(device, "frames", (streams * self._pitch, *shape))
            self._uses_triton = not gpu.why_not(device)
        self._address = self._frames.data_ptr()
        self._pool = Pool()
        self._chunk_frames = max(1, _CHUNK_BYTES // self.frame_bytes)
        self._token = secrets.token_hex(4)  # distinguishes this object's chunks from those of earlier objects
        self._loaded_names: dict[tuple[int, int], str] = {}  # names of chunks, by stream and position

    def append(self, streams: Integers, heads: Integers, images: Tensor) -> None:
        """Append one of ``images`` [S, (C,) H, W] uint8 to each of ``streams`` [S].

        heads: [S], how many frames each stream has had. An image overwrites the frame that is ``length``
        frames older.
        """
        position = heads % self.length
        row = streams * self._pitch + position
        repeated = position < self.window - 1
        if self._device is not None:
            rows = np.concatenate((row, row[repeated] + self.length))
            images = torch.cat((images, images[torch.from_numpy(repeated)])) if repeated.any() else images
            self._frames[torch.from_numpy(rows).to(self._device)] = images.to(self._device)
            return
        new = images.numpy()
        self._frames_array[row] = new  # torch's index_copy_ takes five times as long
        if repeated.any():
            self._frames_array[row[repeated] + self.length] = new[repeated]

    def buffers(self, count: int, pinned: bool = False) -> Tensor:
        """[count, stack + n, (C,) H, W] for ``read`` to write into; reused once nothing refers to it."""
        if pinned and self._device is None:
            shape = (count, self.window, *self.shape)
            return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._empty(count, self.window)

    def _empty(self, count: int, frames: int) -> Tensor:
        """[count, frames, (C,) H, W]."""
        shape = (count, frames, *self.shape)
        if self._device is not None:
            return torch.empty(shape, dtype=torch.uint8, device=self._device)
        # pooled, because page faults on newly allocated memory would cost as much as the copy
        return as_tensor(self._pool.take(math.prod(shape)), torch.uint8).view(shape)

    def read(
        self,
        slots: Tensor,
        out: Tensor | None = None,
        steps: Integers | None = None,
        copier: AsyncCopy | None = None,
    ) -> FrameWindow:
        """The windows of the transitions at ``slots`` [B] int64. With a copier they are complete after its
        ``wait``. steps: [B], each transition's number of steps from s to s', at most n; None: n for all."""
        out = self.buffers(len(slots)) if out is None else out
        stream, newest = np.divmod(slots.numpy(), self.length)  # numpy has less overhead on a few numbers
        first = torch.from_numpy(stream * self._pitch + (newest - (self.stack - 1)) % self.length)
        self._gather(first, out, copier)
        if steps is None or (steps == self.steps).all():
            return FrameWindow(out, self.stack)
        after = self._empty(len(slots), self.stack)
        self._gather(first + torch.from_numpy(steps), after, copier)
        return FrameWindow(out, self.stack, after)

    def _gather(self, first: Tensor, out: Tensor, copier: AsyncCopy | None) -> None:
        """out[b] <- the ``out.shape[1]`` frames from frame ``first[b]`` on."""
        count = out.shape[1]
        if self._device is not None:
            first = first.to(self._device)
            if self._uses_triton:
                from murmurate.replay import _triton_frames

                return _triton_frames.gather(self._frames, first, out)
        if self._device is not None or native.kernels is None:
            rows = first[:, None] + torch.arange(count, device=first.device)
            torch.index_select(self._frames, 0, rows.view(-1), out=out.view(-1, *self.shape))
            return
        size = self.frame_bytes
        if copier is not None:
            copier.gather(self._frames, size, size * count, first, out)
        else:
            native.kernels.gather(
                self._address, size, size * count, first.data_ptr(), len(first), out.data_ptr()
            )

    def save(self, heads: list[int]) -> list[list[Chunk]]:
        """Each stream's frames [F, (C,) H, W] in the order of the ring, in chunks; views, or copies of what
        is on a GPU."""
        rings = self._frames.view(self.streams, self._pitch, *self.shape)
        saved = []
        for stream, head in enumerate(heads):
            end = min(head, self.length)
            starts = range(0, end, self._chunk_frames)
            spans = [(start, min(start + self._chunk_frames, end)) for start in starts]
            saved.append(
                [
                    Chunk(self._chunk_name(stream, head, *span), rings[stream, slice(*span)].cpu())
                    for span in spans
                ]
            )
        return saved

    def _chunk_name(self, stream: int, head: int, start: int, stop: int) -> str:
        """A name made of the chunk's range, its newest frame's number and this object's token: a chunk whose
        newest frame is the same has not changed, so a loaded chunk keeps its name until then."""
        last = head - 1 - (head - 1 - (stop - 1)) % self.length  # number of the frame at the chunk's end
        newest = head - 1 if start <= (head - 1) % self.length < stop else last
        prefix = f"frames-{stream}-{start}-{stop}-{newest}-"
        loaded_name = self._loaded_names.get((stream, start // self._chunk_frames), "")
        return loaded_name if loaded_name.startswith(prefix) else prefix + self._token

    def load(self, frames: Sequence[list[Chunk] | Tensor]) -> None:
        """Restore what ``save`` returned; older checkpoints have one tensor for each stream."""
        rings = self._frames.view(self.streams, self._pitch, *self.shape)
        self._loaded_names.clear()
        self._token = secrets.token_hex(4)  # frames appended from now on differ from those of other runs
        for stream, (ring, chunks) in enumerate(zip(rings, frames, strict=True)):
            end = 0
            for chunk in [Chunk("", chunks)] if isinstance(chunks, Tensor) else chunks:
                self._loaded_names[stream, end // self._chunk_frames] = chunk.name
                ring[end : end + len(chunk.values)].copy_(chunk.values)
                end += len(chunk.values)
            repeated = min(self.window - 1, end)  # frames repeated behind the end of the ring
            ring[self.length : self.length + repeated].copy_(ring[:repeated])
