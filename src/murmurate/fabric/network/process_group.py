"""Means by torch's process groups (gloo), where connections need not be encrypted: gloo does not encrypt.

A round makes a group if there is none; the group is used until a round fails in it, or its members change.
The members exchange their addresses over our authenticated connections, but vectors over gloo's own.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from murmurate.buffers import as_tensor
from murmurate.fabric.interface import Traffic
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.engine import Attempt, EngineResult

_POLL_SECONDS = 0.05  # how often a member that waits for gloo checks its connections
_MOST_BUCKET_BYTES, _LEAST_BUCKET_BYTES = 16 << 20, 1 << 20
_IN_FLIGHT = 2  # buckets that are reduced at a time
_THREADS = 2  # of gloo
_MOST_FAILURES = 3  # after so many groups in a row in which no round succeeded, gloo is not used any more
_DIGITS, _BASE = 9, 128  # versions are sent as digits in this base, which even bfloat16 adds exactly
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class ProcessGroups:
    """The ``Engine`` for means of one channel at one member.

    identity: the channel's, the same at all members. timeout_seconds: how long gloo may take to connect, and
    for each operation. dtype: of the vectors; one of ``DTYPES``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: bytes,
        timeout_seconds: float,
        dtype: torch.dtype,
        traffic: Traffic,
    ) -> None:
        self._endpoint, self._identity = endpoint, identity.hex()
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._dtype, self._traffic = dtype, traffic
        self.since = 0  # the round in which the members last decided whether to have a group; 0: decide anew
        self._group: Any = None
        self._members: Sequence[int] = ()
        self._failures = 0
        # what members have written for the rendezvous of a group: by key, the group's number and the value
        self._entries: dict[str, tuple[int, bytes]] = {}

    def receive_announcement(self, key: tuple[str, ...], value: Any) -> None:
        """A member's entry under ``key`` has arrived. To be called with the lock held.

        value: [number of the group, its entry in hexadecimal]. Raises TypeError or ValueError for another.
        """
        number, digits = value
        self._entries["/".join(key)] = int(number), bytes.fromhex(digits)

    def drop(self) -> None:
        """Give up the present group, or the decision against one, as a round has failed: decide anew."""
        self.since, self._group = 0, None

    def make(self, attempt: Attempt) -> bool:
        """Make a group for this round if there is none; False if the round must use our connections instead.

        The result is the same on all members. Raises RuntimeError if the round should be aborted, if a member
        does not answer before the deadline, or if gloo cannot connect.
        """
        with self._endpoint.lock:
            if self.since and self._members == attempt.members:
                return self._group is not None
            self.since, self._members, self._group = attempt.round, attempt.members, None
            connections = self._endpoint.connections
            all_local = all(connections[rank].local_peer is not None for rank in attempt.others)
        store = _ConnectionStore(self._endpoint, self._identity, attempt, self._entries)
        keeps_failing = self._failures >= _MOST_FAILURES
        store.set(f"wants/{attempt.rank}", bytes([all_local, keeps_failing]))
        wants = [store.get(f"wants/{rank}") for rank in attempt.members]
        # shared memory is faster if all are local peers; a member on which gloo keeps failing decides for all
        if all(want[0] for want in wants) or any(want[1] for want in wants):
            return False
        self._failures += 1  # reset to 0 once a round has succeeded
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = self._timeout, _THREADS
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._endpoint.address)]
        position = list(attempt.members).index(attempt.rank)
        self._group = dist.ProcessGroupGloo(store, position, len(attempt.members), options)
        return True

    def execute(self, attempt: Attempt) -> EngineResult | None:
        group, members, x = self._group, attempt.members, attempt.x
        if x is None:
            raise ValueError("a mean needs the vector of every member")
        # After the vector come the members' versions, as a row of digits for each member. Each member writes
        # its own row, and zeros into all others, so that the sum contains all rows.
        length = x.numel() + len(members) * _DIGITS
        total = as_tensor(self._endpoint.outgoing_buffers.take(length * self._dtype.itemsize), self._dtype)
        digits = total[x.numel() :].view(len(members), _DIGITS).zero_()
        if attempt.published:
            digits[members.index(attempt.rank)] = _digits(attempt.published, self._dtype)
        in_flight: list[Any] = []
        # two buckets at least, except of a short vector: one is copied while the other is being reduced
        bucket_bytes = min(max(x.nbytes // 2, _LEAST_BUCKET_BYTES), _MOST_BUCKET_BYTES)
        step = bucket_bytes // self._dtype.itemsize + 1
        for start in range(0, x.numel(), step):
            stop = min(start + step, x.numel())
            total[start:stop].copy_(x[start:stop])
            in_flight.append(group.allreduce([total[start : stop if stop < x.numel() else None]]))
            if len(in_flight) > _IN_FLIGHT and not self._await_first(in_flight, attempt):
                return None
        while in_flight:
            if not self._await_first(in_flight, attempt):
                return None
        self._failures = 0
        self._traffic.bytes += 4 * (len(members) - 1) * x.nbytes // len(members)
        versions = {rank: _from_digits(row) for rank, row in zip(members, digits.tolist(), strict=True)}
        return EngineResult(total[: x.numel()].view(torch.uint8).numpy(), versions, len(members))

    def _await_first(self, in_flight: list[Any], attempt: Attempt) -> bool:
        """Wait for the first operation in flight, and remove it; False if it failed, or the attempt should be
        aborted. The group is then dropped."""
        failed = False
        while not failed:
            was_completed = in_flight[0].is_completed()
            try:
                in_flight[0].wait(datetime.timedelta(seconds=_POLL_SECONDS))
                del in_flight[0]
                return True
            except RuntimeError:
                # The wait timed out, or the operation failed. After a timeout it may just have succeeded.
                failed = was_completed
            with self._endpoint.lock:
                failed = failed or attempt.should_abort()
        # destroying a group waits for its operations, up to their timeout: in a thread of its own
        threading.Thread(target=_wait_for_end, args=(self._group, in_flight), daemon=True).start()
        self.drop()
        return False


def _wait_for_end(group: Any, in_flight: list[Any]) -> None:
    for work in in_flight:
        try:
            work.wait()
        except RuntimeError:
            continue


class _ConnectionStore(Store):
    """The c10d store of one group's rendezvous: it sends each entry to the members over our connections.

    entries: by key, the newest (number of a group, value) of any member; shared with ``ProcessGroups``.
    """

    def __init__(
        self, endpoint: Endpoint, identity: str, attempt: Attempt, entries: dict[str, tuple[int, bytes]]
    ) -> None:
        super().__init__()
        self._endpoint, self._identity, self._attempt, self._entries = endpoint, identity, attempt, entries
        self._number = attempt.round

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        with self._endpoint.lock:
            self._entries[key] = self._number, value
            for rank in self._attempt.others:
                # This replaces the entry of an earlier group, which no member needs any more: a round begins
                # after all members have finished the one before.
                self._endpoint.connections[rank].announce(
                    ("group", self._identity, key), [self._number, value.hex()]
                )

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        endpoint = self._endpoint

        def arrived() -> bool:
            return key in self._entries and self._entries[key][0] == self._number

        with endpoint.lock:
            endpoint.wait(lambda: arrived() or self._attempt.should_abort(), endpoint.deadline_seconds)
            if not arrived():
                raise RuntimeError(f"no process group: '{key}' did not arrive")
            return self._entries[key][1]


def _digits(number: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([number // _BASE**k % _BASE for k in range(_DIGITS)], dtype=dtype)


def _from_digits(digits: list[float]) -> int:
    return sum(int(digit) * _BASE**k for k, digit in enumerate(digits) if digit)
