"""Topics that were found, and what can be asked of them: documents' topics, perplexity, coherence, words.

Perplexity has several definitions, which differ by orders of magnitude; ``docs/metrics.md`` says whose is
whose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmurate.datasets.corpus import Corpus, RemappedCorpus
from murmurate.losses.topics import (
    Documents,
    Folded,
    document_bound,
    expected_topics,
    fold_in,
    pieces,
    width_for,
)

_DOCUMENTS = 1_024  # folded in at a time


@dataclass(frozen=True)
class Topics:
    """lambda: [V, K] float32, parameters of each topic's Dirichlet over words. alpha: [K], of a document's
    topics. iterations, tolerance: of a document's E-step, whatever training was content with."""

    matrix: Tensor
    alpha: Tensor
    iterations: int = 100
    tolerance: float = 1e-4

    @property
    def count(self) -> int:
        """K."""
        return self.matrix.shape[1]

    def word_shares(self) -> Tensor:
        """[V, K] float64, the mean of each topic: its columns sum to 1."""
        matrix = self.matrix.double()
        return matrix / matrix.sum(0)

    def weights(self) -> Tensor:
        """[K] float64, each topic's share of all words it was found from."""
        total = self.matrix.double().sum(0)
        return total / total.sum()

    def top_words(self, number: int) -> list[list[tuple[int, float]]]:
        """For each topic its likeliest words, (word, share), the likeliest first."""
        share, word = self.word_shares().topk(min(number, len(self.matrix)), dim=0)
        return [list(zip(word[:, k].tolist(), share[:, k].tolist(), strict=True)) for k in range(self.count)]

    def diversity(self, number: int = 25) -> float:
        """The share of different words among each topic's ``number`` likeliest: 1 where no two topics have
        one in common, and 1 / K where all are the same (Dieng et al. 2020, section 5). Of few words, V / 4 K
        are taken of each: the others are in every topic's tail."""
        number = max(1, min(number, len(self.matrix) // (4 * self.count)))
        words = [word for tops in self.top_words(number) for word, _ in tops]
        return len(set(words)) / len(words)

    def transform(self, corpus: Corpus | RemappedCorpus) -> NDArray[np.float32]:
        """[D, K] the mean of each document's topics: rows sum to 1."""
        expected = self._expected()
        parts = [_shares(self._gammas(part, *expected)) for part in _parts(corpus)]
        return np.concatenate([np.empty((0, self.count), np.float32), *parts])

    def gammas(self, corpus: Corpus | RemappedCorpus) -> NDArray[np.float64]:
        """[D, K] parameters of the Dirichlet over topics that stands for each document."""
        expected = self._expected()
        parts = [self._gammas(part, *expected) for part in _parts(corpus)]
        return np.concatenate([np.empty((0, self.count)), *parts])

    # -- how good they are --------------------------------------------------------------------------

    def completion_perplexity(
        self, corpus: Corpus | RemappedCorpus, *, seed: int = 0, observed: float = 0.5
    ) -> float:
        """Of words that were kept back, given the others of their document (document completion).

        Each token is shown with chance ``observed``; the documents' topics are folded in from those, and
        the others have chance sum_k E[theta_k] E[beta_kw]. Lower is better; V if nothing was learned.
        Raises ValueError if no token is left to predict.
        """
        random = np.random.default_rng(seed)
        share, expected = self.word_shares(), self._expected()
        log, tokens = 0.0, 0
        for part in _parts(corpus):
            shown, kept = divide(part, observed, random)
            theta = torch.from_numpy(_shares(self._gammas(shown, *expected))).double()
            document = torch.from_numpy(np.repeat(np.arange(len(kept)), kept.lengths))
            word = torch.from_numpy(kept.words.astype(np.int64))
            times = torch.from_numpy(kept.counts.astype(np.float64))
            for k in pieces(len(word)):
                log += float((times[k] * torch.log((theta[document[k]] * share[word[k]]).sum(1))).sum())
            tokens += int(times.sum())
        if not tokens:
            raise ValueError("no word was kept back: the documents are too short, or there are none")
        return math.exp(-log / tokens)

    def bound_perplexity(self, corpus: Corpus | RemappedCorpus) -> float:
        """exp(-bound / tokens) with the documents' terms of the evidence lower bound alone, so that it does
        not depend on how many documents there are. Raises ValueError for a corpus without a token."""
        return math.exp(-self.document_bound(corpus) / _tokens(corpus))

    def full_bound_perplexity(
        self, corpus: Corpus | RemappedCorpus, *, prior: float, documents: int | None = None
    ) -> float:
        """exp(-bound / tokens) with the topics' own terms too, as gensim and scikit-learn compute it.

        documents: of the corpus that these stand for: their terms are scaled up to it (scikit-learn's
        ``total_samples`` and ``sub_sampling``, gensim's ``subsample_ratio``); None takes them as all.
        """
        scale = 1.0 if documents is None else documents / len(corpus)
        bound = scale * self.document_bound(corpus) + self.topic_bound(prior)
        return math.exp(-bound / (scale * _tokens(corpus)))

    def document_bound(self, corpus: Corpus | RemappedCorpus) -> float:
        """The documents' terms of the evidence lower bound."""
        return float(self.document_bounds(corpus).sum())

    def document_bounds(self, corpus: Corpus | RemappedCorpus) -> Tensor:
        """[D] float64: of each document."""
        (beta, alpha), log_beta = self._expected(), self._log_beta()
        parts = [torch.zeros(0, dtype=torch.float64)]
        for part in _parts(corpus):
            documents, folded = self._fold(part, beta, alpha)
            parts.append(document_bound(documents, log_beta, self.alpha, folded.gamma, topics=self.count))
        return torch.cat(parts)

    def topic_bound(self, prior: float) -> float:
        """The topics' own: E[log p(beta | prior) - log q(beta | lambda)]."""
        x = self.matrix.double()
        total = x.sum(0)
        v = len(x)
        own = torch.lgamma(total).sum() - torch.lgamma(x).sum()
        given = self.count * (math.lgamma(v * prior) - v * math.lgamma(prior))
        return float(((prior - x) * self._log_beta()).sum()) + given - float(own)

    def _log_beta(self) -> Tensor:
        """E[log beta] [V, K] float64."""
        x = self.matrix.double()
        return torch.digamma(x) - torch.digamma(x.sum(0))

    def _expected(self) -> tuple[Tensor, Tensor]:
        """(exp E[log beta] [V, W], alpha [W]) that documents are folded in with."""
        width = width_for(self.count)
        x = torch.zeros(len(self.matrix), width)
        x[:, : self.count] = self.matrix
        alpha = torch.ones(width)
        alpha[: self.count] = self.alpha
        beta = expected_topics(x, torch.arange(len(x)), x.double().sum(0), topics=self.count, prior=0.0)
        return beta, alpha

    def _fold(self, part: Corpus, beta: Tensor, alpha: Tensor) -> tuple[Documents, Folded]:
        documents = Documents(
            torch.from_numpy(part.starts),
            torch.from_numpy(part.words),
            torch.from_numpy(part.counts.astype(np.float32)),
        )
        folded = fold_in(
            documents,
            beta,
            alpha,
            topics=self.count,
            iterations=self.iterations,
            tolerance=self.tolerance,
        )
        return documents, folded

    def _gammas(self, part: Corpus, beta: Tensor, alpha: Tensor) -> NDArray[np.float64]:
        _, folded = self._fold(part, beta, alpha)
        gamma: NDArray[np.float64] = folded.gamma[:, : self.count].double().numpy()
        return gamma

    def coherence(self, corpus: Corpus, number: int = 10) -> NDArray[np.float64]:
        """[K] mean normalised pointwise mutual information of each topic's top words over documents (Bouma
        2009; Lau et al. 2014 with documents as windows): 1 is always together, 0 independent, -1 never. A
        word that the corpus has not counts as never together with any."""
        tops = [[word for word, _ in top] for top in self.top_words(number)]
        wanted = np.unique(np.concatenate([np.asarray(top) for top in tops]))
        place = np.full(len(self.matrix), -1)
        place[wanted] = np.arange(len(wanted))
        together = np.zeros((len(wanted), len(wanted)))
        for part in _parts(corpus):
            word = place[part.words]
            document = np.repeat(np.arange(len(part)), part.lengths)
            present = np.zeros((len(part), len(wanted)), np.float32)
            present[document[word >= 0], word[word >= 0]] = 1.0
            together += present.T @ present
        together /= max(len(corpus), 1)
        return np.array([_npmi(together[np.ix_(place[top], place[top])]) for top in tops])


def _npmi(together: NDArray[np.float64]) -> float:
    """Mean over pairs; ``together``: [n, n] shares of documents with both, on its diagonal with each."""
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


def divide(corpus: Corpus, observed: float, seed: int | np.random.Generator) -> tuple[Corpus, Corpus]:
    """Each token into the first corpus with chance ``observed``, else into the second.

    Parts of a corpus, one after another with the same generator, are divided as the whole would be.
    """
    if not 0 < observed < 1:
        raise ValueError(f"observed is {observed}; a share between 0 and 1")
    shown = np.random.default_rng(seed).binomial(corpus.counts, observed).astype(np.int32)
    return _with_counts(corpus, shown), _with_counts(corpus, corpus.counts - shown)


def _with_counts(corpus: Corpus, counts: NDArray[np.int32]) -> Corpus:
    some = counts > 0
    before = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(some, out=before[1:])
    return Corpus(
        before[corpus.starts], corpus.words[some], counts[some], corpus.vocabulary, corpus.vocabulary_size
    )


def _parts(corpus: Corpus | RemappedCorpus) -> Iterator[Corpus]:
    """All of it, copied a few documents at a time: what is made of them stays as small."""
    for first in range(0, len(corpus), _DOCUMENTS):
        yield corpus.select(np.arange(first, min(first + _DOCUMENTS, len(corpus))))


def _shares(gammas: NDArray[np.float64]) -> NDArray[np.float32]:
    shares: NDArray[np.float32] = (gammas / gammas.sum(1, keepdims=True)).astype(np.float32)
    return shares


def _tokens(corpus: Corpus | RemappedCorpus) -> int:
    if not corpus.tokens:
        raise ValueError("a corpus without a word has no perplexity")
    return corpus.tokens
