"""Collectives directly between the members, over their connections, and encrypted if these are.

Mean: member j receives the j-th share of every member's vector, takes the mean in the order of ranks, and
sends it to all. So each of n members sends 2 (n - 1) / n vectors, and receives as many.

Broadcast and gather: the root, or every member, sends its whole vector to all others. Under broadcast, the
others send messages without a vector, which say that they take part.

A vector is divided into buckets, so that one can be added while others are in flight. Local peers (members
on the same host) read the payloads in one another's shared memory.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from murmurate.buffers import as_tensor
from murmurate.fabric.interface import Traffic
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.engine import Attempt, EngineResult
from murmurate.fabric.network.frames import Frame, Kind

_LEAST_BUCKET_BYTES, _MOST_BUCKETS = 4 << 20, 8  # each bucket needs a region of shared memory for each peer
# Kinds of message, called pieces: a share of one member's bucket, the mean of a share, a whole bucket.
PIECE_ACTS = ("share", "mean", "whole")


@dataclass
class _Progress:
    """One member's state of a round that is being executed.

    out: the result: [1, N], or for a gather one row for each member. awaited: how many pieces from other
    members have not arrived yet. versions: by rank, the newest version of the member's register.
    """

    attempt: Attempt
    out: Tensor
    awaited: int
    versions: dict[int, int]
    shares: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by bucket, by rank


class ReduceScatter:
    """The ``Engine`` of one channel at one member. count: numbers of a vector, N."""

    def __init__(
        self, endpoint: Endpoint, identity: bytes, count: int, dtype: torch.dtype, traffic: Traffic
    ) -> None:
        self._endpoint, self._identity, self._traffic = endpoint, identity, traffic
        self._count, self._dtype = count, dtype
        self._arrived: dict[int, deque[tuple[int, Frame]]] = {}  # by round
        buckets = min(_MOST_BUCKETS, max(1, count * dtype.itemsize // _LEAST_BUCKET_BYTES))
        self._buckets = _split(0, count, buckets)

    def execute(self, attempt: Attempt) -> EngineResult | None:
        endpoint, others = self._endpoint, len(attempt.others)
        gathers = attempt.call == "gather"
        rows = others + 1 if gathers else 1
        data = endpoint.shared_buffers.take(rows * self._count * self._dtype.itemsize)
        awaited = 2 * others if attempt.call == "mean" else others
        progress = _Progress(
            attempt,
            as_tensor(data, self._dtype).view(rows, self._count),
            awaited * len(self._buckets),
            {endpoint.rank: attempt.published},
        )
        try:
            self._begin(progress)
            while progress.awaited:
                piece = self._next_piece(attempt)
                if piece is None or not self._store_piece(progress, *piece):
                    return None
        finally:
            with endpoint.lock:
                for old in [number for number in self._arrived if number <= attempt.round]:
                    del self._arrived[old]
        return EngineResult(data, progress.versions)

    def arrived(self, sender: int, frame: Frame) -> None:
        """A piece of this member's present or next round has arrived. To be called with the lock held."""
        self._arrived.setdefault(frame.version, deque()).append((sender, frame))

    def _next_piece(self, attempt: Attempt) -> tuple[int, Frame] | None:
        """The next piece: (sender, frame). None at the deadline, or if the attempt should be aborted."""
        with self._endpoint.lock:
            waiting = self._arrived.setdefault(attempt.round, deque())
            self._endpoint.wait(
                lambda: bool(waiting) or attempt.should_abort(), self._endpoint.deadline_seconds
            )
            return waiting.popleft() if waiting else None

    # -- a round ------------------------------------------------------------------------------------

    def _begin(self, progress: _Progress) -> None:
        """Send the others what they need of this member's vector, and keep what it needs itself."""
        attempt = progress.attempt
        x = attempt.x
        if attempt.call != "mean" and x is not None:
            progress.out[attempt.members.index(attempt.rank) if attempt.call == "gather" else 0].copy_(x)
        for bucket, (start, stop) in enumerate(self._buckets):
            if attempt.call != "mean" or x is None:
                self._post(attempt, attempt.others, "whole", bucket, None if x is None else x[start:stop])
                continue
            shares = _split(start, stop, len(attempt.members))
            for rank, (first, last) in zip(attempt.members, shares, strict=True):
                if rank == attempt.rank:
                    progress.shares.setdefault(bucket, {})[rank] = x[first:last]
                else:
                    self._post(attempt, [rank], "share", bucket, x[first:last])

    def _store_piece(self, progress: _Progress, sender: int, frame: Frame) -> bool:
        """Store a piece, and send the mean of a share once all have arrived; False if the piece does not
        belong to this round's call."""
        attempt, members, meta = progress.attempt, progress.attempt.members, frame.meta
        act, bucket, published = meta["act"], meta.get("bucket"), meta.get("published")
        if not isinstance(bucket, int) or not isinstance(published, int) or sender not in members:
            return False
        if not 0 <= bucket < len(self._buckets) or (meta.get("call"), meta.get("members")) != (
            attempt.call,
            members,
        ):
            return False  # the calls differ: the leader will report how
        progress.versions[sender] = published
        progress.awaited -= 1
        start, stop = self._buckets[bucket]
        x = None if frame.payload is None else as_tensor(frame.payload, self._dtype)
        if act == "whole" or x is None:
            row = members.index(sender) if attempt.call == "gather" else 0
            if x is not None:
                progress.out[row, start:stop].copy_(x)
            return True
        ranges = _split(start, stop, len(members))
        if act == "mean":
            first, last = ranges[members.index(sender)]
            progress.out[0, first:last].copy_(x)
            return True
        shares = progress.shares.setdefault(bucket, {})
        shares[sender] = x
        if len(shares) == len(members):
            first, last = ranges[members.index(attempt.rank)]
            self._send_mean(progress, bucket, shares, progress.out[0, first:last])
        return True

    def _send_mean(self, progress: _Progress, bucket: int, shares: dict[int, Tensor], mean: Tensor) -> None:
        """All members' shares have arrived: write their mean into ``mean``, and send it to all others."""
        first, *rest = (shares.pop(rank) for rank in sorted(shares))
        torch.add(first, rest[0], out=mean)
        for share in rest[1:]:
            mean += share
        mean /= len(rest) + 1
        self._post(progress.attempt, progress.attempt.others, "mean", bucket, mean)

    def _post(self, attempt: Attempt, to: list[int], act: str, bucket: int, piece: Tensor | None) -> None:
        payload = None
        if piece is not None:
            payload = self._endpoint.shared_buffers.take(piece.numel() * self._dtype.itemsize)
            as_tensor(payload, self._dtype).copy_(piece)
        meta = {"act": act, "call": attempt.call, "bucket": bucket}
        meta |= {"members": list(attempt.members), "published": attempt.published}
        with self._endpoint.lock:
            for rank in to:
                frame = Frame(Kind.ROUND, self._identity, version=attempt.round, meta=meta, payload=payload)
                self._traffic.bytes += frame.length
                self._endpoint.connections[rank].post(frame)


def _split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Divide a range into ``parts`` ranges of about equal length."""
    ends = [start + (stop - start) * k // parts for k in range(parts + 1)]
    return list(itertools.pairwise(ends))
