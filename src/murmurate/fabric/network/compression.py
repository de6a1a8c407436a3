"""Formats in which vectors are sent: unchanged, in bfloat16, or with 8 bits per number.

Only float32 and float64 vectors of mail and register are compressed. The result of a collective must be
bitwise the same for all members, and that of a broadcast equal to the root's vector.
"""

from __future__ import annotations

import threading
from typing import Literal, Protocol

import torch
from torch import Tensor

from murmurate.buffers import Bytes, as_bytes, as_tensor

Compression = Literal["none", "bfloat16", "int8"]
BLOCK = 1024  # numbers that share one scale
_CHUNK_BYTES = 1 << 20  # copied at a time; meanwhile another thread can send what is already copied


class Encoder(Protocol):
    """Writes vectors [N] of ``dtype`` into buffers. exact: whether it writes their bytes unchanged."""

    exact: bool
    dtype: torch.dtype

    def encode(self, x: Tensor, wire: Bytes) -> None:
        """Write ``x`` [N], on any device, into ``wire`` [wire_bytes]."""
        ...


class Codec(Encoder, Protocol):
    """Writes vectors [N] into buffers of ``wire_bytes`` bytes, and reads them from there."""

    wire_bytes: int

    def decode(self, wire: Bytes) -> Tensor:
        """The vector [N], on the CPU; a view of ``wire`` if nothing has to be computed."""
        ...


