"""What every data set is: a world whose examples are fixed, and which of them are kept back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal
from murmurate.spec import World, derive_seed

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class ExampleSet(Protocol[E_co]):
    """Examples to choose from: a ``Corpus``, a ``Table``, images, or some of one."""

    def __len__(self) -> int: ...
    def select(self, examples: Any, /) -> E_co:
        """A mini-batch: the examples with these numbers [G], copied."""
        ...


@dataclass(frozen=True)
class Subset(Generic[E]):
    """Some of a set's examples, which are not copied before they are asked for."""

    whole: ExampleSet[E]
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, chosen: Any) -> E:
        """Those of them, copied."""
        return self.whole.select(self.numbers[chosen])


class Split(NamedTuple):
    """A data set in three."""

    train: Any  # an ExampleSet, as the others
    validation: Any
    test: Any


class DataSet(World, Protocol):
    """A world of fixed examples, which ``unit`` names. Nobody acts in it."""

    def divided(self) -> Split:
        """Raises Refusal for a data set that cannot be read."""
        ...


class Shares(Protocol):
    """A data set in a file, and how many of its examples are kept back: as a number, or a share below 1."""

    @property
    def unit(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def validation(self) -> float: ...
    @property
    def test(self) -> float: ...
    @property
    def split_seed(self) -> int: ...


def divide(world: Shares, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of ``count`` examples (to learn from, to validate with, to test with). Raises Refusal if none
    of the first are left."""
    kept, unit = [], world.unit
    for name, share in (("validation", world.validation), ("test", world.test)):
        if share < 0 or (share >= 1 and share != int(share)):
            raise Refusal(f"world.{name} is {share}; give a number of {unit}, or a share below 1.")
        kept.append(int(share) if share >= 1 else round(share * count))
    if count - sum(kept) < 1:
        raise Refusal(
            f"{world.path} has {count:,} {unit} and {sum(kept):,} of them are kept back: nothing is left to "
            "learn from. Use a smaller --world.validation and --world.test."
        )
    order = np.random.default_rng(derive_seed(world.split_seed, "split")).permutation(count)
    held, tested, train = np.split(order, np.cumsum(kept))
    return train, held, tested


def other_data(path: str, then: str, now: str) -> Refusal:
    """The error for a data set that is not the one that a run began with."""
    return Refusal(
        f"{path} is not what the run was fitted on: {then} then, {now} now, and not the same ones. Put it "
        "back as it was, say where that is by now (murmurate resume DIR --world.path NEW), or fit anew with "
        "--out."
    )
