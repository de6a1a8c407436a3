"""The E-step against one in float64 that follows Hoffman et al.'s figure 6 word by word."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from murmurate import native
from murmurate.losses import topics
from murmurate.losses.topics import (
    Documents,
    document_bound,
    exp_digamma,
    expected_topics,
    fold_in,
    width_for,
)
from oracles.topics import bound, folded

SETS = ["portable", "avx2", "avx512"]


@pytest.fixture(params=["torch", *SETS])
def backend(request, monkeypatch):
    """Each instruction set that runs here, and the twin."""
    if request.param == "torch":
        monkeypatch.setattr(topics, "kernels", None)
        yield "torch"
        return
    if native.kernels is None:
        pytest.skip(native.simd)
    before = native.kernels.simd()
    try:
        native.kernels.use(request.param)
    except ValueError as reason:
        pytest.skip(str(reason))
    yield request.param
    native.kernels.use(before)


def problem(k=5, words=40, documents=12, seed=0):
    """Random topics and documents, one of them empty: (documents, beta [R, W], alpha [W])."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (documents,), generator=generator)
    lengths[3] = 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    word = torch.cat([torch.randperm(words, generator=generator)[:n].sort()[0] for n in lengths.tolist()])
    times = torch.randint(1, 6, (len(word),), generator=generator).float()
    beta = torch.zeros(words, width_for(k))
    beta[:, :k] = torch.rand(words, k, generator=generator) ** 4
    alpha = torch.ones(width_for(k))
    alpha[:k] = torch.rand(k, generator=generator) + 0.05
    return Documents(starts, word.int(), times), beta, alpha


def test_exp_digamma(backend):
    x = torch.logspace(math.log10(0.05), 6, 5_000, dtype=torch.float64).float()
    true = torch.exp(torch.digamma(x.double()))
    torch.testing.assert_close(exp_digamma(x).double(), true, rtol=4e-6, atol=0)
    small = torch.logspace(math.log10(0.0125), math.log10(0.05), 999, dtype=torch.float64).float()
    true = torch.exp(torch.digamma(small.double()))
    torch.testing.assert_close(exp_digamma(small).double(), true, rtol=4e-5, atol=0)
    assert exp_digamma(torch.tensor([1e-4])).tolist() == [0.0]  # exp(-10000)