class WireCopy:
    """A vector in the buffer ``wire``, or one that is still being copied there from ``source``.

    It may be sent directly from the source and copied afterwards, or another thread may send it from the
    buffer while it is copied. After ``finish`` the whole vector is in the buffer, and the source may change.
    """

    def __init__(self, wire: Bytes, source: Tensor | None = None) -> None:
        self.wire = wire
        self._source = None if source is None else as_bytes(source)
        self._target = as_tensor(wire, torch.uint8)
        self._copied = 0 if source is not None else wire.nbytes
        self._progress = threading.Condition()

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of the content, in the source if there still is one, else in the buffer."""
        return (self._target if self._source is None else self._source)[start:stop].numpy().data

    def copy_up_to(self, stop: int) -> None:
        """Copy the first ``stop`` bytes, unless that is done."""
        if self._source is not None and stop > self._copied:
            self._target[self._copied : stop].copy_(self._source[self._copied : stop])
            with self._progress:
                self._copied = stop
                self._progress.notify_all()

    def finish(self) -> None:
        try:
            for stop in range(self._copied + _CHUNK_BYTES, self.wire.nbytes, _CHUNK_BYTES):
                self.copy_up_to(stop)
        finally:  # even after an interrupt: other threads wait for this copy
            self.copy_up_to(self.wire.nbytes)
            self._source = None

    @property
    def complete(self) -> bool:
        return self._copied >= self.wire.nbytes

    def wait(self, stop: int) -> None:
        """Wait until another thread has copied the first ``stop`` bytes."""
        if self._copied < stop:
            with self._progress:
                self._progress.wait_for(lambda: self._copied >= stop)


class CopyReader:
    """Reads the buffer of a ``WireCopy``, waiting for the copying thread where necessary."""

    def __init__(self, copy: WireCopy) -> None:
        self._copy = copy

    def read(self, start: int, stop: int) -> memoryview:
        self._copy.wait(stop)
        return self._copy.wire[start:stop].data

    def copy_up_to(self, stop: int) -> None:
        """Does nothing, as the copying thread copies."""


def begin_copy(encoder: Encoder, x: Tensor, wire: Bytes) -> WireCopy:
    """Begin to write ``x`` into ``wire``. If ``x`` must be converted, all of it is written now; else it is
    copied while it is sent."""
    if encoder.exact and x.device.type == "cpu":
        return WireCopy(wire, x.to(encoder.dtype))
    encoder.encode(x, wire)
    return WireCopy(wire)


class ExactCodec:
    """Sends the numbers as they are in memory (all members have the same byte order)."""

    exact = True

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.dtype, self.wire_bytes = dtype, count * dtype.itemsize

    def encode(self, x: Tensor, wire: Bytes) -> None:
        as_tensor(wire, self.dtype).copy_(x.detach().reshape(-1))

    def decode(self, wire: Bytes) -> Tensor:
        return as_tensor(wire, self.dtype)


class Bfloat16Codec:
    """Sends bfloat16: the upper half of a float32, rounded to nearest even."""

    exact = False

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.dtype, self.wire_bytes = dtype, count * 2

    def encode(self, x: Tensor, wire: Bytes) -> None:
        as_tensor(wire, torch.bfloat16).copy_(x.detach().reshape(-1))

    def decode(self, wire: Bytes) -> Tensor:
        return as_tensor(wire, torch.bfloat16).to(self.dtype)


class Int8Codec:
    """Sends integers from -127 to 127, with one float32 scale for each block of 1024.

    The scale is the block's largest magnitude divided by 127, so nothing is clipped and the error of each
    number is at most half a scale. If any number of a block is not finite (or its scale is not, in float32),
    the whole block arrives as NaN, so that the problem is not hidden.
    """

    exact = False

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.dtype, self._count = dtype, count
        self._blocks = -(-count // BLOCK)
        self._scales_bytes = self._blocks * 4
        self.wire_bytes = self._scales_bytes + count

    def encode(self, x: Tensor, wire: Bytes) -> None:
        scales, numbers = self._parts(wire)
        padded = torch.zeros(self._blocks * BLOCK, dtype=self.dtype)
        padded[: self._count].copy_(x.detach().reshape(-1))
        blocks = padded.view(self._blocks, BLOCK)
        scale = (blocks.abs().amax(1) / 127).to(torch.float32)
        scales.copy_(torch.where(torch.isfinite(scale), scale, torch.nan))
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).to(self.dtype)
        rounded = (blocks / divisor[:, None]).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
        numbers.copy_(rounded.view(-1)[: self._count])

    def decode(self, wire: Bytes) -> Tensor:
        scales, numbers = self._parts(wire)
        return scales.to(self.dtype).repeat_interleave(BLOCK)[: self._count].mul_(numbers)

    def _parts(self, wire: Bytes) -> tuple[Tensor, Tensor]:
        """(scales [blocks], rounded numbers [N]): views of ``wire``"""
        octets = as_tensor(wire, torch.uint8)
        return octets[: self._scales_bytes].view(torch.float32), octets[self._scales_bytes :].view(torch.int8)


def codec(compression: Compression, count: int, dtype: torch.dtype) -> Codec:
    """The codec for vectors of ``count`` numbers; those of other types than float32 and float64 are sent
    unchanged. Raises ValueError for an unknown name."""
    kinds: dict[str, type[ExactCodec] | type[Bfloat16Codec] | type[Int8Codec]] = {
        "none": ExactCodec,
        "bfloat16": Bfloat16Codec,
        "int8": Int8Codec,
    }
    if compression not in kinds:
        raise ValueError(f"compression is one of {', '.join(kinds)}, not '{compression}'")
    compressible = dtype in (torch.float32, torch.float64)
    return kinds[compression if compressible else "none"](count, dtype)


class ErrorFeedback:
    """An encoder of one stream that adds the compression error of each message to the next message.

    So the sum of all vectors sent equals that of the decoded messages and the residual, up to the rounding of
    the additions (Seide et al. 2014; Karimireddy et al. 2019, Algorithm 1).
    """

    def __init__(self, codec: Codec) -> None:
        self.exact, self.dtype = codec.exact, codec.dtype
        self._codec = codec
        self.residual: Tensor | None = None

    def encode(self, x: Tensor, wire: Bytes) -> None:
        if self.exact:
            self._codec.encode(x, wire)
            return
        corrected = x.detach().reshape(-1).to("cpu", copy=True)
        if self.residual is not None:
            corrected += self.residual
        self._codec.encode(corrected, wire)
        residual = corrected.sub_(self._codec.decode(wire))
        # a residual that is not finite would make all later messages not finite, too
        self.residual = residual if bool(torch.isfinite(residual).all()) else None
