"""Held-out predictive likelihood of topic models and mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from murmurate.datasets.corpus import Corpus, RemappedCorpus
from murmurate.datasets.interface import DataSet
from murmurate.evaluation.interface import Curve, EvalContext, Evaluation
from murmurate.workloads.conjugate import ConjugateLearner
from murmurate.workloads.mixture import Mixture
from murmurate.workloads.topic_model import LatentTopics
from murmurate.workloads.topics import Topics

_COHERENCE_DOCUMENTS = 20_000


@dataclass(frozen=True)
class HeldOutDocuments(Evaluation):
    """Perplexities of the test documents, and coherence and diversity of the topics (docs/metrics.md)."""

    next_command: ClassVar[str] = "topics show"
    curves: ClassVar[tuple[Curve, ...]] = (
        Curve(
            "perplexity",
            "Perplexity",
            "perplexity of held-out documents",
            "By document completion; lower is better.",
            lower_is_better=True,
        ),
    )

    headline: ClassVar[Curve] = Curve(
        "perplexity",
        "Perplexity of the test documents",
        "perplexity of the test documents",
        "By document completion; lower is better.",
        lower_is_better=True,
    )

    def evaluate(self, learner: ConjugateLearner[Topics], context: EvalContext) -> dict[str, Any]:
        train, _, test = cast(DataSet, context.world).divided()
        topics, prior = learner.estimate(), cast(LatentTopics, learner.model).prior
        sample = train.select(range(min(len(train), _COHERENCE_DOCUMENTS)))
        return perplexities(topics, prior, test.select(range(len(test)))) | {
            "coherence": float(topics.coherence(sample).mean()),
            "diversity": topics.diversity(),
        }

    def sentence(self, figures: Mapping[str, Any]) -> str:
        if figures.get("perplexity") is None:
            return ""
        return f"Perplexity of {figures['test_documents']:,} test documents: {figures['perplexity']:,.0f}"


@dataclass(frozen=True)
class HeldOutRows(Evaluation):
    """Mean log-likelihood of the test rows, in nats (docs/metrics.md)."""

    curves: ClassVar[tuple[Curve, ...]] = (
        Curve(
            "log_likelihood",
            "Log-likelihood",
            "log-likelihood of held-out rows (nats)",
            "Higher is better.",
            digits=3,
        ),
    )

    headline: ClassVar[Curve] = Curve(
        "log_likelihood",
        "Log-likelihood of the test rows",
        "log-likelihood of the test rows (nats each)",
        "Higher is better.",
        spread="log_likelihood_stderr",
    )

    def evaluate(self, learner: ConjugateLearner[Mixture], context: EvalContext) -> dict[str, Any]:
        mixture, (_, _, test) = learner.estimate(), cast(DataSet, context.world).divided()
        figures: dict[str, Any] = {
            "test_rows": len(test),
            "log_likelihood": None,
            "log_likelihood_stderr": None,
            "bound_per_row": None,
            "weights": sorted(mixture.weights.tolist(), reverse=True),
        }
        if len(test):
            rows = test.select(range(len(test)))
            likelihoods = mixture.log_likelihood(rows).double()
            figures["log_likelihood"] = float(likelihoods.mean())
            if len(test) > 1:
                figures["log_likelihood_stderr"] = float(likelihoods.std()) / len(test) ** 0.5
            figures["bound_per_row"] = learner.elbo(rows) / learner.examples
        return figures

    def sentence(self, figures: Mapping[str, Any]) -> str:
        if figures.get("log_likelihood") is None:
            return ""
        rows, nats = figures["test_rows"], figures["log_likelihood"]
        return f"Log-likelihood of {rows:,} test rows: {nats:.3f} nats each"


def perplexities(
    topics: Topics, prior: float, documents: Corpus | RemappedCorpus, seed: int = 0
) -> dict[str, Any]:
    """Perplexities of ``documents`` by name; if the documents have fewer than two words, they are None and
    ``perplexity_bound_full`` is left out."""
    figures = {"test_documents": len(documents), "perplexity": None, "perplexity_bound": None}
    if documents.tokens < 2:
        return figures
    return figures | {
        "perplexity": topics.completion_perplexity(documents, seed=seed),
        "perplexity_bound": topics.bound_perplexity(documents),
        "perplexity_bound_full": topics.full_bound_perplexity(documents, prior=prior),
    }
