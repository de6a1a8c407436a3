"""Topic models as an estimator of scikit-learn (docs/estimator.md)."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch

from murmurate.datasets.corpus import FRACTIONS, Corpus
from murmurate.errors import MissingExtra, Refusal
from murmurate.launch.script_arguments import refuse_replicas_that_cannot_agree
from murmurate.ranges import (
    NonNegativeFloat,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    Range,
    RepeatCount,
    UnitInterval,
    number_kinds,
)
from murmurate.sklearn.in_memory import CorpusPasses
from murmurate.strategies import strategy_from
from murmurate.strategies.interface import Strategy
from murmurate.workloads.topic_model import TopicModel
from murmurate.workloads.topics import Topics

try:
    from joblib import effective_n_jobs
    from scipy.sparse import csr_matrix, issparse
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", "topics", "The estimator") from error

__all__ = ["LatentDirichletAllocation"]

T = TypeVar("T")

_DTYPES = [np.float64, np.float32, np.int64, np.int32]  # dtypes of counts that need no conversion
# the ranges of ``TopicModel``, whose messages name its own fields
_NUMBERS: dict[str, Any] = {
    "n_components": PositiveInt,
    "doc_topic_prior": PositiveFloat,
    "topic_word_prior": PositiveFloat,
    "learning_decay": UnitInterval,
    "learning_offset": Annotated[float, Range(1)],
    "learning_rate": OpenUnitInterval,
    "max_iter": PositiveInt,
    "batch_size": PositiveInt,
    "evaluate_every": int,
    "total_samples": Annotated[float, Range(1)],
    "perp_tol": NonNegativeFloat,
    "mean_change_tol": NonNegativeFloat,
    "max_doc_update_iter": RepeatCount,
    "n_jobs": int,
    "verbose": int,
    "replicas": PositiveInt,
}
_ALSO: dict[str, Any] = {  # types of values
    "doc_topic_prior": type(None),
    "topic_word_prior": type(None),
    "n_jobs": type(None),
    "verbose": (bool, np.bool_),
}


class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Latent Dirichlet allocation by stochastic variational inference, on one replica or several.

    A replacement for ``sklearn.decomposition.LatentDirichletAllocation(learning_method="online")``, whose
    parameters, attributes and methods have the same meaning here.

    Args:
        n_components: number of topics, K.
        doc_topic_prior, topic_word_prior: priors of a document's topics and a topic's words; None: 1 / K.
        learning_method: "online", or "batch": each pass is one step, to lambda-hat of all documents.
        learning_decay, learning_offset: the step size of update t, from 1, is (learning_offset + t) **
            -learning_decay.
        max_iter: passes of ``fit``. batch_size: documents of an update, at most.
        evaluate_every: passes between evaluations of the perplexity of the training documents; ``fit`` ends
            once it changes by less than ``perp_tol``; 0 or less: it is never evaluated.
        total_samples: size of the corpus from which the documents of ``partial_fit`` are samples.
        mean_change_tol, max_doc_update_iter: when a document's E-step ends.
        n_jobs: threads of ``transform``, ``score`` and ``perplexity``; training is parallel over replicas.
        verbose: 1 prints passes.
        random_state: makes the result of a single replica reproducible.
        strategy: how replicas agree: its name, or a strategy with other hyper-parameters.
        replicas: number of processes that train.
        init: initial topics: "documents", from a few documents each; "random"; "svi", from one pass.
        step_rule: of online learning: "robbins-monro" as above; "average" and "paper" use ``learning_rate``.

    Attributes:
        components_: lambda, [K, V]. exp_dirichlet_component_: exp(E[log beta]), [K, V].
        n_batch_iter_: updates, plus 1. n_iter_: passes of ``fit``.
        bound_: perplexity of the training documents; NaN if these have no word.
        topics_: the same topics as ``Topics``, which has other figures of quality.
        doc_topic_prior_, topic_word_prior_, random_state_, n_features_in_, feature_names_in_.

    Differs: documents are shuffled for each pass of ``fit``; mini-batches of a pass are about equally large;
    numbers are float32 during training, whatever the dtype of ``components_``.
    """

    def __init__(
        self,
        n_components: int = 10,
        *,
        doc_topic_prior: float | None = None,
        topic_word_prior: float | None = None,
        learning_method: str = "online",
        learning_decay: float = 0.7,
        learning_offset: float = 10.0,
        max_iter: int = 10,
        batch_size: int = 128,
        evaluate_every: int = -1,
        total_samples: float = 1e6,
        perp_tol: float = 1e-1,
        mean_change_tol: float = 1e-3,
        max_doc_update_iter: int = 100,
        n_jobs: int | None = None,
        verbose: int = 0,
        random_state: Any = None,
        strategy: str | Strategy = "solo",
        replicas: int = 1,
        init: Literal["documents", "random", "svi"] = "documents",
        step_rule: Literal["robbins-monro", "average", "paper"] = "robbins-monro",
        learning_rate: float = 0.1,
    ) -> None:
        self.n_components = n_components
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.learning_method = learning_method
        self.learning_decay = learning_decay
        self.learning_offset = learning_offset
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.evaluate_every = evaluate_every
        self.total_samples = total_samples
        self.perp_tol = perp_tol
        self.mean_change_tol = mean_change_tol
        self.max_doc_update_iter = max_doc_update_iter
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.random_state = random_state
        self.strategy = strategy
        self.replicas = replicas
        self.init = init
        self.step_rule = step_rule
        self.learning_rate = learning_rate

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        tags.input_tags.categorical = True  # counts are whole numbers
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # -- learning -----------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> LatentDirichletAllocation:
        """Learn topics from the documents X [D, V], counts of words; previous results are discarded."""
        with _kept_on_error(self):
            self._fit(X)
        return self

    def _fit(self, X: Any) -> None:
        self._check_parameters()
        corpus, dtype = self._counts(X, reset=True)
        self._begin()
        evaluates = self.evaluate_every > 0 and corpus.tokens > 0
        most_passes = self.evaluate_every if evaluates else self.max_iter
        previous: float | None = None
        matrix: torch.Tensor | None = None
        last = 0
        while matrix is None or last < self.max_iter:
            first, last = last, min(last + most_passes, self.max_iter)
            is_evaluated = evaluates and last % self.evaluate_every == 0
            ends = {n: f"iteration: {n} of max_iter: {self.max_iter}" for n in range(first + 1, last + 1)}
            last_end = ends.pop(last) if is_evaluated else ""  # printed with the perplexity
            shown = ends if self.verbose else {}
            matrix = self._learn(corpus, len(corpus), matrix, first, last - first, shown)
            self.n_iter_ = last
            if not is_evaluated:
                continue
            perplexity = self._topics(matrix).full_bound_perplexity(corpus, prior=self.topic_word_prior_)
            if self.verbose:
                print(f"{last_end}, perplexity: {perplexity:.4f}")
            if previous is not None and abs(previous - perplexity) < self.perp_tol:
                break
            previous = perplexity
        self.components_ = matrix.T.numpy().astype(dtype)
        self.bound_ = self._perplexity(corpus) if corpus.tokens else np.nan

    def partial_fit(self, X: Any, y: Any = None) -> LatentDirichletAllocation:
        """Train on one more pass through X, in its order, and online, whatever ``learning_method`` is; X is a
        sample of ``total_samples`` documents."""
        with _kept_on_error(self):
            self._partial_fit(X)
        return self

    def _partial_fit(self, X: Any) -> None:
        self._check_parameters()
        is_first = not hasattr(self, "components_")
        corpus, dtype = self._counts(X, reset=is_first)
        if is_first:
            self._begin()
        elif self.n_components != len(self.components_):
            raise ValueError(
                f"n_components is {self.n_components}, and partial_fit continues with the "
                f"{len(self.components_)} topics of components_. Set n_components back, or call fit."
            )
        start = None if is_first else self.topics_.matrix
        matrix = self._learn(
            corpus, round(self.total_samples), start, self.n_iter_, 1, shuffled=False, online=True
        )
        self.components_ = matrix.T.numpy().astype(dtype if is_first else self.components_.dtype)

    def _begin(self) -> None:
        self.random_state_ = check_random_state(self.random_state)
        self._seed = int(self.random_state_.randint(2**31 - 1))
        self.n_batch_iter_, self.n_iter_ = 1, 0
        default = 1.0 / self.n_components
        self.doc_topic_prior_ = default if self.doc_topic_prior is None else float(self.doc_topic_prior)
        self.topic_word_prior_ = default if self.topic_word_prior is None else float(self.topic_word_prior)

    def _learn(
        self,
        corpus: Corpus,
        documents: int,
        start: torch.Tensor | None,
        first: int,
        number: int,
        ends: Mapping[int, str] | None = None,
        shuffled: bool = True,
        online: bool = False,
    ) -> torch.Tensor:
        """lambda [V, K] after ``number`` passes from ``start``. first: number of the first pass. ends: see
        ``CorpusPasses``. online: whether to learn online, whatever ``learning_method`` is."""
        model = self._model(len(corpus), is_batch=self.learning_method == "batch" and not online)
        passes = CorpusPasses(model, documents, self._seed, first, number, shuffled, ends or {})
        with _as_value_errors():
            learned = passes.run(corpus, strategy_from(self.strategy), self.replicas, start)
        self.n_batch_iter_ += learned.updates
        return learned.matrix

    def _model(self, documents: int, is_batch: bool) -> TopicModel:
        return TopicModel(
            topics=self.n_components,
            batch=documents if is_batch else self.batch_size,
            alpha=self.doc_topic_prior_,
            prior=self.topic_word_prior_,
            iterations=self.max_doc_update_iter,
            tolerance=self.mean_change_tol,
            step_rule="robbins-monro" if is_batch else self.step_rule,  # in a batch its step size is 1
            rate=self.learning_rate,
            delay=self.learning_offset + self.n_batch_iter_,  # continues the schedule of step sizes
            forgetting=0.0 if is_batch else self.learning_decay,
            init=self.init,
            validate_every=0,
        )

    # -- results ------------------------------------------------------------------------------------

    @property
    def exp_dirichlet_component_(self) -> Any:
        check_is_fitted(self)
        matrix = torch.from_numpy(self.components_)
        return torch.exp(torch.digamma(matrix) - torch.digamma(matrix.sum(1, keepdim=True))).numpy()

    @property
    def topics_(self) -> Topics:
        check_is_fitted(self)
        matrix = torch.from_numpy(np.ascontiguousarray(self.components_.T, dtype=np.float32))
        return self._topics(matrix)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def transform(self, X: Any, *, normalize: bool = True) -> Any:
        """The topics [D, K] of the documents X [D, V]; if ``normalize``, rows sum to 1."""
        check_is_fitted(self)
        corpus, _ = self._counts(X, reset=False)
        gamma = np.concatenate(self._in_threads(corpus, self.topics_.gammas))
        if normalize:
            gamma /= gamma.sum(1, keepdims=True)
        return gamma.astype(self.components_.dtype)

    def fit_transform(self, X: Any, y: Any = None, *, normalize: bool = True) -> Any:
        """``fit``, then the topics of the same documents."""
        return self.fit(X, y).transform(X, normalize=normalize)

    def score(self, X: Any, y: Any = None) -> float:
        """The evidence lower bound of the documents X [D, V], taken as the whole corpus."""
        check_is_fitted(self)
        return self._bound(self._counts(X, reset=False)[0])

    def perplexity(self, X: Any, sub_sampling: bool = False) -> float:
        """exp(-bound / tokens) of the documents X [D, V]; with ``sub_sampling``, X is taken as a
        sample of ``total_samples`` documents. Raises ValueError for documents without a word."""
        check_is_fitted(self)
        return self._perplexity(self._counts(X, reset=False)[0], sub_sampling)

    def _perplexity(self, corpus: Corpus, sub_sampling: bool = False) -> float:
        scale = self.total_samples / len(corpus) if sub_sampling else 1.0
        if not corpus.tokens:
            raise ValueError("documents without a word have no perplexity")
        return float(np.exp(-self._bound(corpus, scale) / (scale * corpus.tokens)))

    def _bound(self, corpus: Corpus, scale: float = 1.0) -> float:
        topics = self.topics_
        documents_bound = sum(self._in_threads(corpus, topics.document_bound))
        return scale * documents_bound + topics.topic_bound(self.topic_word_prior_)

    def _in_threads(self, corpus: Corpus, function: Callable[[Corpus], T]) -> list[T]:
        """``function`` of each thread's part of the documents."""
        jobs = min(effective_n_jobs(self.n_jobs), max(len(corpus), 1))
        if jobs == 1:
            return [function(corpus)]
        with ThreadPoolExecutor(jobs) as pool:
            parts = map(corpus.select, np.array_split(np.arange(len(corpus)), jobs))
            return list(pool.map(function, parts))

    def _topics(self, matrix: torch.Tensor) -> Topics:
        alpha = torch.full((matrix.shape[1],), self.doc_topic_prior_)
        return Topics(matrix, alpha, self.max_doc_update_iter, self.mean_change_tol)

    # -- arguments ----------------------------------------------------------------------------------

    def _counts(self, X: Any, *, reset: bool) -> tuple[Corpus, Any]:
        """X as a corpus, and the dtype of results."""
        X = validate_data(self, X, reset=reset, accept_sparse="csr", dtype=_DTYPES)
        check_non_negative(X, type(self).__name__)
        rows = X if issparse(X) else csr_matrix(X)
        if rows.data.dtype.kind == "f" and (rows.data != np.floor(rows.data)).any():
            fraction = rows.data[rows.data != np.floor(rows.data)][0]
            raise ValueError(f"X has a count of {fraction:g}. {FRACTIONS}")
        with _as_value_errors():
            corpus = Corpus.from_scipy(rows)
        return corpus, np.float32 if X.dtype == np.float32 else np.float64

    def _check_parameters(self) -> None:
        """Raise ValueError or TypeError, naming the parameter, for invalid values."""
        for name, hint in _NUMBERS.items():
            value, (kind,) = getattr(self, name), number_kinds(hint)
            if isinstance(value, _ALSO.get(name, ())):
                continue
            number, needed = numbers.Real, "a number"
            if kind.type is int:
                number, needed = numbers.Integral, "a whole number"
            if not isinstance(value, number) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; give {needed}")
            if not kind.holds(value):
                raise ValueError(f"{name} is {value}; it must be {kind.demand(value)}")
        if self.n_jobs == 0:  # else ``fit`` would fail after it has learned
            raise ValueError("n_jobs is 0; give a number of threads, or -1 for one per core")
        choices = {
            "learning_method": ("online", "batch"),
            "init": ("documents", "random", "svi"),
            "step_rule": ("robbins-monro", "average", "paper"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if self.learning_method == "batch" and self.replicas > 1:
            raise ValueError(
                "batch learning needs all documents in one replica. Use learning_method='online'."
            )
        with _as_value_errors():
            refuse_replicas_that_cannot_agree(strategy_from(self.strategy), self.replicas)


@contextlib.contextmanager
def _kept_on_error(estimator: LatentDirichletAllocation) -> Iterator[None]:
    """Give the estimator its present attributes back if it is not fitted after all: ``transform`` still works
    after a fit that was refused."""
    before = dict(estimator.__dict__)
    try:
        yield
    except BaseException:
        estimator.__dict__ = before
        raise


@contextlib.contextmanager
def _as_value_errors() -> Iterator[None]:
    """Turn a Refusal into a ValueError, which scikit-learn's users expect."""
    try:
        yield
    except Refusal as refusal:
        raise ValueError(str(refusal)) from refusal
