"""The input of each replica: a share of every batch of its worker, or whole batches.

TF-Replicator, section 3.2: input pipelines PER_WORKER, split by an ``input_split_fn``, and PER_REPLICA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils import _pytree as pytree

InputSource = Iterable[Any] | Callable[[int], Iterable[Any]]
# from (batch, number of shares, index of a share) to that share
Split = Callable[[Any, int, int], Any]
AllHave = Callable[[bool], bool]  # from whether this replica has a next batch to whether all have


class CannotSplit(ValueError):
    """A batch has fewer rows than there are replicas to share it."""


def split_along(dimension: int) -> Split:
    """A function that splits every tensor or array of a batch along ``dimension``; 1 is for time-major
    sequences.

    Numbers, and tensors without that dimension, go to all replicas. Shares are equal: remaining rows are
    dropped, so that the mean over replicas is the mean over rows.
    """

    def split(batch: Any, shares: int, index: int) -> Any:
        def share_of(leaf: Any) -> Any:
            if len(getattr(leaf, "shape", ())) <= dimension:
                return leaf
            rows = leaf.shape[dimension] // shares
            if rows == 0:
                raise CannotSplit(f"{leaf.shape[dimension]} rows do not make {shares} shares")
            return leaf[(slice(None),) * dimension + (slice(index * rows, (index + 1) * rows),)]

        return pytree.tree_map(share_of, batch)

    return split


split_leading = split_along(0)


@dataclass(frozen=True)
class ReplicaIndex:
    """A replica's rank and worker, and the numbers of replicas and workers."""

    rank: int
    replicas: int
    worker: int
    workers: int

    @property
    def per_worker(self) -> int:
        return self.replicas // self.workers

    @property
    def local_rank(self) -> int:
        return self.rank % self.per_worker


def inputs(
    source: InputSource,
    index: ReplicaIndex,
    *,
    per: Literal["worker", "replica"],
    split: Split,
    all_have: AllHave,
) -> Iterator[Any]:
    """The batches of one replica (see ``OwnLoop.inputs``).

    all_have: whether all replicas have a next batch, given whether this one has. Under strategies with common
    rounds it is a collective, and all replicas end together; otherwise each ends independently.
    """
    if per not in ("worker", "replica"):
        raise ValueError(f"inputs are split per 'worker' or per 'replica', not per '{per}'")
    takers, own_index = (index.workers, index.worker) if per == "worker" else (index.replicas, index.rank)
    shares = index.per_worker if per == "worker" else 1

    def share(batch: Any) -> Any:
        return batch if shares == 1 else split(batch, shares, index.local_rank)

    if not callable(source):  # all replicas read the same source, and end at its last whole round
        yield from _in_turn(iter(source), takers, own_index, share)
        return
    batches = _in_turn(iter(source(own_index)), 1, 0, share)
    end = object()
    while True:
        batch = next(batches, end)
        if not all_have(batch is not end):
            return
        yield batch


def _in_turn(
    source: Iterator[Any], takers: int, own_index: int, share: Callable[[Any], Any]
) -> Iterator[Any]:
    """This replica's share of every ``takers``-th batch, from number ``own_index``.

    All takers drop an incomplete last round, and a round in which a batch has fewer rows than shares, so that
    each gets as many batches as the others.
    """
    while len(batches := list(itertools.islice(source, takers))) == takers:
        try:
            yield [share(batch) for batch in batches][own_index]
        except CannotSplit:
            continue
