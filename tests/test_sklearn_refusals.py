"""What the estimator refuses, and that an earlier fit still works then."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from murmurate.strategies.dpsgd import DPSGD

pytest.importorskip("sklearn", reason="the estimator is for those who have scikit-learn")

from scipy.sparse import csr_matrix

from murmurate.sklearn import LatentDirichletAllocation
from topics_in_sklearn import WORDS, K, counts, fitted


def test_partial_fit_with_another_number_of_topics_is_refused():
    fitted = LatentDirichletAllocation(3, random_state=0).partial_fit(counts())
    with pytest.raises(ValueError, match=r"n_components is 4, .* the 3 topics of components_"):
        fitted.set_params(n_components=4).partial_fit(counts())


BAD = {
    "fractions": (np.full((3, 4), 0.5), r"count of 0\.5.*counts"),
    "negative": (-np.ones((3, 4)), "Negative values"),
    "not a number": (np.full((3, 4), np.nan), "NaN"),
    "no document": (np.ones((0, 4)), "0 sample"),
    "too large": (np.full((3, 4), 2.0**40), "Leave that word out"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("verb", ["fit", "partial_fit"])
def test_what_is_no_count_is_refused(what, verb):
    x, words = BAD[what]
    with pytest.raises(ValueError, match=words):
        getattr(LatentDirichletAllocation(2), verb)(x)
    with pytest.raises(ValueError, match=words):
        getattr(LatentDirichletAllocation(2), verb)(csr_matrix(x))


@pytest.mark.parametrize("verb", ["transform", "perplexity", "score", "partial_fit"])
def test_another_number_of_words_is_refused(verb):
    with pytest.raises(ValueError, match="features"):
        getattr(fitted(), verb)(np.ones((2, WORDS + 1)))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"n_components": 0}, ValueError, "n_components is 0"),
        ({"n_components": 2.5}, TypeError, "n_components is 2.5; give a whole number"),
        ({"doc_topic_prior": 0.0}, ValueError, "doc_topic_prior is 0.0; it must be above 0$"),
        ({"topic_word_prior": np.inf}, ValueError, r"^topic_word_prior is inf; it must be at most 1e\+30$"),
        ({"max_doc_update_iter": 10**5}, ValueError, "^max_doc_update_iter is 100000; it must be from 1 to"),
        ({"evaluate_every": "x"}, TypeError, "evaluate_every is 'x'; give a whole number"),
        ({"verbose": "x"}, TypeError, "verbose is 'x'; give a whole number"),
        ({"n_jobs": "x"}, TypeError, "n_jobs is 'x'; give a whole number"),
        ({"n_jobs": 0}, ValueError, "n_jobs is 0; give a number of threads, or -1"),
        ({"strategy": 3}, ValueError, "strategy is 3; it takes a name"),
        ({"learning_decay": 2}, ValueError, "learning_decay is 2"),
        ({"learning_method": "gibbs"}, ValueError, "it must be one of online, batch"),
        ({"init": "zeros"}, ValueError, "init"),
        ({"strategy": "gosip"}, ValueError, "There is no strategy called 'gosip'"),
        ({"replicas": 2}, ValueError, "solo trains one replica.* Use replicas=1, .*strategy='all-reduce'"),
        ({"replicas": 2, "strategy": "gala", "learning_method": "batch"}, ValueError, "online"),
        ({"step_rule": "average", "learning_rate": 1}, ValueError, "rate is 1"),
        (
            {
                "strategy": DPSGD(threads=1, batch=4, global_learning_rate=0.9),
                "replicas": 2,
                "step_rule": "average",
                "learning_rate": 0.5,
            },
            ValueError,
            r"0\.9 x 4 x 0\.999 = 3\.6 .*must be below 1",
        ),
    ],
)
def test_parameters_that_make_no_sense_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        LatentDirichletAllocation(**settings).fit(counts())


def test_a_script_without_a_main_guard_is_told_what_to_guard(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ValueError, match=r"fit of an estimator\) under: if __name__"):
        LatentDirichletAllocation(3, replicas=2, strategy="all-reduce").fit(counts())


def test_documents_without_a_word():
    mine = fitted()
    with pytest.raises(ValueError, match="without a word"):
        mine.perplexity(np.zeros((2, WORDS)))
    np.testing.assert_allclose(mine.transform(np.zeros((2, WORDS))), 1 / K)
    nothing = LatentDirichletAllocation(K, max_iter=2, evaluate_every=1).fit(np.zeros((4, WORDS)))
    assert np.isnan(nothing.bound_)


@pytest.mark.parametrize("verb", ["fit", "partial_fit"])
@pytest.mark.parametrize("replicas", [1, 2])  # "solo" refuses 2
def test_after_a_refusal_the_earlier_fit_still_works(verb, replicas):
    mine = fitted()
    before = mine.transform(counts())
    with pytest.raises(ValueError, match=r"solo|count of 0\.5|features"):
        getattr(mine.set_params(replicas=replicas), verb)(np.full((3, 4), 0.5 if replicas == 1 else 1.0))
    assert (mine.n_features_in_, mine.n_iter_, mine.n_batch_iter_) == (WORDS, 3, 25)
    np.testing.assert_array_equal(mine.transform(counts()), before)
