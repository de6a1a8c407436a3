"""Counts of words, and the estimator and scikit-learn's model fitted to them."""

from __future__ import annotations

import functools

import numpy as np
import sklearn.decomposition

from murmurate.datasets.generated import generate
from murmurate.sklearn import LatentDirichletAllocation

K, WORDS, DOCUMENTS = 5, 120, 400
PRIORS = {"n_components": K, "doc_topic_prior": 0.2, "topic_word_prior": 0.1, "random_state": 3}


@functools.lru_cache
def counts():
    drawn = generate(
        documents=DOCUMENTS,
        vocabulary=WORDS,
        topics=K,
        mean_length=60,
        seed=4,
        topic_mass=8.0,
        alpha_mass=1.0,
    )
    return drawn.corpus.as_scipy().astype(np.float64)


def fitted(**more):
    return LatentDirichletAllocation(**PRIORS, **{"max_iter": 3, "batch_size": 50} | more).fit(counts())


def theirs(mine, **more):
    """scikit-learn's model with the same lambda and settings."""
    model = sklearn.decomposition.LatentDirichletAllocation(
        **PRIORS, max_iter=1, learning_method="online", **more
    ).fit(counts()[:20])
    model.components_ = mine.components_.copy()
    model.exp_dirichlet_component_ = mine.exp_dirichlet_component_
    model.n_batch_iter_ = mine.n_batch_iter_
    return model
