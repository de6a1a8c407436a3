"""The interface of data sets, and their division into training, validation and test examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal
from murmurate.spec import World, derive_seed

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class ExampleSet(Protocol[E_co]):
    """Examples to select from: a ``Corpus``, a ``Table``, images, or a ``Subset`` of any of these."""

    def __len__(self) -> int: ...
    def select(self, examples: Any, /) -> E_co:
        """A copy of the examples with these numbers [G], as a mini-batch."""
        ...


@dataclass(frozen=True)
class Subset(Generic[E]):
    """Some examples of a set, copied only when they are selected."""

    all_examples: ExampleSet[E]
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def select(self, chosen: Any) -> E:
        """A copy of the examples with these numbers within the subset."""
        return self.all_examples.select(self.indices[chosen])


class Split(NamedTuple):
    """A data set divided in three; each part is an ``ExampleSet``."""

    train: Any
    validation: Any
    test: Any


class DataSet(World, Protocol):
    """A world of fixed examples instead of simulators; ``unit`` is what the examples are called, in the
    plural."""

    def divided(self) -> Split:
        """The examples in three parts. Raises Refusal for a data set that cannot be read."""
        ...


def split_indices(
    count: int, validation: float, test: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Divide the numbers of ``count`` examples at random: (for training, for validation, for the test).

    ``validation`` and ``test`` are numbers of examples or, if below 1, shares of all examples. Raises Refusal
    for any other number, and if no example is left to train on.
    """
    sizes = []
    for name, share in (("validation", validation), ("test", test)):
        if not 0 <= share < math.inf or (share >= 1 and share != int(share)):
            raise Refusal(f"world.{name} is {share}; give a number of examples, or a share below 1.")
        sizes.append(int(share) if share >= 1 else round(share * count))
    if count - sum(sizes) < 1:
        raise Refusal(
            f"There are {count:,} examples and {sum(sizes):,} of them are held out: nothing is left to train "
            "on. Use a smaller --world.validation and --world.test."
        )
    order = np.random.default_rng(derive_seed(seed, "split")).permutation(count)
    validation_, test_, train = np.split(order, np.cumsum(sizes))
    return train, validation_, test_


def other_data(path: str, then: str, now: str) -> Refusal:
    """The error for a data set that differs from the one that a run began with."""
    return Refusal(
        f"{path} is not what the run was fitted on: {then} then, {now} now, with other contents. Restore "
        "the data, name the place where they are now (murmurate resume or eval DIR --world.path NEW), or fit "
        "anew with --out."
    )
