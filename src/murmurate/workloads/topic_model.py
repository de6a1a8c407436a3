"""Latent Dirichlet allocation by stochastic variational inference, under any strategy (DPSVI).

Mohamad et al., Algorithms 3 and 4; alone it is Hoffman et al. 2013, figure 6. The natural gradient of a
mini-batch is lambda - lambda-hat (equations 50 to 52), so inference is plain SGD, and what replicas
exchange are the parameters of the topics, as they would those of a net.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from murmurate.losses.checks import check_shape
from murmurate.losses.topics import Documents, Folded, expected_topics, fold_in, width_for
from murmurate.rows import Rows
from murmurate.spec import Batch, EnvSpec, Examples, Outcome, derive_seed
from murmurate.vector import Replica
from murmurate.workloads.corpus import Corpus
from murmurate.workloads.topics import Topics

_REFRESH_UPDATES = 1_000  # after which the sums over all words are added up anew
_VALIDATION = 500  # documents that are looked at on the way
# documents that each topic begins with, and their share of its words (init "documents")
_SEED_DOCUMENTS, _SEED_SHARE = 2, 0.1


class Library(Protocol):
    """Documents to begin with: a ``Corpus``, or some of one."""

    def __len__(self) -> int: ...
    def select(self, documents: Any, /) -> Corpus: ...


@dataclass(frozen=True)
class TopicModel:
    """Hyper-parameters of the model and of its inference.

    topics: K. batch: G, documents of an update.
    alpha: of the Dirichlet prior of a document's topics, the same for each; none is 1 / K.
    prior: of that of a topic's words (zeta); none is 1 / K.
    iterations: of a document's E-step, at most. tolerance: mean change of its gammas at which it ends.
    step_rule: of the local step eta at update t, and of what a pushed step counts for (rho).
        ``robbins-monro``: eta = (delay + t) ** -forgetting, and ``average`` a constant eta of ``rate``; the
        steps of several replicas count as their mean. ``paper``: eta = rho = rate / (p B M) ** 0.25
        (Mohamad et al., equation 13); the two multiply.
    init: ``documents`` begins each topic with the words of some documents, ``random`` with gamma draws (from
        which the paper's steps do not find out), ``svi`` with one pass of this algorithm on one replica.
        From such a start long first steps only lead away: a delay of 10 ends 1% and 5% above one of 30.
    validate_every: own updates between looks at the perplexity of some validation documents; 0 never looks.
    """

    name: ClassVar[str] = "lda"
    summary: ClassVar[str] = "latent Dirichlet allocation by stochastic variational inference"

    topics: int = 50
    batch: int = 256
    alpha: float | None = None
    prior: float | None = None
    iterations: int = 20
    tolerance: float = 1e-3
    step_rule: Literal["robbins-monro", "average", "paper"] = "robbins-monro"
    rate: float = 0.1
    delay: float = 30.0
    forgetting: float = 0.7
    init: Literal["documents", "random", "svi"] = "documents"
    validate_every: int = 100

    @property
    def learns_from(self) -> Examples:
        return Examples(self.batch, shrinks=self.eta(0))  # lambda <- (1 - eta) lambda + eta lambda-hat

    def resolved(self, spec: EnvSpec, device: torch.device) -> TopicModel:
        return self

    def eta(self, t: int) -> float:
        """The local step after ``t`` updates, before a strategy scales it."""
        return float((self.delay + t) ** -self.forgetting) if self.step_rule == "robbins-monro" else self.rate

    def check(self) -> None:
        """Raise ValueError for hyper-parameters that make no sense."""
        least = {"topics": 1, "batch": 1, "iterations": 1}
        for what, value in least.items():
            if getattr(self, what) < value:
                raise ValueError(f"{what} is {getattr(self, what)}; at least {value}")
        for what in ("alpha", "prior"):
            value_ = getattr(self, what)
            if value_ is not None and not value_ > 0:
                raise ValueError(f"{what} is {value_}; a Dirichlet's parameter is above 0")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is {self.rate}; a step towards lambda-hat lies between 0 and 1")
        if not (self.delay >= 1 and 0 <= self.forgetting <= 1):
            raise ValueError(
                f"delay is {self.delay:g} and forgetting {self.forgetting:g}; delay is at least 1, so that "
                "the first step is not longer than the way to lambda-hat, and forgetting between 0 and 1"
            )

    def build(
        self,
        spec: EnvSpec,
        replicate: Callable[..., Replica],
        *,
        seed: int,
        device: torch.device,
        updates: int | None = None,
        corpus: Library | None = None,
        validation: Library | None = None,
        start: Tensor | None = None,
    ) -> TopicLearner:
        """The learner of one replica; all begin alike, from (seed).

        corpus: what ``init`` looks at; without one it begins at random. validation: documents whose
        perplexity it tells of now and then. start: lambda [V, K] to go on from, whatever ``init`` says.
        """
        self.check()
        return TopicLearner(
            self, spec, replicate, seed=seed, device=device, corpus=corpus, validation=validation, start=start
        )


class TopicMatrix(nn.Module):
    """What is replicated: lambda less its prior, [V + 1, W], and in its last row the sum of all others.

    A sum is what every strategy keeps: means, moves and sums of such matrices have it again, so no update
    has to add up all words to know what exp(E[log beta]) divides by.
    """

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.topics = nn.Parameter(torch.cat([start, start.double().sum(0, keepdim=True).float()]))


class TopicLearner:
    """One replica of the model (see ``Learner``)."""

    def __init__(
        self,
        config: TopicModel,
        spec: EnvSpec,
        replicate: Callable[..., Replica],
        *,
        seed: int,
        device: torch.device,
        corpus: Library | None,
        validation: Library | None,
        start: Tensor | None = None,
    ) -> None:
        self.config, self.device = config, device
        self.documents, self.words = spec.documents, spec.observation_shape[0]
        self.width = width_for(config.topics)
        self.alpha = torch.ones(self.width)  # from K on it only has to be above 0
        self.alpha[: config.topics] = 1 / config.topics if config.alpha is None else config.alpha
        few = 0 if validation is None or not config.validate_every else min(len(validation), _VALIDATION)
        self._validation = None if validation is None or few == 0 else validation.select(range(few))
        self._perplexity: float | None = None
        self.prior = 1 / config.topics if config.prior is None else config.prior
        begin = self._start(seed, corpus) if start is None else self._less_prior(start)
        self.replica: Replica = replicate(
            "topics",
            TopicMatrix(begin).to(device),
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            schedule=config.eta,
        )

    # -- the beginning ------------------------------------------------------------------------------

    def _start(self, seed: int, corpus: Library | None) -> Tensor:
        """[V, W] lambda less its prior, the same on every replica."""
        random = np.random.default_rng(derive_seed(seed, "topics"))
        if self.config.init == "random" or corpus is None:
            return self._random(random)
        start = self._from_documents(random, corpus)
        if self.config.init == "svi":
            return self._after_a_pass(start, seed, corpus)
        return start

    def _less_prior(self, matrix: Tensor) -> Tensor:
        """[V, W] of lambda [V, K]. Raises ValueError for another shape."""
        check_shape(torch.Size((self.words, self.config.topics)), "words and topics", start=matrix)
        start = torch.zeros(self.words, self.width)
        start[:, : self.config.topics] = matrix - self.prior
        return start

    def _random(self, random: np.random.Generator) -> Tensor:
        """Gamma(100, 1/100) (Hoffman et al. 2010), which is near 1 everywhere."""
        start = torch.zeros(self.words, self.width)
        drawn = random.gamma(100.0, 0.01, (self.words, self.config.topics)).astype(np.float32)
        start[:, : self.config.topics] = torch.from_numpy(drawn)
        return start

    def _from_documents(self, random: np.random.Generator, corpus: Library) -> Tensor:
        """Each topic: some of its words of a few documents, the others of all; as many as a topic has.

        Few documents tell topics apart better than many, and a small share leaves the first steps free:
        against 20 documents that count for half, perplexity ends 4% lower on generated documents and 14% on
        the standard library's (``bench topics``'s corpora, means of three seeds after five passes).
        """
        k, few = self.config.topics, min(_SEED_DOCUMENTS, max(1, len(corpus) // self.config.topics))
        chosen = random.choice(len(corpus), size=k * few, replace=len(corpus) < k * few)
        seeds = corpus.select(chosen)
        topic = np.repeat(np.repeat(np.arange(k), few), np.diff(seeds.starts))
        start = np.zeros((self.words, self.width), np.float32)
        np.add.at(start, (seeds.words, topic), seeds.counts.astype(np.float32))
        start /= np.maximum(start.sum(0, keepdims=True), 1.0)
        sample = corpus.select(random.choice(len(corpus), size=min(len(corpus), 20_000), replace=False))
        everywhere = np.bincount(sample.words, sample.counts, minlength=self.words).astype(np.float32)
        everywhere /= max(float(everywhere.sum()), 1.0)
        tokens = sample.tokens / len(sample) * self.documents
        mixed = _SEED_SHARE * start[:, :k] + (1 - _SEED_SHARE) * everywhere[:, None]
        start[:, :k] = mixed * np.float32(tokens / k)
        return torch.from_numpy(start)

    def _after_a_pass(self, start: Tensor, seed: int, corpus: Library) -> Tensor:
        """One pass of stochastic variational inference, alone."""
        replica = Replica(
            "warm start",
            TopicMatrix(start),
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            schedule=TopicModel(batch=self.config.batch).eta,
        )
        order = np.random.default_rng(derive_seed(seed, "warm start")).permutation(len(corpus))
        for first in range(0, len(order), self.config.batch):
            self._follow(replica, corpus.select(order[first : first + self.config.batch]))
        return replica.values().detach().view(-1, self.width)[:-1].clone()

    # -- learning -----------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        return self.replica.clock

    @property
    def replicas(self) -> dict[str, Replica]:
        return {self.replica.name: self.replica}

    def learn(self, batch: Batch) -> Outcome:
        corpus: Corpus = batch.data
        if self.clock % _REFRESH_UPDATES == _REFRESH_UPDATES - 1:
            self._refresh()
        folded = self._follow(self.replica, corpus)
        metrics: dict[str, Tensor | float] = {
            "eta": self.config.eta(self.replica.steps_taken() - 1),
            "iterations_per_document": folded.iterations / max(len(corpus), 1),
        }
        if self._validation is not None and self.clock % self.config.validate_every == 0:
            self._perplexity = self.found().completion_perplexity(self._validation)
        if self._perplexity is not None:
            metrics["perplexity"] = self._perplexity
        return Outcome(metrics)

    def _follow(self, replica: Replica, corpus: Corpus) -> Folded:
        """One step along lambda - lambda-hat, with (n / G) times what these documents are expected to say."""
        row, word = self._compact(corpus.words)
        beta = replica.scale.steady(lambda scale: self._expected(replica, row, scale)).to("cpu")
        documents = Documents(
            torch.from_numpy(corpus.starts), word, torch.from_numpy(corpus.counts.astype(np.float32))
        )
        folded = fold_in(
            documents,
            beta,
            self.alpha,
            topics=self.config.topics,
            iterations=self.config.iterations,
            tolerance=self.config.tolerance,
        )
        more = torch.empty(len(row) + 1, self.width)
        torch.mul(folded.statistics, self.documents / max(len(corpus), 1), out=more[:-1])
        more[-1] = more[:-1].sum(0, dtype=torch.float64)
        index = torch.cat([row, torch.tensor([self.words])])
        replica.follow(Rows(index.to(self.device), more.to(self.device)))
        return folded

    def _expected(self, replica: Replica, row: Tensor, scale: float) -> Tensor:
        x, row = replica.params.detach().view(-1, self.width), row.to(replica.device)
        if not replica.keeps_scale:
            # where u went down while an answer was under way, v' + (u - u at the push) may be below 0: such
            # a word the topic has not, until the next steps have brought it back
            x = torch.cat([x[row], x[-1:]]).clamp_(min=0.0)
            row = torch.arange(len(row), device=x.device)
        total = self.words * self.prior + scale * x[-1].double()
        return expected_topics(x, row, total, topics=self.config.topics, prior=self.prior, scale=scale)

    def _compact(self, words: Any) -> tuple[Tensor, Tensor]:
        """(distinct words [R] int64, for each word [N] int32 which of them it is)."""
        seen = np.zeros(self.words, np.bool_)
        seen[words] = True
        row = np.flatnonzero(seen)
        place = np.empty(self.words, np.int32)
        place[row] = np.arange(len(row), dtype=np.int32)
        return torch.from_numpy(row), torch.from_numpy(place[words])

    def _refresh(self) -> None:
        """Add up all words anew: float32 sums of many updates drift, and unlocked ones lose some."""
        x = self.replica.params.detach().view(-1, self.width)
        with torch.no_grad():
            x[-1] = x[:-1].sum(0, dtype=torch.float64)

    def found(self) -> Topics:
        """The topics as they are now."""
        matrix = self.replica.values().detach().view(-1, self.width)[:-1, : self.config.topics]
        return Topics(self.prior + matrix.cpu().clamp(min=0.0), self.alpha[: self.config.topics].clone())

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass
