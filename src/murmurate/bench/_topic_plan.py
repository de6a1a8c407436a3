"""How much ``bench topics-speedup`` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from murmurate.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Range


@dataclass(frozen=True)
class SpeedupPlan:
    """nW is the number of workers (nodes), p of threads of each worker, B of local updates between two pushes
    of a worker, and M of pushes that the master combines in one update.

    documents: number of documents of the generated corpus.
    vocabulary: number of words of its vocabulary.
    topics: number of topics.
    mean_length: mean number of words of a document.
    kept: number of documents of the corpus that are held out for the perplexity.

    workers: values of nW at p = 1, for each B of workers_local_updates (in the paper, B is 1).
    threads: values of p at nW = 1 and B = 15.
    both: values of p = nW, for each B of local_updates.
    largest: nW and p of one more case, at B = 15.
    workers_batch: M of the cases of ``workers`` under the paper's rule.
    batch: M of all other cases under the paper's rule.
    rate: eta of the rule ``average``.
    target_documents: the target is the serial run's perplexity after so many documents.
    look_factor: the perplexity is computed each time the number of documents has grown by this factor.
    most: documents after which a run ends that has not reached the target.
    widths: vocabularies and mean lengths of corpora on which the bytes of a push are measured.
    real_documents: documents of a run on real processes whose speed is measured; the runs whose perplexity is
        computed have half as many; 0: no runs on real processes.
    real_seeds: number of seeds of the runs on real processes.
    real_target: as target_documents, for the runs on real processes.
    real_look: documents between two evaluations of a run on real processes.

    workers_local_updates: values of B in the cases of ``workers``.
    local_updates: values of B in the cases of ``both``.
    width_local_updates: values of B for which the bytes of a push are measured.
    measured_updates: number of updates that are timed.
    pushes: number of pushes that are timed.
    network: latency and bandwidth between nodes.
    sparse_documents: documents of the runs that compare sparse and dense pushes.
    sparse_looks: number of evaluations of these runs.
    sparse_local_updates: values of B of these runs.
    sparse_rates: values of the rate of these runs.
    where: the folder that keeps results.
    """

    documents: PositiveInt = 10_000
    vocabulary: PositiveInt = 2_000
    topics: PositiveInt = 20
    mean_length: PositiveFloat = 200
    kept: PositiveInt = 300
    workers: tuple[PositiveInt, ...] = (1, 4, 14)
    workers_local_updates: tuple[PositiveInt, ...] = (1, 15)
    threads: tuple[PositiveInt, ...] = (1, 3, 8)
    both: tuple[PositiveInt, ...] = (2, 8)
    local_updates: tuple[PositiveInt, ...] = (5, 20)
    largest: tuple[PositiveInt, PositiveInt] | None = None
    workers_batch: PositiveInt = 36
    batch: PositiveInt = 16
    rate: PositiveFloat = 0.02
    target_documents: PositiveInt = 10_000
    look_factor: PositiveFloat = 1.1
    most: PositiveInt = 1_000_000
    sparse_documents: PositiveInt = 20_000
    sparse_looks: PositiveInt = 10
    sparse_local_updates: tuple[PositiveInt, ...] = (5, 15)
    sparse_rates: tuple[PositiveFloat, ...] = (0.02,)
    widths: tuple[tuple[PositiveInt, PositiveFloat], ...] = ((10_000, 229), (102_660, 330))
    width_local_updates: tuple[PositiveInt, ...] = (1, 5, 15)
    real_documents: NonNegativeInt = 40_000
    real_seeds: PositiveInt = 3
    real_look: PositiveInt = 640
    real_target: PositiveInt = 5_000
    measured_updates: Annotated[int, Range(2)] = 100
    pushes: PositiveInt = 20
    network: str = "latency=1e-4,bandwidth=1.25e9"
    where: str = "runs/topics-speedup"


FULL_PLAN = SpeedupPlan(
    documents=20_000,
    vocabulary=10_000,
    topics=50,
    mean_length=229,
    workers=(1, 4, 9, 14, 19),
    threads=(1, 3, 5, 8, 10),
    both=(2, 4, 6, 8),
    local_updates=(5, 10, 15, 20),
    largest=(20, 10),
    target_documents=20_000,
    look_factor=1.05,
    most=4_000_000,
    sparse_documents=200_000,
    sparse_rates=(0.02, 0.1),
    real_documents=100_000,
    real_seeds=5,
    real_target=10_000,
    measured_updates=300,
    pushes=50,
)
