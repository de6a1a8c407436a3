"""Inference of topic models is SGD on lambda - lambda-hat."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from laws.topic_learners import DOCUMENTS, MODEL, WORDS, K, batches, corpus, learner
from murmurate.datasets.corpus import Corpus
from murmurate.losses.topics import Documents, expected_topics, fold_in
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec
from murmurate.workloads.topic_model import TopicModel


def matrix(it):
    """lambda [V, K], float64."""
    return it.model.prior + it.replica.values().detach().double().view(WORDS + 1, -1)[:-1, :K]


def lambda_hat(it, documents):
    """zeta + n / G sum E[t] (Mohamad et al., equation 52) at the learner's present lambda."""
    now = torch.zeros(WORDS, it.model.width)
    now[:, :K] = matrix(it).float()
    beta = expected_topics(now, torch.arange(WORDS), now.double().sum(0), topics=K, prior=0.0)
    times = torch.from_numpy(documents.counts.astype(np.float32))
    batch = Documents(torch.from_numpy(documents.starts), torch.from_numpy(documents.words), times)
    folded = fold_in(batch, beta, it.model.alpha, topics=K, iterations=MODEL.iterations)
    return it.model.prior + DOCUMENTS / len(documents) * folded.statistics[:, :K].double()


def test_inference_is_equation_50():
    """lambda <- (1 - rho_t) lambda + rho_t lambda-hat."""
    it = learner()
    for t, batch in enumerate(batches()):
        before, towards = matrix(it), lambda_hat(it, batch.data)
        it.learn(batch)
        step = MODEL.eta(t)
        torch.testing.assert_close(matrix(it), (1 - step) * before + step * towards, rtol=1e-5, atol=1e-5)


def test_the_last_row_is_the_sum_of_the_others():
    it = learner()
    for batch in batches(count=40):
        it.learn(batch)
    x = it.replica.values().detach().double().view(WORDS + 1, -1)
    torch.testing.assert_close(x[-1], x[:-1].sum(0), rtol=1e-5, atol=1e-3)
    assert (x[:, K:] == 0).all()
    assert float(matrix(it).min()) > 0  # every step leaves the prior where it was
    tokens = corpus().tokens
    assert 0.5 * tokens < float(x[-1].sum()) < 1.5 * tokens


@pytest.mark.parametrize("what", ["few documents", "empty documents", "equal documents"])
def test_no_two_topics_begin_alike(what):
    """Else they would stay alike, as the E-step treats them alike."""
    documents, topics = corpus().select(range(30)), 12
    if what == "few documents":
        documents = documents.select(range(5))
    elif what == "empty documents":
        documents = Corpus(documents.starts.clip(0, documents.starts[5]), *_first(documents, 5))
    else:
        documents = documents.select(np.arange(30) % 2)
    spec = EnvSpec("corpus", (WORDS,), torch.int32, 0, examples=len(documents))
    context = Context(spec, Replica, seed=0, examples=documents)
    shares = TopicModel(topics=topics).build(context).estimate().word_shares()
    assert len(torch.unique(shares.float(), dim=1).T) == topics
    torch.testing.assert_close(shares.sum(0), torch.ones(topics).double())


def _first(documents, number):
    """Words, counts, vocabulary and its size of a corpus that ends after some documents."""
    end = documents.starts[number]
    return documents.words[:end], documents.counts[:end], documents.vocabulary, documents.vocabulary_size


def test_the_same_seed_begins_alike_and_topics_are_found():
    one, other = learner(), learner()
    assert torch.equal(one.replica.params, other.replica.params)
    for _ in range(8):
        for batch in batches(count=15):
            one.learn(batch)
    before = other.estimate().completion_perplexity(corpus())
    after = one.estimate().completion_perplexity(corpus())
    everywhere = np.bincount(corpus().words, corpus().counts, minlength=WORDS) / corpus().tokens
    entropy = -np.sum(everywhere[everywhere > 0] * np.log(everywhere[everywhere > 0]))
    assert after < 0.9 * before
    assert after < 0.7 * np.exp(entropy)  # far below what counting words alone knows


@pytest.mark.parametrize("k", [69, 100, 300])
def test_a_word_that_is_new_is_learned(k):
    """All its tokens, where the default prior of 1 / K has no exponential in float32."""
    model = TopicModel(topics=k, batch=30, validate_every=0)
    it = learner(model=model)
    x = it.replica.params.detach().view(WORDS + 1, -1)
    x[:60] = 0.0
    it.model.refresh(x)
    documents = next(batches()).data
    it.step(documents)
    times = np.bincount(documents.words, documents.counts, minlength=WORDS)[:60]
    expected = torch.from_numpy(model.eta(0) * DOCUMENTS / len(documents) * times).float()
    torch.testing.assert_close(it.values()[:60].sum(1), expected, rtol=1e-4, atol=0)
    assert float(expected.max()) > 0


def test_no_mini_batch_of_the_warm_start_is_what_is_left_over():
    """One document would stand for all, at the last step."""
    sizes = []

    class Library:
        def __len__(self):
            return DOCUMENTS

        def select(self, index):
            sizes.append(len(index))
            return corpus().select(index)

    spec = EnvSpec("corpus", (WORDS,), torch.int32, 0, examples=DOCUMENTS)
    model = dataclasses.replace(MODEL, init="svi", batch=DOCUMENTS - 1)
    model.build(Context(spec, Replica, 0, examples=Library()))
    assert sizes[-2:] == [DOCUMENTS // 2] * 2
