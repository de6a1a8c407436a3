"""Gathers arbitrary tensors of all members, as the basis of the collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmurate.buffers import as_bytes
from murmurate.fabric.interface import Fabric, FabricError

_SMALL_BYTES, _LARGE_BYTES = 1 << 12, 1 << 20
_LENGTHS_BYTES = 16  # the lengths of the message and of its header, int64 each


class Contribution(NamedTuple):
    """One member's tensors (on the CPU), and whether any of them requires a gradient."""

    tensors: list[Tensor]
    wants_gradient: bool


class NoExchange:
    """Stands for a ``TensorExchange`` in a group of one."""

    rank, size = 0, 1
    bytes = 0

    def gather(
        self, call: str, tensors: Sequence[Tensor], wants_gradient: bool = False
    ) -> dict[int, Contribution]:
        return {0: Contribution([x.detach().to("cpu", copy=True) for x in tensors], wants_gradient)}


class TensorExchange:
    """Gathers tensors of any number, shape and dtype over two channels of fixed length.

    The first channel is long enough for most batch statistics; the second carries the rest of longer messages
    in pieces. members: the group's ranks in the fabric; None: all. All members must make this object at the
    same point, and call ``gather`` in the same way. Ranks are positions in the group.
    """

    def __init__(self, fabric: Fabric, members: Sequence[int] | None = None) -> None:
        small, large = (torch.zeros(size, dtype=torch.uint8) for size in (_SMALL_BYTES, _LARGE_BYTES))
        self._small = fabric.channel("collectives.short", small, members)
        self._large = fabric.channel("collectives.long", large, members)
        self.rank, self.size = self._small.rank, self._small.size
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorExchange:
        """This object, as the channels are those of this run."""
        return self

    @property
    def bytes(self) -> int:
        return self._small.traffic.bytes + self._large.traffic.bytes

    @property
    def waiting_seconds(self) -> float:
        """Seconds spent waiting for other members so far."""
        return self._small.traffic.waiting_seconds + self._large.traffic.waiting_seconds

    def gather(
        self, call: str, tensors: Sequence[Tensor], wants_gradient: bool = False
    ) -> dict[int, Contribution]:
        """The contribution of each living member, by rank. call: the name of the collective.

        Raises FabricError on all members if their calls differ, and at the fabric's deadline if a living
        member does not call.
        """
        self._calls += 1
        header = {
            "call": call,
            "number": self._calls,
            "gradient": wants_gradient,
            "tensors": [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors],
        }
        arrived = self._exchange(_pack(header, tensors))
        messages = {rank: _unpack(message) for rank, message in arrived.items()}
        self._adopt_number(messages)
        own_header = messages[self.rank][0]
        for rank, (header, _) in messages.items():
            if _must_match(header) != _must_match(own_header):
                raise FabricError(
                    f"rank {rank} calls {_in_words(header)} where rank {self.rank} calls "
                    f"{_in_words(own_header)}. Make the same collective calls on all replicas, in one order, "
                    "also in backward passes."
                )
        return {
            rank: Contribution(tensors, bool(header["gradient"]))
            for rank, (header, tensors) in messages.items()
        }

    def _adopt_number(self, messages: dict[int, tuple[dict[str, Any], list[Tensor]]]) -> None:
        """At its first call, a member that joined late takes over the others' number of calls."""
        newest = max(header["number"] for header, _ in messages.values())
        for header, _ in messages.values():
            if header["number"] == 1:
                header["number"] = newest
        if self._calls == 1:
            self._calls = newest

    def _exchange(self, message: Tensor) -> dict[int, Tensor]:
        pieces = {
            rank: [piece] for rank, piece in self._small.gather(_padded(message, 0, _SMALL_BYTES)).items()
        }
        lengths = {rank: int(piece[0][:8].view(torch.int64)) for rank, piece in pieces.items()}
        for start in range(_SMALL_BYTES, max(lengths.values()), _LARGE_BYTES):
            next_pieces = self._large.gather(_padded(message, start, _LARGE_BYTES))
            # a member that died in between is left out of the whole call, on all members
            pieces = {
                rank: [*before, next_pieces[rank]] for rank, before in pieces.items() if rank in next_pieces
            }
        return {rank: torch.cat(received)[: lengths[rank]] for rank, received in pieces.items()}


def _padded(message: Tensor, start: int, length: int) -> Tensor:
    piece = message[start : start + length]
    if piece.numel() == length:
        return piece
    return torch.cat([piece, piece.new_zeros(length - piece.numel())])


def _pack(header: dict[str, Any], tensors: Sequence[Tensor]) -> Tensor:
    """A message (uint8): length of the message, length of the header, header, contents of the tensors."""
    encoded = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    data = [as_bytes(x) for x in tensors]
    total = _LENGTHS_BYTES + encoded.numel() + sum(d.numel() for d in data)
    lengths = torch.tensor([total, encoded.numel()]).view(torch.uint8)
    return torch.cat([lengths, encoded, *data])


def _unpack(message: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
    offset = _LENGTHS_BYTES + int(message[8:16].clone().view(torch.int64))
    header: dict[str, Any] = json.loads(bytes(message[_LENGTHS_BYTES:offset].tolist()))
    tensors = []
    for name, shape in header["tensors"]:
        dtype: torch.dtype = getattr(torch, name)
        length = torch.Size(shape).numel() * dtype.itemsize
        # cloned, so that it is aligned for its dtype
        tensors.append(message[offset : offset + length].clone().view(dtype).view(shape))
        offset += length
    return header, tensors


def _must_match(header: dict[str, Any]) -> tuple[Any, ...]:
    """The part of a header that must be the same on all members: all but whether a gradient is wanted, and
    the first dimension of tensors that are gathered."""
    is_gather = header["call"].startswith("gather")
    return (
        header["call"],
        header["number"],
        [(dtype, shape[1:] if is_gather else shape) for dtype, shape in header["tensors"]],
    )


def _in_words(header: dict[str, Any]) -> str:
    """A call in words, for an error message."""
    tensors = ", ".join(f"{dtype}{shape}" for dtype, shape in header["tensors"][:4])
    more = len(header["tensors"]) - 4
    return (
        f"{header['call']} (number {header['number']}) of {tensors}{f' and {more} more' if more > 0 else ''}"
    )
