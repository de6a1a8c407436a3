"""What was learned of a corpus or a table, as told by documents or rows that were kept back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from murmurate.datasets.corpus import Corpus, Over
from murmurate.datasets.table_world import TableWorld
from murmurate.errors import Refusal
from murmurate.sources.examples import Chosen, CorpusWorld
from murmurate.training.data_record import CorpusRecord, read_record, refuse_missing
from murmurate.training.restore import load_agent, run_folder
from murmurate.training.run import Run
from murmurate.workloads.conjugate import ConjugateLearner
from murmurate.workloads.mixture import Mixture
from murmurate.workloads.topic_model import LatentTopics
from murmurate.workloads.topics import Topics

_COHERENCE_DOCUMENTS = 20_000


@dataclasses.dataclass(frozen=True)
class Found:
    """A run's topics, the prior they were found with, their corpus's settings, and what it was then."""

    topics: Topics
    prior: float
    world: CorpusWorld
    record: CorpusRecord

    def divided(self) -> tuple[Chosen[Corpus], Chosen[Corpus], Chosen[Corpus]]:
        """The documents (learned from, validated with, tested with). Raises Refusal where the corpus is gone
        or has changed."""
        refuse_missing(self.world)
        self.record.check(self.world)
        return self.world.divided()


def found(run: Run, where: Path) -> Found:
    """The consensus topics of a checkpoint folder. Raises Refusal for a run of something else."""
    if not isinstance(run.world, CorpusWorld):
        raise Refusal(f"{run.recipe} is no topic model: topics are found by murmurate topics fit.")
    learner = load_agent(run, where)
    if not isinstance(learner.model, LatentTopics):
        raise Refusal(f"{run.recipe} has no topics.")
    record = read_record(run_folder(where), run.world)
    return Found(learner.found(), learner.model.prior, run.world, record)


def held_out(run: Run, where: Path) -> dict[str, Any]:
    """How well the test documents, or rows, are foretold (fields: ``docs/metrics.md``); None without any."""
    return _rows(run, where, run.world) if isinstance(run.world, TableWorld) else _documents(run, where)


def _rows(run: Run, where: Path, world: TableWorld) -> dict[str, Any]:
    learner: ConjugateLearner[Mixture] = load_agent(run, where)
    mixture, (_, _, test) = learner.found(), world.divided()
    facts: dict[str, Any] = {
        "test_rows": len(test),
        "log_likelihood": None,
        "bound_per_row": None,
        "weights": sorted(mixture.weights.tolist(), reverse=True),
    }
    if len(test):
        rows = test.select(range(len(test)))
        facts["log_likelihood"] = float(mixture.log_likelihood(rows).mean())
        facts["bound_per_row"] = learner.elbo(rows) / learner.examples
    return facts


def _documents(run: Run, where: Path) -> dict[str, Any]:
    it = found(run, where)
    train, _, test = it.divided()
    documents = test.select(range(len(test)))
    some = train.select(range(min(len(train), _COHERENCE_DOCUMENTS)))
    return measures(it, documents) | {
        "coherence": float(it.topics.coherence(some).mean()),
        "diversity": it.topics.diversity(),
    }


def measures(it: Found, documents: Corpus | Over, seed: int = 0) -> dict[str, Any]:
    """Perplexities of ``documents``, each by its name."""
    nothing = {"test_documents": len(documents), "perplexity": None, "perplexity_bound": None}
    if documents.tokens < 2:
        return nothing
    return nothing | {
        "perplexity": it.topics.completion_perplexity(documents, seed=seed),
        "perplexity_bound": it.topics.bound_perplexity(documents),
        "perplexity_bound_full": it.topics.full_bound_perplexity(documents, prior=it.prior),
    }
