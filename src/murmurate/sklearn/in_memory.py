"""Training on a corpus in memory, under any strategy, without run folder and checkpoints."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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

_ENDING_SECONDS = 60.0  # how long replicas wait for one another's last updates
_ARRAYS = ("starts", "words", "counts")


class Learned(NamedTuple):
    """The result of training. matrix: lambda [V, K] float32. updates: as step-size schedules count them."""

    matrix: Tensor
    updates: int


@dataclass(frozen=True)
class CorpusPasses:
    """Passes through a corpus, on one or several replicas.

    documents: size of the whole corpus, of which the given one may be a sample. first: number of the first
    pass; the order of a pass is derived from its number. number: how many passes. shuffled: whether passes
    have a random order, or the corpus's. ends: what to print once passes end, by their number, from 1.
    """

    model: TopicModel
    documents: int
    seed: int
    first: int = 0
    number: int = 1
    shuffled: bool = True
    ends: Mapping[int, str] = field(default_factory=dict)

    def updates_of_pass(self, total: int, replicas: int) -> int:
        """The mini-batches of each replica in a pass through ``total`` documents."""
        return -(-total // (self.model.batch * replicas))

    def parts(self, total: int, rank: int, replicas: int) -> Iterator[NDArray[np.int64]]:
        """For each of a replica's mini-batches, the indices of its documents.

        All replicas have equally many mini-batches, of at most ``model.batch`` documents and about equal
        size: a very small one would represent the whole corpus badly.
        """
        updates = self.updates_of_pass(total, replicas)
        for number in range(self.first, self.first + self.number):
            order = np.arange(total)
            if self.shuffled:
                order = np.random.default_rng(derive_seed(self.seed, "pass", number)).permutation(total)
            documents = order[rank::replicas]
            if len(documents) < updates:
                documents = np.resize(documents if len(documents) else order, updates)  # repeats some
            yield from np.array_split(documents, updates)

    def learner(self, replicate: Any, corpus: Corpus, start: Tensor | None) -> ConjugateLearner[Topics]:
        spec = EnvSpec("corpus", (corpus.vocabulary_size,), torch.int32, 0, examples=self.documents)
        return self.model.build(Context(spec, replicate, self.seed, examples=corpus), start)

    def run(self, corpus: Corpus, strategy: Strategy, replicas: int, start: Tensor | None = None) -> Learned:
        """Train: a single replica in this process; several, or one with a centre, in processes of their own.

        The processes import the calling script again, so the script must have its work under
        ``if __name__ == "__main__"``.
        Raises Refusal for a strategy that does not allow so many replicas, or whose steps could reduce lambda
        to 0, and RunFailed if a replica raised an error, or all died.
        """
        strategy = self.model.adapted(strategy)
        strategy.check(replicas, shrinks=self.model.eta(0))
        if replicas > 1 or strategy.centre:
            return self._run_processes(corpus, strategy, replicas, start)
        learner = self.learner(Replica, corpus, start)
        self.learn(learner, corpus, self.parts(len(corpus), 0, 1), 1)
        return Learned(learner.estimate().matrix, learner.replica.steps_taken())

    def learn(
        self,
        learner: ConjugateLearner[Topics],
        corpus: Corpus,
        parts: Iterable[NDArray[np.int64]],
        replicas: int,
        prints: Callable[[], bool] = lambda: True,
    ) -> None:
        """Learn from a replica's mini-batches. prints: whether this replica prints ``ends``."""
        updates = self.updates_of_pass(len(corpus), replicas)
        for count, part in enumerate(parts, 1):
            learner.learn(Batch(corpus.select(part)))
            end = self.ends.get(self.first + count // updates) if count % updates == 0 else None
            if end is not None and prints():
                print(end, flush=True)

    def _run_processes(
        self, corpus: Corpus, strategy: Strategy, replicas: int, start: Tensor | None
    ) -> Learned:
        from murmurate.launch.script import run  # slow to import, and a single replica does not need it

        # all replicas map the files of this folder into memory: pickling would copy the corpus
        with tempfile.TemporaryDirectory() as folder:
            for name in _ARRAYS:
                np.save(Path(folder) / f"{name}.npy", getattr(corpus, name))
            if start is not None:
                np.save(Path(folder) / "start.npy", start.numpy())
            part = functools.partial(_replica, self, folder, corpus.vocabulary_size, start is not None)
            # one thread, so that a seed gives the same topics whatever the number of cores
            results = run(part, replicas=replicas, strategy=strategy, seed=self.seed, threads=1)
        for result in results:
            if result is not None and not isinstance(result, Died):
                return Learned(*result)
        raise RunFailed("all replicas died before the end of training")


def _replica(
    passes: CorpusPasses, folder: str, words: int, has_start: bool, loop: OwnLoop
) -> tuple[Tensor, int] | None:
    """Train one replica. The main replica returns lambda [V, K] and the number of updates, others None. Under
    torchrun a result that is no tensor or plain value would not reach the other ranks."""
    starts, word, counts = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
    corpus = Corpus(starts, word, counts, None, words)
    start = torch.from_numpy(np.load(Path(folder) / "start.npy")) if has_start else None
    learner = passes.learner(loop.replicate, corpus, start)
    parts = functools.partial(passes.parts, len(corpus), replicas=loop.size)
    batches = loop.inputs(parts, per="replica")
    passes.learn(learner, corpus, batches, loop.size, prints=lambda: loop.is_main)
    updates = learner.replica.steps_taken()
    loop.finish(_ENDING_SECONDS)
    matrix = learner.model.estimate(loop.agreed(learner.replica.name)["topics"]).matrix
    return (matrix, updates) if loop.is_main else None
