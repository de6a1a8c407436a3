"""Compares what the replicas of a script see at their first steps.

Each replica reads the source of its inputs itself. So a source that shuffles without a seed gives each
replica different batches, and a script that does not call ``inputs`` trains all replicas on the same batches.
Neither shows in the loss.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from murmurate.buffers import as_bytes
from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Channel, Fabric
from murmurate.replica.vector import Replica
from murmurate.replicator.input_split import InputSource

_BATCHES = 3  # number of batches of the first call of ``inputs`` that are compared
_GRADIENT = _BATCHES  # position of the first gradient's hash, after the batches' hashes
_STEPS = 50  # number of steps at which the hashes of the others are read: asynchronous replicas publish late
_HASHED_VALUES = 4096  # approximate number of values of a tensor that are hashed


class FirstSteps:
    """Compares hashes of all replicas' first batches and first gradients, which each replica publishes.

    members: number of replicas, without a centre. All members must make this object at the same point.
    Without a register on ``fabric`` nothing is compared.
    """

    def __init__(self, fabric: Fabric, members: int) -> None:
        self.rank = fabric.rank
        self._other_ranks = [rank for rank in range(members) if rank != fabric.rank]
        self._own_hashes = torch.zeros(_BATCHES + 1, dtype=torch.float64)  # 0: not computed yet
        self._channel: Channel | None = None
        # not by the number of members: a centre must make the same channels as the only replica beside it
        if members > 1 and Capability.REGISTER in fabric.capabilities:
            self._channel = fabric.channel("first steps", self._own_hashes)
        self._called_inputs = False  # whether the script has called ``inputs``
        self._steps = 0

    def watched(self, source: InputSource, compare: bool) -> InputSource:
        """``source``, as an iterator that raises Refusal if the replicas' batches differ.

        A source that is a function gives each replica batches of its own, which are not compared.
        """
        is_first_call, self._called_inputs = not self._called_inputs, True
        return self._batches(source, compare and is_first_call) if not callable(source) else source

    def _batches(self, source: Iterable[Any], compare: bool) -> Iterator[Any]:
        iterator = iter(source)
        if self._channel is not None and compare:
            for number, batch in zip(range(_STEPS), iterator, strict=False):
                if number < _BATCHES:
                    self._publish(number, hash_of(batch))
                self._check_batches()
                yield batch
        yield from iterator

    def step(self, replica: Replica) -> None:
        """Before a step on the replica's own gradient: warn if all replicas began with the same one."""
        if self._called_inputs or self._channel is None or self._steps >= _STEPS:
            return
        self._steps += 1
        if self._steps == 1 and bool(replica.grad.any()):
            self._publish(_GRADIENT, hash_of(replica.grad))
        own_hash = float(self._own_hashes[_GRADIENT])
        if self.rank or not own_hash:
            return
        other_hashes = [float(hashes[_GRADIENT]) for hashes in self._published(self._channel)]
        if len(other_hashes) < len(self._other_ranks) or 0.0 in other_hashes:
            return
        self._steps = _STEPS  # compared: later steps need not read the hashes
        if set(other_hashes) == {own_hash}:
            warnings.warn(
                f"all {len(other_hashes) + 1} replicas train on the same batches: their first gradients are "
                "equal, and the script has not called replicator.inputs(...). Loop over "
                "replicator.inputs(batches), which gives each its share.",
                stacklevel=6,
            )

    def _check_batches(self) -> None:
        assert self._channel is not None
        own_hashes = self._own_hashes[:_BATCHES]
        for published in self._published(self._channel):
            hashes = published[:_BATCHES]
            differs = (hashes != 0) & (own_hashes != 0) & (hashes != own_hashes)
            if bool(differs.any()):
                number = int(differs.nonzero()[0, 0])
                raise Refusal(
                    f"the replicas read different batches from inputs(...): number {number} is not the same "
                    "on all. Each reads the source itself and takes its share, so the source must be seeded, "
                    "such as DataLoader(..., generator=torch.Generator().manual_seed(0)). For batches of "
                    "each replica's own, give inputs(...) a function: lambda rank: ..., with per='replica'. "
                    "If only random augmentation differs, add compare=False."
                )

    def _publish(self, position: int, hash_: float) -> None:
        assert self._channel is not None
        self._own_hashes[position] = hash_
        self._channel.publish(self._own_hashes)

    def _published(self, channel: Channel) -> list[Tensor]:
        """The hashes of the other replicas that have published any."""
        return [channel.peek(rank)[0] for rank in self._other_ranks if channel.version(rank) > 0]


def hash_of(batch: Any) -> float:
    """A hash of the strings and numbers, and of the shapes, dtypes and some values of the tensors and arrays,
    in a nested ``batch``; other leaves are ignored. A whole number of 1 or more, exact in float64."""
    digest = hashlib.blake2b(digest_size=6)
    for leaf in pytree.tree_leaves(batch):
        # long doubles are padded with arbitrary bytes
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcSUmM" and leaf.dtype.char not in "gG":
            digest.update(repr((leaf.shape, leaf.dtype)).encode())
            digest.update(_sampled(leaf.reshape(-1)).tobytes())
        elif isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            digest.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
            digest.update(as_bytes(_sampled(leaf.detach().reshape(-1))).numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float):
            digest.update(repr(leaf).encode())
    return 1.0 + int.from_bytes(digest.digest(), "little")


def _sampled(values: Any) -> Any:
    """Some of the values [N], evenly chosen."""
    return values[:: max(1, len(values) // _HASHED_VALUES)]
