"""Transitions of stacked images: each image is stored once, and stacks are assembled when they are drawn.

A stream (the frames of one simulator) is a ring. A transition's slot is the one of its observation's newest
frame; the window of frames around it contains s and s' as views of one copy. At the start of an episode all
frames of its first stack are appended, so that no window crosses into another episode; slots whose window
would are never drawn.
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

_CHUNK_BYTES = 16 << 20  # of a ring, in a checkpoint


class FrameWindow(NamedTuple):
    """frames: [B, stack + n, (C,) H, W] uint8. s is the first ``stack`` of them, s' the last ``stack``.
    after: [B, stack, (C,) H, W], s' where some transitions are shorter than n steps; else None.

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
    """Rings of ``length`` frames, one for each of ``streams``; slots are numbered stream after stream.

    shape: shape of a frame, [H, W] or [C, H, W]. stack: frames of an observation. steps: n, from s to s'.
    The first stack + n - 1 frames of each ring are repeated behind its end, so that every window is
    contiguous.

    device: whose memory holds them, and the windows read from them, as for a learner on a GPU; None: the
    host's, as ``allocate`` gives it. Raises Refusal if a GPU has not enough memory.
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
        self._pitch = length + self.window - 1  # frames of a ring and the repeated ones
        self._device = device
        if device is None:
            self._whole = array(allocate, "frames", (streams * self._pitch, *shape), np.uint8)
            self._frames = torch.from_numpy(self._whole)
        else:
            self._frames = on_device(device, "frames", (streams * self._pitch, *shape))
            self._fused = not gpu.why_not(device)
        self._address = self._frames.data_ptr()
        self._pool = Pool()
        self._chunk = max(1, _CHUNK_BYTES // self.frame_bytes)  # frames
        self._token = secrets.token_hex(4)  # tells chunks of this object from those of earlier ones
        self._names: dict[tuple[int, int], str] = {}  # of chunks as they were loaded

    def append(self, streams: Integers, heads: Integers, images: Tensor) -> None:
        """Images [S, (C,) H, W] uint8, one for each of ``streams`` [S], numbered ``heads`` [S] in them; each
        takes the place of the one ``length`` before it."""
        at = heads % self.length
        place = streams * self._pitch + at
        if self._device is not None:
            again = at < self.window - 1
            places = np.concatenate((place, place[again] + self.length))
            images = torch.cat((images, images[torch.from_numpy(again)])) if again.any() else images
            self._frames[torch.from_numpy(places).to(self._device)] = images.to(self._device)
            return
        new = images.numpy()
        self._whole[place] = new  # torch's index_copy_ takes five times as long
        again = at < self.window - 1
        if again.any():
            self._whole[place[again] + self.length] = new[again]

    def buffers(self, count: int, pinned: bool = False) -> Tensor:
        """[count, stack + n, (C,) H, W] for ``read`` to write into; reused once nothing refers to it."""
        shape = (count, self.window, *self.shape)
        if self._device is not None:
            return torch.empty(shape, dtype=torch.uint8, device=self._device)
        if pinned:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        # page faults on newly allocated memory would cost as much as the copy
        return as_tensor(self._pool.take(math.prod(shape)), torch.uint8).view(shape)

    def read(
        self,
        slots: Tensor,
        out: Tensor | None = None,
        steps: Integers | None = None,
        copier: AsyncCopy | None = None,
    ) -> FrameWindow:
        """The windows of the transitions at ``slots`` [B] int64 (their observation's newest frames). With a
        copier they are complete after its ``wait``. steps: [B], from s to s', at most n; None: n for all."""
        out = self.buffers(len(slots)) if out is None else out
        stream, newest = np.divmod(slots.numpy(), self.length)  # numpy has less overhead on a few numbers
        first = torch.from_numpy(stream * self._pitch + (newest - (self.stack - 1)) % self.length)
        self._gather(first, out, copier)
        if steps is None or (steps == self.steps).all():
            return FrameWindow(out, self.stack)
        shape = (len(slots), self.stack, *self.shape)
        if self._device is not None:
            after = torch.empty(shape, dtype=torch.uint8, device=self._device)
        else:
            after = as_tensor(self._pool.take(math.prod(shape)), torch.uint8).view(shape)
        self._gather(first + torch.from_numpy(steps), after, copier)
        return FrameWindow(out, self.stack, after)

    def _gather(self, first: Tensor, out: Tensor, copier: AsyncCopy | None) -> None:
        """out[b] <- the ``out.shape[1]`` frames from frame ``first[b]`` on."""
        count = out.shape[1]
        if self._device is not None:
            first = first.to(self._device)
            if self._fused:
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
            places = first.data_ptr(), len(first), out.data_ptr()
            native.kernels.gather(self._address, size, size * count, *places)

    def save(self, heads: list[int]) -> list[list[Chunk]]:
        """For each stream its frames [F, (C,) H, W] in the order of the ring, in chunks; views, or
        copies of what is on a GPU."""
        whole = self._frames.view(self.streams, self._pitch, *self.shape)
        saved = []
        for stream, head in enumerate(heads):
            end = min(head, self.length)
            bounds = [(start, min(start + self._chunk, end)) for start in range(0, end, self._chunk)]
            parts = [(self._name(stream, head, *at), whole[stream, slice(*at)].cpu()) for at in bounds]
            saved.append([Chunk(*part) for part in parts])
        return saved

    def _name(self, stream: int, head: int, start: int, stop: int) -> str:
        """A name made of the chunk's place, its newest frame's number and this object's token: a chunk whose
        newest frame is the same has not changed."""
        last = head - 1 - (head - 1 - (stop - 1)) % self.length  # the frame in the chunk's last place
        newest = head - 1 if start <= (head - 1) % self.length < stop else last
        where = f"frames-{stream}-{start}-{stop}-{newest}-"
        loaded = self._names.get((stream, start // self._chunk), "")
        return loaded if loaded.startswith(where) else where + self._token

    def load(self, frames: Sequence[list[Chunk] | Tensor]) -> None:
        """Restore what ``save`` returned; older checkpoints have one tensor for each stream."""
        whole = self._frames.view(self.streams, self._pitch, *self.shape)
        self._names.clear()
        self._token = secrets.token_hex(4)  # frames appended from now on differ from those of other runs
        for number, (stream, chunks) in enumerate(zip(whole, frames, strict=True)):
            end = 0
            listed = [Chunk("", chunks)] if isinstance(chunks, Tensor) else chunks
            for chunk in listed:
                self._names[number, end // self._chunk] = chunk.name
                stream[end : end + len(chunk.values)].copy_(chunk.values)
                end += len(chunk.values)
            again = min(self.window - 1, end)  # the frames repeated behind the end
            stream[self.length : self.length + again].copy_(stream[:again])
