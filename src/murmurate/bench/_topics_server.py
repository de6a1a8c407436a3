"""Our answers to the requests of ``bench topics`` (the protocol is in ``topics_windows``), in their own
process.

Learner, source and strategy are those of ``murmurate topics fit``; as with the peers, there is no launcher,
recorder or checkpoint. Several replicas take turns on this one core, on a simulated fabric: waiting costs
nothing, and the schedule decides how stale each replica is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import numpy as np
import torch

import murmurate
from murmurate import native
from murmurate.bench._peer_protocols.topics_windows import DocumentRows, Fit, Snapshots, serve
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.interface import Subset
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.sources.examples import ExampleOrder, ExampleSource
from murmurate.spec import EnvSpec
from murmurate.strategies import strategy
from murmurate.training.run import Run
from murmurate.workloads.conjugate import ConjugateLearner
from murmurate.workloads.topic_model import TopicModel
from murmurate.workloads.topics import Topics


def run_for(options: dict[str, Any]) -> Run:
    """The run of ``options``: the model's fields, ``strategy`` (its name and fields), ``replicas`` and
    ``seed``.

    Fields of the model that are None or absent are the recipe's; the defaults are ``solo`` and one replica.
    """
    run = recipe("corpus-lda")
    named = {field.name for field in dataclasses.fields(run.learner)} & set(options)
    fields = {name: options[name] for name in named if options[name] is not None}
    learner = dataclasses.replace(run.learner, **fields, validate_every=0)
    settings = dict(options.get("strategy") or {"name": "solo"})
    chosen = strategy(settings.pop("name"))(**settings)
    run = dataclasses.replace(
        run, learner=learner, strategy=chosen, replicas=options.get("replicas", 1), seed=options["seed"]
    )
    return dataclasses.replace(run, strategy=run.learner.adapted(run.strategy))


def prepare(rows: DocumentRows, options: dict[str, Any]) -> Fit:
    run = run_for(options)
    corpus = Corpus(rows.starts, rows.words, rows.counts, None, rows.vocabulary_size)
    documents = Subset(corpus, np.arange(len(corpus)))
    return functools.partial(_fit_alone if run.members == 1 else _fit_together, run, documents)


def _learner(run: Run, documents: Subset[Corpus], replicate: Any) -> ConjugateLearner[Topics]:
    words = documents.select(np.arange(0)).vocabulary_size
    spec = EnvSpec("corpus", (words,), torch.int32, 0, examples=len(documents))
    return cast(TopicModel, run.learner).build(Context(spec, replicate, run.seed, examples=documents))


def _source(run: Run, documents: Subset[Corpus], rank: int) -> ExampleSource:
    batch = cast(TopicModel, run.learner).batch
    return ExampleSource(
        documents, batch, ExampleOrder(len(documents), seed=run.seed, rank=rank, replicas=run.replicas)
    )


def _matrix(learner: ConjugateLearner[Topics]) -> np.ndarray:
    matrix: np.ndarray = learner.estimate().matrix.numpy()
    return matrix


def _fit_alone(run: Run, documents: Subset[Corpus], snapshots: Snapshots) -> None:
    learner = _learner(run, documents, Replica)
    documents_seen = 0
    for batch in _source(run, documents, 0):
        learner.learn(batch)
        documents_seen += batch.env_steps
        snapshots(documents_seen, functools.partial(_matrix, learner))


def _fit_together(run: Run, documents: Subset[Corpus], snapshots: Snapshots) -> None:
    """Snapshots are of the centre's topics, or of the first replica's; the last one raises ``Enough``."""
    seen_by_rank, learners = [0] * run.members, {}
    evaluated_rank = run.members - 1 if run.strategy.centre else 0

    def member(rank: int, fabric: Any) -> None:
        replicator = Replicator(run.strategy, fabric)
        learner = _learner(run, documents, replicator.replicate)
        learners[rank] = learner
        if rank == run.replicas:
            _serve(replicator)
        for batch in _source(run, documents, rank):
            learner.learn(batch)
            seen_by_rank[rank] += batch.env_steps
            snapshots(sum(seen_by_rank), lambda: _matrix(learners[evaluated_rank]))

    fabric = SimulatedFabric(run.members, seed=run.seed, keep_log=False)
    fabric.run([functools.partial(member, rank) for rank in range(run.members)])


def _serve(replicator: Replicator) -> None:
    while True:
        with torch.no_grad():
            for bound in replicator.bound_replicas.values():
                bound.strategy.serve(bound.replica, bound.channel)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    serve(f"murmurate ({native.simd})", murmurate.__version__, prepare)


if __name__ == "__main__":
    main()
