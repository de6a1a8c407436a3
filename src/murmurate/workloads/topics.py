"""The estimate of a topic model: topics of documents, words of topics, perplexity, coherence.

Perplexity has several definitions, which differ by orders of magnitude; see ``docs/metrics.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmurate.datasets.corpus import Corpus, RemappedCorpus
from murmurate.errors import Refusal
from murmurate.losses.topics import (
    Documents,
    FoldedIn,
    document_bound,
    expected_topics,
    fold_in,
    pieces,
    width_for,
)

_DOCUMENTS = 1_024  # documents that are processed at a time


class NothingHeldOut(ValueError):
    """No word can be held out: the documents are too short, or there are none."""


@dataclass(frozen=True)
class Topics:
    """The posterior of the topics.

    matrix: lambda [V, K] float32, parameters of each topic's Dirichlet over words. alpha: [K], parameters of
    the Dirichlet prior of a document's topics. iterations, tolerance: when a document's E-step ends (see
    ``TopicModel``); may be stricter than in training. Methods that take documents raise Refusal unless these
    are over V words.
    """

    matrix: Tensor
    alpha: Tensor
    iterations: int = 100
    tolerance: float = 1e-4

    @property
    def count(self) -> int:
        """K, the number of topics."""
        return self.matrix.shape[1]

    def word_shares(self) -> Tensor:
        """[V, K] float64, the posterior mean of each topic's distribution over words: columns sum to 1."""
        matrix = self.matrix.double()
        return matrix / matrix.sum(0)

    def weights(self) -> Tensor:
        """[K] float64, each topic's share of the sum of lambda: about its share of the training words."""
        total = self.matrix.double().sum(0)
        return total / total.sum()

    def top_words(self, number: int) -> list[list[tuple[int, float]]]:
        """For each topic its ``number`` likeliest words as (word id, probability), the likeliest first."""
        share, word = self.word_shares().topk(min(number, len(self.matrix)), dim=0)
        return [list(zip(word[:, k].tolist(), share[:, k].tolist(), strict=True)) for k in range(self.count)]

    def diversity(self, number: int = 25) -> float:
        """The share of distinct words among all topics' ``number`` likeliest words: 1 if no two topics have a
        word in common, 1 / K if all have the same words (Dieng et al. 2020, section 5). At most V / (4 K)
        words of each topic are used."""
        number = max(1, min(number, len(self.matrix) // (4 * self.count)))
        words = [word for tops in self.top_words(number) for word, _ in tops]
        return len(set(words)) / len(words)

    def plane(self) -> tuple[NDArray[np.float64], float]:
        """(coordinates [K, 2] of the topics in a plane, the share of their variance that it shows).

        The coordinates are the first two principal components of the square roots of the topics'
        distributions over words, which is classical scaling of Hellinger distances: topics with similar
        distributions are near one another.
        """
        roots = self.word_shares().sqrt_().T
        roots -= roots.mean(0)
        variance, axes = np.linalg.eigh((roots @ roots.T).numpy())
        variance = np.maximum(variance, 0.0)
        # the last two columns, or the only one, the greatest variance first
        points = (axes * np.sqrt(variance))[:, : -3 if self.count > 1 else None : -1]
        plane = np.zeros((self.count, 2))
        plane[:, : points.shape[1]] = points
        return plane, float(variance[-2:].sum() / variance.sum()) if variance.sum() > 0 else 1.0

    def transform(self, corpus: Corpus | RemappedCorpus) -> NDArray[np.float32]:
        """[D, K] float32, the posterior mean of each document's distribution over topics: rows sum to 1."""
        expected = self._expected()
        shares = [_shares(self._gammas(part, *expected)) for part in self._batches(corpus)]
        return np.concatenate([np.empty((0, self.count), np.float32), *shares])

    def probabilities(self, counts: NDArray[Any]) -> NDArray[np.float32]:
        """``transform`` of dense counts [D, V]. Raises Refusal for counts that are negative or fractional."""
        document, word = np.nonzero(counts)
        entries, (documents, words) = counts[document, word], counts.shape
        return self.transform(Corpus.from_entries(document, word, entries, shape=(documents, words)))

    def gammas(self, corpus: Corpus | RemappedCorpus) -> NDArray[np.float64]:
        """[D, K] float64, parameters of each document's posterior Dirichlet over topics."""
        expected = self._expected()
        gammas = [self._gammas(part, *expected) for part in self._batches(corpus)]
        return np.concatenate([np.empty((0, self.count)), *gammas])

    # -- quality ------------------------------------------------------------------------------------

    def completion_perplexity(
        self, corpus: Corpus | RemappedCorpus, *, seed: int = 0, observed: float = 0.5
    ) -> float:
        """Perplexity of held-out tokens, given the other tokens of their document (document completion).

        Each token is observed with probability ``observed``; a document's topics are inferred from its
        observed tokens, and a held-out token of word w has probability sum_k E[theta_k] E[beta_kw]. Lower is
        better; V if nothing was learned. Raises NothingHeldOut if no token is held out, and ValueError unless
        ``observed`` is between 0 and 1.
        """
        random = np.random.default_rng(seed)
        share, expected = self.word_shares(), self._expected()
        log_likelihood, tokens = 0.0, 0
        for part in self._batches(corpus):
            seen, held_out = split_tokens(part, observed, random)
            theta = torch.from_numpy(_shares(self._gammas(seen, *expected))).double()
            document = torch.from_numpy(np.repeat(np.arange(len(held_out)), held_out.lengths))
            word = torch.from_numpy(held_out.words.astype(np.int64))
            counts = torch.from_numpy(held_out.counts.astype(np.float64))
            for piece in pieces(len(word)):
                probability = (theta[document[piece]] * share[word[piece]]).sum(1)
                log_likelihood += float((counts[piece] * torch.log(probability)).sum())
            tokens += int(counts.sum())
        if not tokens:
            raise NothingHeldOut("no word was held out: the documents are too short, or there are none")
        return _perplexity(-log_likelihood / tokens)

    def bound_perplexity(self, corpus: Corpus | RemappedCorpus) -> float:
        """exp(-bound / tokens), where the bound has only the documents' terms of the evidence lower bound, so
        that the result does not depend on the number of documents. Raises ValueError for a corpus without a
        token."""
        return _perplexity(-self.document_bound(corpus) / _tokens(corpus))

    def full_bound_perplexity(
        self, corpus: Corpus | RemappedCorpus, *, prior: float, documents: int | None = None
    ) -> float:
        """exp(-bound / tokens), where the bound includes the topics' terms, as gensim and scikit-learn
        compute it.

        prior: zeta of ``TopicModel``. documents: size of the corpus of which ``corpus`` is a sample; the
        documents' terms are scaled up to it (scikit-learn's ``total_samples`` and ``sub_sampling``, gensim's
        ``subsample_ratio``). None: ``corpus`` is no sample. Raises ValueError for a corpus without a token.
        """
        tokens = _tokens(corpus)
        scale = 1.0 if documents is None else documents / len(corpus)
        bound = scale * self.document_bound(corpus) + self.topic_bound(prior)
        return _perplexity(-bound / (scale * tokens))

    def document_bound(self, corpus: Corpus | RemappedCorpus) -> float:
        """The sum of the documents' terms of the evidence lower bound."""
        return float(self.document_bounds(corpus).sum())

    def document_bounds(self, corpus: Corpus | RemappedCorpus) -> Tensor:
        """[D] float64, each document's terms of the evidence lower bound."""
        (beta, alpha), log_beta = self._expected(), self._log_beta()
        parts = [torch.zeros(0, dtype=torch.float64)]
        for part in self._batches(corpus):
            documents, result = self._fold_in(part, beta, alpha)
            parts.append(document_bound(documents, log_beta, self.alpha, result.gamma, topics=self.count))
        return torch.cat(parts)

    def topic_bound(self, prior: float) -> float:
        """The topics' term of the evidence lower bound: E[log p(beta | prior) - log q(beta | lambda)]."""
        x = self.matrix.double()
        total = x.sum(0)
        v = len(x)
        normaliser = torch.lgamma(total).sum() - torch.lgamma(x).sum()
        prior_normaliser = self.count * (math.lgamma(v * prior) - v * math.lgamma(prior))
        return float(((prior - x) * self._log_beta()).sum()) + prior_normaliser - float(normaliser)

    def _batches(self, corpus: Corpus | RemappedCorpus) -> Iterator[Corpus]:
        """Copies of all documents, ``_DOCUMENTS`` at a time, which bounds the memory of results. Raises
        Refusal for documents over another number of words."""
        for first in range(0, len(corpus), _DOCUMENTS):
            part = corpus.select(np.arange(first, min(first + _DOCUMENTS, len(corpus))))
            if part.vocabulary_size != len(self.matrix):
                raise Refusal(
                    f"The documents are over {part.vocabulary_size:,} words, and the topics over "
                    f"{len(self.matrix):,}. Count the words that the topics know: read(..., "
                    "vocabulary=model.vocabulary), or corpus.with_vocabulary(model.vocabulary)."
                )
            yield part

    def _log_beta(self) -> Tensor:
        """[V, K] float64, E[log beta]."""
        x = self.matrix.double()
        return torch.digamma(x) - torch.digamma(x.sum(0))

    def _expected(self) -> tuple[Tensor, Tensor]:
        """(exp E[log beta] [V, W], up to a factor for each word; alpha [W]), arguments of ``fold_in``; W is
        ``width_for`` K topics."""
        width = width_for(self.count)
        x = torch.zeros(len(self.matrix), width)
        x[:, : self.count] = self.matrix
        alpha = torch.ones(width)
        alpha[: self.count] = self.alpha
        beta = expected_topics(x, torch.arange(len(x)), x.double().sum(0), topics=self.count, prior=0.0)
        return beta, alpha

    def _fold_in(self, part: Corpus, beta: Tensor, alpha: Tensor) -> tuple[Documents, FoldedIn]:
        documents = Documents(
            torch.from_numpy(part.starts),
            torch.from_numpy(part.words),
            torch.from_numpy(part.counts.astype(np.float32)),
        )
        result = fold_in(
            documents,
            beta,
            alpha,
            topics=self.count,
            iterations=self.iterations,
            tolerance=self.tolerance,
        )
        return documents, result

    def _gammas(self, part: Corpus, beta: Tensor, alpha: Tensor) -> NDArray[np.float64]:
        _, result = self._fold_in(part, beta, alpha)
        gamma: NDArray[np.float64] = result.gamma[:, : self.count].double().numpy()
        return gamma

    def coherence(self, corpus: Corpus, number: int = 10) -> NDArray[np.float64]:
        """[K] mean normalised pointwise mutual information of pairs of each topic's ``number`` top words
        (Bouma 2009; Lau et al. 2014 with documents as windows): 1 if they always occur in the same documents,
        0 if they occur independently, -1 if they never occur together. A word that is not in the corpus
        counts as never occurring together with another."""
        tops = [[word for word, _ in top] for top in self.top_words(number)]
        relevant = np.unique(np.concatenate([np.asarray(top) for top in tops]))
        index = np.full(len(self.matrix), -1)
        index[relevant] = np.arange(len(relevant))
        together = np.zeros((len(relevant), len(relevant)))
        for part in self._batches(corpus):
            word = index[part.words]
            document = np.repeat(np.arange(len(part)), part.lengths)
            present = np.zeros((len(part), len(relevant)), np.float32)
            present[document[word >= 0], word[word >= 0]] = 1.0
            together += present.T @ present
        together /= max(len(corpus), 1)
        return np.array([_npmi(together[np.ix_(index[top], index[top])]) for top in tops])


def _npmi(together: NDArray[np.float64]) -> float:
    """The mean over pairs of n words. together: [n, n], the share of documents that have both words; on the
    diagonal, the share that has the word."""
    alone = np.diag(together)
    values = []
    for i in range(len(together)):
        for j in range(i):
            both = together[i, j]
            if both <= 0:
                values.append(-1.0)
            elif both >= 1:
                values.append(1.0)
            else:
                values.append(math.log(both / (alone[i] * alone[j])) / -math.log(both))
    return float(np.mean(values)) if values else 0.0


def split_tokens(corpus: Corpus, observed: float, seed: int | np.random.Generator) -> tuple[Corpus, Corpus]:
    """Put each token into the first corpus with probability ``observed``, else into the second.

    Splitting consecutive parts of a corpus with the same random generator gives the same result as splitting
    the whole corpus. Raises ValueError unless ``observed`` is between 0 and 1.
    """
    if not 0 < observed < 1:
        raise ValueError(f"observed is {observed}; it must lie between 0 and 1")
    seen = np.random.default_rng(seed).binomial(corpus.counts, observed).astype(np.int32)
    return _with_counts(corpus, seen), _with_counts(corpus, corpus.counts - seen)


def _with_counts(corpus: Corpus, counts: NDArray[np.int32]) -> Corpus:
    """The corpus with other counts of its entries, without those whose count is 0."""
    positive = counts > 0
    kept_before = np.zeros(len(counts) + 1, np.int64)  # number of kept entries before each entry
    np.cumsum(positive, out=kept_before[1:])
    return Corpus(
        kept_before[corpus.starts],
        corpus.words[positive],
        counts[positive],
        corpus.vocabulary,
        corpus.vocabulary_size,
    )


def _shares(gammas: NDArray[np.float64]) -> NDArray[np.float32]:
    shares: NDArray[np.float32] = (gammas / gammas.sum(1, keepdims=True)).astype(np.float32)
    return shares


def _tokens(corpus: Corpus | RemappedCorpus) -> int:
    if not corpus.tokens:
        raise ValueError("a corpus without a word has no perplexity")
    return corpus.tokens


def _perplexity(nats: float) -> float:
    """exp(nats), with nats a token; at most e^690, below the largest number that a record may have, which a
    prior near 0 would exceed."""
    return math.exp(min(nats, 690.0))
