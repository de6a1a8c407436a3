"""Means by torch's process groups (gloo), where connections need not be encrypted: gloo sends in clear.

A group is made when a round begins that has none, and stands until a round goes wrong in it. Its addresses go
over our connections, which know their peers; nothing else of it does.
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
from murmurate.fabric.network.engine import Attempt, Carried

_LOOK_SECONDS = 0.05  # how soon a member that waits in gloo hears what its connections say
_MOST_BUCKET_BYTES, _LEAST_BUCKET_BYTES = 16 << 20, 1 << 20
_IN_FLIGHT = 2
_THREADS = 2
_MOST_FAILURES = 3  # of groups in which nobody was lost: then gloo does not work here, and connections carry
_DIGITS, _BASE = 9, 128  # of a version, in numbers that even bfloat16 adds exactly
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class ProcessGroups:
    """An ``Engine`` for means; one channel's at one member."""

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
        self.since = 0  # the round in which the present group was made; 0: there is none
        self._group: Any = None
        self._members: Sequence[int] = ()
        self._failures = 0
        self._heard: dict[str, bytes] = {}  # what members say of themselves for the group to be made

    def hear(self, what: tuple[str, ...], value: str) -> None:
        """A member's word, (number of the group, key); with the lock held."""
        self._heard["/".join(what)] = bytes.fromhex(value)

    def drop(self) -> None:
        """A round went wrong in the present group: the next makes another."""
        self.since, self._group = 0, None

    def make(self, attempt: Attempt) -> bool:
        """Whether there is a group for this round; False: connections are to carry it, for all members alike.

        Raises RuntimeError if the round has become hopeless, or gloo cannot connect.
        """
        with self._endpoint.lock:
            if self.since and self._members == attempt.members:
                return self._group is not None
            self.since, self._members, self._group = attempt.round, attempt.members, None
            near = all(self._endpoint.connections[rank].near is not None for rank in attempt.others)
        words = _Words(self._endpoint, self._identity, attempt, self._heard)
        words.set(f"wants/{attempt.rank}", bytes([near, self._failures >= _MOST_FAILURES]))
        wants = [words.get(f"wants/{rank}") for rank in attempt.members]
        # neighbours have a faster way; and whoever has seen gloo fail again and again speaks for all
        if all(want[0] for want in wants) or any(want[1] for want in wants):
            return False
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = self._timeout, _THREADS
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._endpoint.address)]
        place = list(attempt.members).index(attempt.rank)
        self._failures += 1  # until it has carried a round
        self._group = dist.ProcessGroupGloo(words, place, len(attempt.members), options)
        return True

    def carry(self, attempt: Attempt) -> Carried | None:
        group, members, x = self._group, attempt.members, attempt.x
        if x is None:
            raise ValueError("a mean is of something")
        # behind the vector: what each member had published, its digits in a row of its own
        rows = len(members) * _DIGITS
        total = as_tensor(self._endpoint.wires.take((x.numel() + rows) * self._dtype.itemsize), self._dtype)
        digits = total[x.numel() :].view(len(members), _DIGITS).zero_()
        if attempt.published:
            digits[members.index(attempt.rank)] = _digits(attempt.published, self._dtype)
        flying: list[Any] = []
        # two at least, so that one is copied while the other is on its way
        size = min(max(x.nbytes // 2, _LEAST_BUCKET_BYTES), _MOST_BUCKET_BYTES) // self._dtype.itemsize + 1
        for start in range(0, x.numel(), size):
            stop = min(start + size, x.numel())
            total[start:stop].copy_(x[start:stop])
            flying.append(group.allreduce([total[start : stop if stop < x.numel() else None]]))
            if len(flying) > _IN_FLIGHT and not self._done(flying, attempt):
                return None
        while flying:
            if not self._done(flying, attempt):
                return None
        self._failures = 0
        self._traffic.bytes += 4 * (len(members) - 1) * x.nbytes // len(members)
        versions = {rank: _number(row) for rank, row in zip(members, digits.tolist(), strict=True)}
        return Carried(total[: x.numel()].view(torch.uint8).numpy(), versions, len(members))

    def _done(self, flying: list[Any], attempt: Attempt) -> bool:
        """Wait for the first of them; False if it failed, or there is no hope."""
        lost = False
        while not lost:
            try:
                flying[0].wait(datetime.timedelta(seconds=_LOOK_SECONDS))
                del flying[0]
                return True
            except RuntimeError:  # not yet, or never
                lost = flying[0].is_completed()
            with self._endpoint.lock:
                lost = lost or attempt.hopeless()
        # a group's end waits for all that is under way, up to its timeout; nobody else should
        threading.Thread(target=_outlive, args=(self._group, flying), daemon=True).start()
        self.drop()
        return False


def _outlive(group: Any, flying: list[Any]) -> None:
    for work in flying:
        try:
            work.wait()
        except RuntimeError:
            continue


class _Words(Store):
    """A store for one group's rendezvous: each member's words go to all others over our connections."""

    def __init__(self, endpoint: Endpoint, identity: str, attempt: Attempt, heard: dict[str, bytes]) -> None:
        super().__init__()
        self._endpoint, self._identity, self._attempt, self._heard = endpoint, identity, attempt, heard
        self._number = str(attempt.round)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        with self._endpoint.lock:
            self._heard[f"{self._number}/{key}"] = value
            for rank in self._attempt.members:
                if rank != self._attempt.rank:
                    self._endpoint.connections[rank].announce(
                        ("group", self._identity, self._number, key), value.hex()
                    )

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        name, endpoint = f"{self._number}/{key}", self._endpoint
        with endpoint.lock:
            endpoint.wait(lambda: name in self._heard or self._attempt.hopeless(), endpoint.deadline_seconds)
            if name not in self._heard:
                raise RuntimeError(f"no process group: '{key}' did not come")
            return self._heard[name]


def _digits(number: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([number // _BASE**k % _BASE for k in range(_DIGITS)], dtype=dtype)


def _number(digits: list[float]) -> int:
    return sum(int(digit) * _BASE**k for k, digit in enumerate(digits) if digit)
