"""The input of each replica: a share of every batch of its worker, or whole batches.

TF-Replicator, section 3.2: input pipelines PER_WORKER, split by an ``input_split_fn``, and PER_REPLICA.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from torch.utils import _pytree as pytree

from murmurate.errors import Refusal

InputSource = Iterable[Any] | Callable[[int], Iterable[Any]]
# from (batch, number of shares, index of a share) to that share
Split = Callable[[Any, int, int], Any]
_PLAIN = (str, bytes, int, float, complex, type(None))
_REMEDY = (
    "Give inputs(...) a function split=, from (batch, shares, index) to that share; or per='replica', with "
    "which each replica gets whole batches."
)
_LEFT_OUT = (
    "replicator.inputs leaves out rows: those of a batch that the replicas cannot divide equally, and whole "
    "batches at the end that are too few for all. To train on all, use batches whose number of rows is a "
    "multiple of the number of replicas. To evaluate, let each replica take its own rows: "
    "slice(replicator.rank, None, replicator.size)."
)
AllHave = Callable[[bool], bool]  # from whether this replica has a next batch to whether all have


class CannotSplit(ValueError):
    """A batch has fewer rows than there are replicas to share it."""


def split_along(dimension: int) -> Split:
    """A function that splits every tensor or array of a batch along ``dimension``; 1 is for time-major
    sequences.

    Tensors that have this dimension must have the same length along it, the batch's number of rows. A list
    or tuple of as many strings, bytes or numbers, such as names of files, is split like them; in a batch
    without tensors the rows are those of such lists. Single values (a string, a number, None), and tensors
    without the dimension, go to all replicas. Shares are equal: remaining rows are dropped, so that the mean
    over replicas is the mean over rows.

    The function raises Refusal for lists and tensors of another length, for lists of lists of numbers, and
    for objects of other types. Raises Refusal for a ``dimension`` that is no whole number of 0 or more.
    """
    if not isinstance(dimension, int) or dimension < 0:
        raise Refusal(f"split_along is given {dimension!r}: give the number of a dimension, from 0")

    def split(batch: Any, shares: int, index: int) -> Any:
        leaves = pytree.tree_leaves(batch, is_leaf=_is_leaf)
        lengths = {n for leaf in leaves if (n := _length(leaf, dimension)) is not None}
        lengths |= {len(leaf) for leaf in leaves if _is_column(leaf)}
        if len(lengths) > 1:
            raise Refusal(
                f"a batch has columns of different lengths, {sorted(lengths)}, so it has no rows to split. "
                + _REMEDY
            )
        rows, left_over = divmod(min(lengths, default=0), shares)
        if left_over and index == 0:
            _warn_of_rows_left_out()
        if lengths and rows == 0:
            raise CannotSplit(f"{min(lengths)} rows do not make {shares} shares")
        own = slice(index * rows, (index + 1) * rows)

        def share_of(leaf: Any) -> Any:
            if _is_column(leaf):
                return leaf[own]
            if _is_list_of_number_lists(leaf):
                raise Refusal(
                    "a batch has a list of lists of numbers, which may be rows or columns: make tensors of "
                    "them. " + _REMEDY
                )
            if _length(leaf, dimension) is not None:
                return leaf[(slice(None),) * dimension + (own,)]
            if isinstance(leaf, _PLAIN) or hasattr(leaf, "shape"):
                return leaf
            raise Refusal(f"a batch has a {type(leaf).__name__}, which cannot be split by rows. " + _REMEDY)

        return pytree.tree_map(share_of, batch, is_leaf=_is_leaf)

    return split


def _warn_of_rows_left_out() -> None:
    """Warn of the line outside of this package that takes the batch: Python shows a text once for each."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("murmurate."):
        frame, level = frame.f_back, level + 1
    warnings.warn(_LEFT_OUT, stacklevel=level)


def _length(leaf: Any, dimension: int) -> int | None:
    """The leaf's length along ``dimension``; None if it has no such dimension."""
    shape = getattr(leaf, "shape", ())
    return int(shape[dimension]) if len(shape) > dimension else None


def _is_column(x: Any) -> bool:
    """Whether ``x`` is a list or tuple of plain values, such as a DataLoader makes of strings."""
    return isinstance(x, list | tuple) and bool(x) and all(_is_plain(value) for value in x)


def _is_plain(x: Any) -> bool:
    return isinstance(x, _PLAIN) or getattr(x, "shape", None) == ()


def _is_list_of_number_lists(x: Any) -> bool:
    if not isinstance(x, list | tuple) or not x or not all(_is_column(column) for column in x):
        return False
    return all(not isinstance(value, str | bytes) for column in x for value in column)


def _is_leaf(x: Any) -> bool:
    return _is_column(x) or _is_list_of_number_lists(x)


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


class Batches(Iterator[Any]):
    """The batches of one replica, and their number, if the source knows its own. Once they have ended, a new
    loop over them begins a new pass.

    new_pass: begins a pass. takers: how many workers or replicas take batches of ``source`` in turn. The
    number includes batches that turn out to have fewer rows than shares. Other attributes are those of
    ``source``.
    """

    def __init__(self, new_pass: Callable[[], Iterator[Any]], source: InputSource, takers: int) -> None:
        self._new_pass, self._source, self._takers = new_pass, source, takers
        self._batches, self._ended = new_pass(), False

    def __iter__(self) -> Batches:
        if self._ended:
            self._batches, self._ended = self._new_pass(), False
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._ended = True
            raise

    def __getattr__(self, name: str) -> Any:  # dataset, sampler and others of a DataLoader
        if name.startswith("_") or callable(self._source):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._source, name)

    def __len__(self) -> int:
        if callable(self._source):
            raise TypeError("the number of batches is not known where inputs(...) has a function")
        return len(self._source) // self._takers  # type: ignore[arg-type]


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
        yield from _in_turn(iter(source), takers, own_index, share, warns=index.rank == 0)
        return
    batches = _in_turn(iter(source(own_index)), 1, 0, share, warns=False)
    end = object()
    while True:
        batch = next(batches, end)
        if not all_have(batch is not end):
            return
        yield batch


def _in_turn(
    source: Iterator[Any], takers: int, own_index: int, share: Callable[[Any], Any], *, warns: bool
) -> Iterator[Any]:
    """This replica's share of every ``takers``-th batch, from number ``own_index``.

    All takers drop an incomplete last round, and a round in which a batch has fewer rows than shares, so that
    each gets as many batches as the others. warns: whether this one warns of an incomplete last round. Raises
    Refusal at the end if all rounds were dropped.
    """
    has_yielded, dropped = False, None
    while len(batches := list(itertools.islice(source, takers))) == takers:
        try:
            own = [share(batch) for batch in batches][own_index]
        except CannotSplit as problem:
            dropped = problem
            continue
        has_yielded = True
        yield own
    if dropped is not None and not has_yielded:
        raise Refusal(
            f"no batch has a row for each replica ({dropped}): make batches larger, or give each replica "
            'whole batches by inputs(..., per="replica").'
        )
    if batches and warns:
        _warn_of_rows_left_out()
