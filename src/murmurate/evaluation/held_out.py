"""Held-out predictive likelihood of topic models and mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from murmurate.datasets.corpus import Corpus, RemappedCorpus
from murmurate.datasets.interface import DataSet
from murmurate.errors import Refusal
from murmurate.evaluation.interface import Curve, EvalContext, Evaluation
from murmurate.workloads.conjugate import ConjugateLearner
from murmurate.workloads.mixture import Mixture
from murmurate.workloads.topic_model import LatentTopics
from murmurate.workloads.topics import NothingHeldOut, Topics

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

    validation: ClassVar[Mapping[str, str]] = {"perplexity": "validation_perplexity"}

    def evaluate(self, learner: ConjugateLearner[Topics], context: EvalContext) -> dict[str, Any]:
        train, validation, test = cast(DataSet, context.world).divided()
        topics, prior = learner.estimate(), cast(LatentTopics, learner.model).prior
        sample = train.select(range(min(len(train), _COHERENCE_DOCUMENTS)))
        documents = test.select(range(_first(len(test), context.count)))
        validated = validation.select(range(_first(len(validation), context.count)))
        # the same words are held out in every evaluation, so that perplexities can be compared
        return perplexities(topics, prior, documents) | {
            "validation_documents": len(validated),
            "validation_perplexity": _completion(topics, validated),
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

    validation: ClassVar[Mapping[str, str]] = {"log_likelihood": "validation_log_likelihood"}

    def evaluate(self, learner: ConjugateLearner[Mixture], context: EvalContext) -> dict[str, Any]:
        mixture, (_, validation, test) = learner.estimate(), cast(DataSet, context.world).divided()
        count, validated = (_first(len(part), context.count) for part in (test, validation))
        figures: dict[str, Any] = {
            "test_rows": count,
            "log_likelihood": None,
            "log_likelihood_stderr": None,
            "bound_per_row": None,
            "weights": sorted(mixture.weights.tolist(), reverse=True),
            "validation_rows": validated,
            "validation_log_likelihood": None,
        }
        if validated:
            rows = validation.select(range(validated))
            figures["validation_log_likelihood"] = float(mixture.log_likelihood(rows).double().mean())
        if count:
            rows = test.select(range(count))
            likelihoods = mixture.log_likelihood(rows).double()
            figures["log_likelihood"] = float(likelihoods.mean())
            if count > 1:
                figures["log_likelihood_stderr"] = float(likelihoods.std()) / count**0.5
            figures["bound_per_row"] = learner.elbo(rows) / learner.examples
        return figures

    def sentence(self, figures: Mapping[str, Any]) -> str:
        if figures.get("log_likelihood") is None:
            return ""
        rows, nats = figures["test_rows"], figures["log_likelihood"]
        return f"Log-likelihood of {rows:,} test rows: {nats:.3f} nats each"


def _first(available: int, count: int | None) -> int:
    """The number of examples to evaluate, the first ones. Raises Refusal for a ``count`` below 1."""
    if count is not None and count < 1:
        raise Refusal(f"{count} test examples are to be evaluated; take at least one.")
    return available if count is None else min(count, available)


def perplexities(
    topics: Topics, prior: float, documents: Corpus | RemappedCorpus, seed: int = 0
) -> dict[str, Any]:
    """``test_documents``, the number of documents, and their perplexities by name (docs/metrics.md). If they
    have so few words that none is held out, perplexities are None and ``perplexity_bound_full`` is left out.

    prior: zeta of ``TopicModel``. seed: of the choice of the words that are held out.
    """
    figures = {"test_documents": len(documents), "perplexity": None, "perplexity_bound": None}
    completion = _completion(topics, documents, seed)
    if completion is None:
        return figures
    return figures | {
        "perplexity": completion,
        "perplexity_bound": topics.bound_perplexity(documents),
        "perplexity_bound_full": topics.full_bound_perplexity(documents, prior=prior),
    }


def _completion(topics: Topics, documents: Corpus | RemappedCorpus, seed: int = 0) -> float | None:
    """The perplexity by document completion; None if there are so few words that none is held out."""
    if documents.tokens < 2:
        return None
    try:
        return topics.completion_perplexity(documents, seed=seed)
    except NothingHeldOut:
        return None
