"""Topics from passes through a corpus in memory: no run folder, no checkpoints, under any strategy."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmurate.datasets.corpus import Corpus
from murmurate.errors import RunFailed
from murmurate.fabric.processes.fabric import Died
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.user_loop import OwnLoop
from murmurate.spec import Batch, EnvSpec, derive_seed
from murmurate.strategies.interface import Strategy
from murmurate.workloads.conjugate import ConjugateLearner
from murmurate.workloads.topic_model import TopicModel
from murmurate.workloads.topics import Topics

_ENDING_SECONDS = 60.0  # that replicas wait for one another at the end, so that all that was learned counts
_ARRAYS = ("starts", "words", "counts")


class Learned(NamedTuple):
    """lambda: [V, K] float32. updates: as schedules count them."""

    matrix: Tensor
    updates: int


@dataclass(frozen=True)
class Passes:
    """What is learned from a corpus, whichever process does it.

    documents: n, that the corpus stands for. first, number: of passes, which an order is derived from.
    shuffled: whether each pass has an order of its own, or that of the corpus.
    """

    model: TopicModel
    documents: int
    seed: int
    first: int = 0
    number: int = 1
    shuffled: bool = True

    def parts(self, total: int, rank: int, replicas: int) -> Iterator[NDArray[np.int64]]:
        """Numbers of the documents of each of a replica's mini-batches.

        All replicas have as many, of ``model.batch`` documents at most and about as many in each: one
        document that stands for a whole corpus would undo what was learned.
        """
        updates = -(-total // (self.model.batch * replicas))
        for number in range(self.first, self.first + self.number):
            order = np.arange(total)
            if self.shuffled:
                order = np.random.default_rng(derive_seed(self.seed, "pass", number)).permutation(total)
            own = order[rank::replicas]
            if len(own) < updates:
                own = np.resize(own if len(own) else order, updates)
            yield from np.array_split(own, updates)

    def learner(self, replicate: Any, corpus: Corpus, start: Tensor | None) -> ConjugateLearner[Topics]:
        spec = EnvSpec("corpus", (corpus.vocabulary_size,), torch.int32, 0, examples=self.documents)
        return self.model.build(Context(spec, replicate, self.seed, examples=corpus), start)

    def run(self, corpus: Corpus, strategy: Strategy, replicas: int, start: Tensor | None = None) -> Learned:
        """Learn: in this process where one replica is all there is, else in one process for each.

        Those import the script that calls this again, which therefore has its work under ``if __name__ ==
        "__main__"``. Raises Refusal for a strategy that cannot have so many replicas, or that could leave
        nothing of lambda, and RunFailed if all of them died.
        """
        strategy = self.model.adapted(strategy)
        strategy.check(replicas, shrinks=self.model.eta(0))
        if replicas > 1 or strategy.centre:
            return self._together(corpus, strategy, replicas, start)
        it = self.learner(Replica, corpus, start)
        for part in self.parts(len(corpus), 0, 1):
            it.learn(Batch(corpus.select(part)))
        return Learned(it.estimate().matrix, it.replica.steps_taken())

    def _together(self, corpus: Corpus, strategy: Strategy, replicas: int, start: Tensor | None) -> Learned:
        from murmurate.launch.script import (
            run,  # takes a second to import, and one replica needs nothing of it
        )

        with tempfile.TemporaryDirectory() as folder:  # mapped by all: a pickled corpus would be copied
            for name in _ARRAYS:
                np.save(Path(folder) / f"{name}.npy", getattr(corpus, name))
            if start is not None:
                np.save(Path(folder) / "start.npy", start.numpy())
            part = functools.partial(_part, self, folder, corpus.vocabulary_size, start is not None)
            found = run(part, replicas=replicas, strategy=strategy, seed=self.seed)
        for one in found:
            if one is not None and not isinstance(one, Died):
                return Learned(torch.from_numpy(one[0]), one[1])
        raise RunFailed("no replica was left to say what was learned")


def _part(
    passes: Passes, folder: str, words: int, begun: bool, loop: OwnLoop
) -> tuple[NDArray[np.float32], int] | None:
    """One replica's; lambda [V, K] and the updates that were made from the first of them."""
    starts, word, counts = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
    corpus = Corpus(starts, word, counts, None, words)
    start = torch.from_numpy(np.load(Path(folder) / "start.npy")) if begun else None
    it = passes.learner(loop.replicate, corpus, start)
    for part in passes.parts(len(corpus), loop.rank, loop.size):
        it.learn(Batch(corpus.select(part)))
    updates = it.replica.steps_taken()
    loop.finish(_ENDING_SECONDS)
    matrix = it.model.estimate(loop.agreed(it.replica.name)["topics"]).matrix
    return (matrix.numpy(), updates) if loop.is_main else None
