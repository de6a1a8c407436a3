"""How a vector is written on the wire: as it is, in bfloat16, or in 8 bits a number.

Only floating-point vectors are compressed, and only those of mail and register: collectives promise all
members the same bits, and a broadcast the root's.
"""

from __future__ import annotations

import threading
from typing import Literal, Protocol

import torch
from torch import Tensor

from murmurate.buffers import Bytes, as_tensor

Compression = Literal["none", "bfloat16", "int8"]
BLOCK = 1024  # numbers that share one scale
_COPIED_BYTES = 1 << 20  # at a time, while somebody sends behind


class Room(Protocol):
    """Where a wire is written: a pool, or a place."""

    def take(self, size_bytes: int) -> Bytes: ...


class Codec(Protocol):
    """Vectors [N] of one dtype to and from ``wire_bytes`` bytes each."""

    wire_bytes: int
    exact: bool

    def encode(self, x: Tensor, room: Room) -> Bytes:
        """``x``: [N], on any device; a copy."""
        ...

    def begin(self, x: Tensor, room: Room) -> Filling:
        """As ``encode``, but the copy may be made later (``Filling.finish``)."""
        ...

    def decode(self, wire: Bytes) -> Tensor:
        """[N] on the CPU; over the same memory where nothing has to be computed."""
        ...


class Filling:
    """A vector on its way into its wire: it may be sent straight from where it comes from, and copied
    afterwards, or be sent behind the copy. All is in the wire, and ``x`` may change, after ``finish``."""

    def __init__(self, wire: Bytes, source: Tensor | None = None) -> None:
        self.wire = wire
        self._source = None if source is None else source.view(torch.uint8)
        self._copy = as_tensor(wire, torch.uint8)
        self._done = 0 if source is not None else wire.nbytes
        self._more = threading.Condition()

    def read(self, start: int, stop: int) -> memoryview:
        """Those bytes, from where they are now."""
        whole = self._copy if self._source is None else self._source
        return whole[start:stop].numpy().data

    def upto(self, stop: int) -> None:
        """Have the first ``stop`` bytes in the wire."""
        if self._source is not None and stop > self._done:
            self._copy[self._done : stop].copy_(self._source[self._done : stop])
            with self._more:
                self._done = stop
                self._more.notify_all()

    def finish(self) -> None:
        try:
            for stop in range(self._done + _COPIED_BYTES, self.wire.nbytes, _COPIED_BYTES):
                self.upto(stop)
        finally:  # whatever interrupts us: others wait for this copy, and it has been promised
            self.upto(self.wire.nbytes)
            self._source = None

    @property
    def complete(self) -> bool:
        return self._done >= self.wire.nbytes

    def wait(self, stop: int) -> None:
        """Until another thread has brought ``upto`` there."""
        if self._done < stop:
            with self._more:
                self._more.wait_for(lambda: self._done >= stop)


class Behind:
    """Reads a wire no further than it has been filled."""

    def __init__(self, filling: Filling) -> None:
        self._filling = filling

    def read(self, start: int, stop: int) -> memoryview:
        self._filling.wait(stop)
        return self._filling.wire[start:stop].data

    def upto(self, stop: int) -> None:
        """Not ours to do."""


class Plain:
    """The numbers as they are in memory (all members are of one byte order)."""

    exact = True

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.wire_bytes = count * dtype.itemsize
        self._dtype = dtype

    def encode(self, x: Tensor, room: Room) -> Bytes:
        wire = room.take(self.wire_bytes)
        as_tensor(wire, self._dtype).copy_(x.detach().reshape(-1))
        return wire

    def begin(self, x: Tensor, room: Room) -> Filling:
        if x.device.type != "cpu":
            return Filling(self.encode(x, room))
        return Filling(room.take(self.wire_bytes), x.detach().reshape(-1).to(self._dtype))

    def decode(self, wire: Bytes) -> Tensor:
        return as_tensor(wire, self._dtype)


