"""What the figures of a topic model mean, in a sentence each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_MEANINGS = {
    "test_documents": "not used in training, unless you named them yourself",
    "perplexity": (
        "of held-out words, given the other words of their document: each is as hard to predict as one of "
        "so many equally likely words. At least 1; {words:,} if nothing was learned. Lower is better"
    ),
    "perplexity_bound": (
        "exp(-bound / words), where the evidence lower bound has only the terms of documents: an upper bound "
        "of the perplexity of whole documents. Compare it with other bounds only"
    ),
    "perplexity_bound_full": (
        "the same with the terms of the topics too, as in gensim and scikit-learn. These terms are shared by "
        "the {documents:,} documents, so with few of them it has many digits. Compare it only between models "
        "of the same size, on the same documents"
    ),
    "coherence": (
        "NPMI of the topics' likeliest words: 1 if they always occur together, 0 if independently, -1 if "
        "never"
    ),
    "diversity": (
        "share of different words among the likeliest of all topics: 1 if topics share none, 1 / topics if "
        "they are all alike"
    ),
}


class TopicFigure(NamedTuple):
    name: str
    value: str
    meaning: str


def explained(figures: Mapping[str, Any], words: int) -> list[TopicFigure]:
    """Those of ``figures`` that have a meaning here, with it. words: size of the vocabulary."""
    documents = figures.get("test_documents") or 0
    return [
        TopicFigure(name, _number(figures[name]), meaning.format(words=words, documents=documents))
        for name, meaning in _MEANINGS.items()
        if name in figures
    ]


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e7:
        return f"{value:.2e}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
