"""How much ``bench topics-speedup`` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeedupPlan:
    """documents, vocabulary, topics, mean_length: of the generated corpus. kept: of them, held out for
    perplexity.

    workers: nW at p = 1 and each B of workers_local_updates (the paper has 1). threads: p at nW = 1, B = 15.
    both: p = nW at each B of local_updates. largest: nW, p at B = 15.
    workers_batch, batch: M under the paper's rule, of the first and of the others. rate: eta of ``average``.
    target_documents: the target is the serial run's perplexity after so many documents.
    look_factor: the perplexity is computed each time the documents have grown by this factor. most: of a run.
    sparse_*: documents, evaluations, local updates and rates of sparse against dense pushes.
    widths: vocabularies (and mean lengths) for the bytes of a push.
    real_documents, real_seeds: of runs on processes whose speed is measured; those whose perplexity is
        computed, each real_look documents, are half as long. real_target: as target_documents, of these.

    workers_local_updates, local_updates, width_local_updates: values of B. measured_updates, pushes: numbers
    of updates and pushes that are timed for the cost of an update and of a push. network: latency and
    bandwidth between nodes.
    sparse_documents, sparse_looks, sparse_local_updates, sparse_rates: of sparse against dense pushes.
    real_look: documents between two evaluations. where: the folder that keeps results.
    """

    documents: int = 10_000
    vocabulary: int = 2_000
    topics: int = 20
    mean_length: float = 200
    kept: int = 300
    workers: tuple[int, ...] = (1, 4, 14)
    workers_local_updates: tuple[int, ...] = (1, 15)
    threads: tuple[int, ...] = (1, 3, 8)
    both: tuple[int, ...] = (2, 8)
    local_updates: tuple[int, ...] = (5, 20)
    largest: tuple[int, int] | None = None
    workers_batch: int = 36
    batch: int = 16
    rate: float = 0.02
    target_documents: int = 10_000
    look_factor: float = 1.1
    most: int = 1_000_000
    sparse_documents: int = 20_000
    sparse_looks: int = 10
    sparse_local_updates: tuple[int, ...] = (5, 15)
    sparse_rates: tuple[float, ...] = (0.02,)
    widths: tuple[tuple[int, float], ...] = ((10_000, 229), (102_660, 330))
    width_local_updates: tuple[int, ...] = (1, 5, 15)
    real_documents: int = 40_000
    real_seeds: int = 3
    real_look: int = 640
    real_target: int = 5_000
    measured_updates: int = 100
    pushes: int = 20
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