class Half:
    """bfloat16: the upper half of a float32, rounded to nearest even."""

    exact = False

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.wire_bytes = count * 2
        self._dtype = dtype

    def encode(self, x: Tensor, room: Room) -> Bytes:
        wire = room.take(self.wire_bytes)
        as_tensor(wire, torch.bfloat16).copy_(x.detach().reshape(-1))
        return wire

    def begin(self, x: Tensor, room: Room) -> Filling:
        return Filling(self.encode(x, room))

    def decode(self, wire: Bytes) -> Tensor:
        return as_tensor(wire, torch.bfloat16).to(self._dtype)


class Byte:
    """A whole number from -127 to 127 each, and a float32 scale for each 1024 of them.

    The scale is the block's largest magnitude over 127, so nothing is clipped and each number is off by
    at most half a scale. A block that is not finite arrives as NaN throughout: it must not look healthy.
    """

    exact = False

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._count, self._dtype = count, dtype
        self._blocks = -(-count // BLOCK)
        self._scales_bytes = self._blocks * 4
        self.wire_bytes = self._scales_bytes + count

    def encode(self, x: Tensor, room: Room) -> Bytes:
        wire = room.take(self.wire_bytes)
        scales, numbers = self._parts(wire)
        padded = torch.zeros(self._blocks * BLOCK, dtype=self._dtype)
        padded[: self._count].copy_(x.detach().reshape(-1))
        blocks = padded.view(self._blocks, BLOCK)
        scale = (blocks.abs().amax(1) / 127).to(torch.float32)
        scales.copy_(torch.where(torch.isfinite(scale), scale, torch.nan))
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).to(self._dtype)
        rounded = (blocks / divisor[:, None]).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
        numbers.copy_(rounded.view(-1)[: self._count])
        return wire

    def begin(self, x: Tensor, room: Room) -> Filling:
        return Filling(self.encode(x, room))

    def decode(self, wire: Bytes) -> Tensor:
        scales, numbers = self._parts(wire)
        each = scales.to(self._dtype).repeat_interleave(BLOCK)[: self._count]
        return each.mul_(numbers)

    def _parts(self, wire: Bytes) -> tuple[Tensor, Tensor]:
        whole = as_tensor(wire, torch.uint8)
        return whole[: self._scales_bytes].view(torch.float32), whole[self._scales_bytes :].view(torch.int8)


def codec(compression: Compression, count: int, dtype: torch.dtype) -> Codec:
    """The codec for vectors of ``count`` numbers. Raises ValueError for an unknown name."""
    kinds: dict[str, type[Plain] | type[Half] | type[Byte]] = {"none": Plain, "bfloat16": Half, "int8": Byte}
    if compression not in kinds:
        raise ValueError(f"compression is one of {', '.join(kinds)}, not '{compression}'")
    compressible = dtype in (torch.float32, torch.float64)
    return kinds[compression if compressible else "none"](count, dtype)


class Feedback:
    """Error feedback: what rounding kept back of one message goes with the stream's next.

    So the sum of all that arrived and of what is kept back is the sum of all that was sent, up to the
    rounding of the additions (Seide et al. 2014; Karimireddy et al. 2019, Algorithm 1).
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.residual: Tensor | None = None

    def begin(self, x: Tensor, room: Room) -> Filling:
        if self._codec.exact:
            return self._codec.begin(x, room)
        return Filling(self.encode(x, room))

    def encode(self, x: Tensor, room: Room) -> Bytes:
        if self._codec.exact:
            return self._codec.encode(x, room)
        whole = x.detach().reshape(-1).to("cpu", copy=True)
        if self.residual is not None:
            whole += self.residual
        wire = self._codec.encode(whole, room)
        rest = whole.sub_(self._codec.decode(wire))
        # a delta that is not finite must not spoil all later ones
        self.residual = rest if bool(torch.isfinite(rest).all()) else None
        return wire