@pytest.mark.parametrize("k", [2, 5, 16, 17, 50, 64, 100, 128, 200])
def test_the_fixed_point_is_the_oracles(backend, k):
    documents, beta, alpha = problem(k)
    found = fold_in(documents, beta, alpha, topics=k, iterations=60, tolerance=0.0)
    gamma, statistics = folded(documents, beta[:, :k], alpha[:k], iterations=60, tolerance=0.0)
    torch.testing.assert_close(found.gamma[:, :k].double(), gamma, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(found.statistics[:, :k].double(), statistics, rtol=2e-4, atol=1e-5)
    assert (found.statistics[:, k:] == 0).all()
    # every word is shared out among the topics, none is lost
    torch.testing.assert_close(found.statistics.sum(), documents.times.sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tolerance", [0.3, 0.01, 1e-3])
def test_each_document_ends_where_its_gammas_rest(backend, tolerance):
    documents, beta, alpha = problem(seed=1)
    found = fold_in(documents, beta, alpha, topics=5, iterations=100, tolerance=tolerance)
    gamma, _ = folded(documents, beta[:, :5], alpha[:5], iterations=100, tolerance=tolerance)
    torch.testing.assert_close(found.gamma[:, :5].double(), gamma, rtol=1e-3, atol=1e-4)
    assert len(documents) - 1 <= found.iterations < 100 * len(documents)


def test_a_document_without_words_has_the_prior(backend):
    documents, beta, alpha = problem()
    found = fold_in(documents, beta, alpha, topics=5)
    torch.testing.assert_close(found.gamma[3], alpha)
    nothing = Documents(torch.zeros(3, dtype=torch.int64), torch.empty(0, dtype=torch.int32), torch.empty(0))
    assert torch.equal(fold_in(nothing, beta, alpha, topics=5).gamma, alpha.expand(2, -1))


def test_it_goes_on_from_where_it_was_told_to(backend):
    documents, beta, alpha = problem()
    half = fold_in(documents, beta, alpha, topics=5, iterations=7, tolerance=0.0)
    whole = fold_in(documents, beta, alpha, topics=5, iterations=14, tolerance=0.0)
    more = fold_in(documents, beta, alpha, topics=5, iterations=7, tolerance=0.0, gamma=half.gamma)
    torch.testing.assert_close(more.gamma, whole.gamma, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [3, 16, 50])
def test_expected_topics(backend, k):
    generator = torch.Generator().manual_seed(2)
    x = torch.zeros(30, width_for(k))
    x[:, :k] = torch.rand(30, k, generator=generator) * 100
    total = 0.3 * 30 + 0.25 * x.double().sum(0)
    row = torch.tensor([4, 29, 0, 7])
    beta = expected_topics(x, row, total, topics=k, prior=0.3, scale=0.25)
    true = torch.exp(torch.digamma(0.3 + 0.25 * x[row, :k].double()) - torch.digamma(total[:k]))
    torch.testing.assert_close(beta[:, :k].double(), true, rtol=5e-6, atol=1e-12)
    assert (beta[:, k:] == 0).all()


def test_what_the_kernels_cannot_take_is_refused_or_left_to_the_twin(backend):
    documents, beta, alpha = problem()
    with pytest.raises(ValueError, match="word must be torch"):
        fold_in(replace(documents, word=documents.word.long()), beta, alpha, topics=5)
    with pytest.raises(ValueError, match="gamma must be shaped"):
        fold_in(documents, beta, alpha, topics=5, gamma=torch.ones(3, 16))
    x, total = beta[:, :10].clone(), torch.full((10,), 9.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="there is no word 40"):
        expected_topics(x, torch.tensor([40]), total, topics=5, prior=0.1)
    row = torch.tensor([3, 1])
    narrow = expected_topics(x, row, total, topics=5, prior=0.1)  # ten are no whole register
    wide = expected_topics(
        torch.cat([x, torch.zeros(40, 6)], 1), row, torch.cat([total, total[:6]]), topics=5, prior=0.1
    )
    torch.testing.assert_close(narrow[:, :5], wide[:, :5], rtol=1e-5, atol=0)
    found = fold_in(documents, beta[:, :10], alpha[:10], topics=5)
    torch.testing.assert_close(
        found.gamma[:, :5], fold_in(documents, beta, alpha, topics=5).gamma[:, :5], rtol=1e-4, atol=1e-4
    )


def test_the_bound_is_the_oracles(backend):
    documents, beta, alpha = problem()
    gamma = fold_in(documents, beta, alpha, topics=5, iterations=50).gamma
    mine = document_bound(documents, beta, alpha, gamma, topics=5)
    torch.testing.assert_close(
        mine, bound(documents, beta[:, :5], alpha[:5], gamma[:, :5]), rtol=1e-8, atol=1e-8
    )


def test_the_bound_rises_with_every_iteration(backend):
    documents, beta, alpha = problem(seed=3)
    gamma, before = None, torch.full((len(documents),), -math.inf, dtype=torch.float64)
    for _ in range(8):
        gamma = fold_in(documents, beta, alpha, topics=5, iterations=1, tolerance=0.0, gamma=gamma).gamma
        now = document_bound(documents, beta, alpha, gamma, topics=5)
        assert (now >= before - 1e-5).all()
        before = now


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d, b, a: (replace(d, word=d.word + 1), b, a), "has no row"),
        (lambda d, b, a: (replace(d, word=d.word - 40), b, a), "has no row"),
        (lambda d, b, a: (replace(d, times=d.times[1:]), b, a), "times must be shaped"),
        (lambda d, b, a: (d, b, a[1:]), "alpha must be shaped"),
        (lambda d, b, a: (d, b[0], a), "beta must have 2 dimensions"),
        (lambda d, b, a: (replace(d, starts=d.starts + 1), b, a), "starts"),
        (lambda d, b, a: (replace(d, starts=d.starts.flip(0)), b, a), "starts"),
    ],
)
def test_what_makes_no_sense_is_refused(backend, change, words):
    documents, beta, alpha = problem()
    documents, beta, alpha = change(documents, torch.cat([beta, beta])[: len(beta)], alpha)
    if words == "has no row":
        beta = beta[: int(documents.word.max())]
    with pytest.raises(ValueError, match=words):
        fold_in(documents, beta, alpha, topics=5)
