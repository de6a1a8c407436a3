"""Mini-batches of a fixed set of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets.interface import DataSet, ExampleSet
from murmurate.errors import Refusal
from murmurate.sources.interface import BatchShape, RunView, SourceConfig, SourceContext
from murmurate.spec import Batch, derive_seed

_SAMPLE_COUNT = 100  # number of examples from which the size of all is estimated
_INDEX_BYTES = 24  # bytes for each example of a batch: copies of its index


@dataclass(frozen=True)
class ExampleSourceConfig(SourceConfig):
    """Passes through the training examples of a data set."""

    gives: ClassVar[str] = "examples"

    def check(self, run: RunView) -> None:
        check_examples(run)

    def batches(self, run: RunView) -> int | None:
        return batches_of(run)

    def batch_shape(self, run: RunView) -> BatchShape:
        batch: int = run.learner.requires.batch
        return BatchShape(batch, 1, 1.0, batch)

    def cost_settings(self) -> dict[str, Any]:
        return {}

    def memory_bytes(self, run: RunView) -> int:
        batch: int = run.learner.requires.batch
        return int(batch * (_INDEX_BYTES + 2 * self.example_bytes(run)))

    def example_bytes(self, run: RunView) -> float:
        """The mean size of an example, from the first ones."""
        train = cast(DataSet, run.world).divided().train
        sample = train.select(np.arange(min(len(train), _SAMPLE_COUNT)))
        fields = sample if isinstance(sample, tuple) else vars(sample).values()
        size = sum(int(getattr(value, "nbytes", 0)) for value in fields)
        return size / max(min(len(train), _SAMPLE_COUNT), 1)

    def open(self, context: SourceContext) -> ExampleSource:
        run = context.run
        train = cast(DataSet, run.world).divided().train
        batch = run.learner.requires.batch
        order = ExampleOrder(len(train), seed=run.seed, rank=context.rank, replicas=run.replicas)
        return ExampleSource(train, batch, order)


def check_examples(run: RunView) -> None:
    """Raise Refusal for options that make no sense in a run that learns from examples, or under its
    strategy."""
    requires = run.learner.requires
    if run.stop_at_return is not None:
        raise Refusal(
            f"{run.learner.name} learns from {requires.unit}, which have no returns. Leave "
            "--stop-at-return out."
        )
    run.strategy.check(run.replicas, shrinks=requires.shrinks)


def batches_of(run: RunView) -> int | None:
    """Number of mini-batches of each replica in the whole run; None if only time or updates end the run."""
    if run.env_steps is None:
        return None
    batch: int = run.learner.requires.batch
    return max(1, run.env_steps // (run.replicas * batch))


class ExampleOrder:
    """The indices of a replica's examples, without end: each pass is a random permutation of all examples,
    divided among the replicas."""

    def __init__(self, count: int, *, seed: int, rank: int, replicas: int) -> None:
        self._count, self._seed, self._rank, self._replicas = count, seed, rank, replicas
        self._passes, self._position = 0, 0
        self._order: NDArray[np.int64] | None = None

    def take(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next examples: (their indices [batch], the numbers [batch] of the passes they belong to)."""
        parts, passes, missing = [], [], batch
        while missing:
            order = self._current_pass()
            part = order[self._position : self._position + missing]
            parts.append(part)
            passes.append(np.full(len(part), self._passes))
            missing -= len(part)
            self._position += len(part)
            if self._position == len(order):
                self._passes, self._position, self._order = self._passes + 1, 0, None
        return np.concatenate(parts), np.concatenate(passes)

    def _current_pass(self) -> NDArray[np.int64]:
        """This replica's indices in the current pass, in order; all indices if there are too few examples for
        this replica to have any."""
        if self._order is None:
            random = np.random.default_rng(derive_seed(self._seed, "pass", self._passes))
            permutation = random.permutation(self._count)
            part = permutation[self._rank :: self._replicas]
            self._order = part if len(part) else permutation
        return self._order

    @property
    def passes(self) -> float:
        """Number of passes so far, including the completed share of the current pass."""
        return self._passes + self._position / len(self._current_pass())

    def state(self) -> dict[str, Any]:
        return {"passes": self._passes, "place": self._position}

    def load(self, state: dict[str, Any]) -> None:
        self._passes, self._position, self._order = int(state["passes"]), int(state["place"]), None

    def skip_to(self, examples: int) -> None:
        """Go on where this replica would be after ``examples`` examples."""
        self._passes, self._position = divmod(examples, len(self._current_pass()))
        self._order = None


class ExampleSource:
    """Mini-batches without end (a ``Source``): see ``ExampleOrder``."""

    exact = True

    def __init__(self, examples: ExampleSet[Any], batch: int, order: ExampleOrder) -> None:
        self.alive: Callable[[int], bool] = lambda played: False
        self._examples, self._batch, self._order = examples, batch, order

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        numbers, _ = self._order.take(self._batch)
        return Batch(self._examples.select(numbers), env_steps=self._batch)

    def fields(self) -> dict[str, Any]:
        return {"passes": self._order.passes}

    def events(self) -> Sequence[tuple[str, str]]:
        return ()

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)

    def fresh_start(self, batches: int) -> None:
        """Go on where this replica would be after ``batches`` batches: a peer's state is of no use here,
        because it covers other examples."""
        self._order.skip_to(batches * self._batch)

    def close(self) -> None:
        pass
