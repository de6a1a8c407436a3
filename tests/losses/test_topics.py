"""The E-step against one in float64 that follows Hoffman et al.'s figure 6 word by word."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from compiled import NO_KERNELS
from murmurate import native
from murmurate.losses import topics
from murmurate.losses.topics import Documents, document_bound, expected_topics, fold_in, width_for
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
        pytest.skip(NO_KERNELS)
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


def logs(x, total):
    """E[log beta] float64, where lambda is x."""
    return torch.digamma(x.double()) - torch.digamma(total)


def over_their_greatest(rows):
    return rows / rows.amax(1, keepdim=True)


@pytest.mark.parametrize("least", [0.05, 0.01, 0.001, 1e-6])
def test_topics_of_a_word_differ_as_they_do(backend, least):
    """However small lambda is: what digamma is near 0 they have in common."""
    generator = torch.Generator().manual_seed(0)
    greatest = torch.logspace(math.log10(least), 6, 3_000, dtype=torch.float64)
    apart = torch.rand(2, 3_000, generator=generator, dtype=torch.float64)  # of 1 / lambda, and in proportion
    x = torch.zeros(3_000, 16)
    x[:, :3] = torch.stack([greatest, 1 / (1 / greatest + 90 * apart[0]), greatest * apart[1]], 1)
    x[:, :3] = x[:, :3].clamp(min=least)
    total = torch.full((16,), 9.0, dtype=torch.float64)
    beta = expected_topics(x, torch.arange(3_000), total, topics=3, prior=0.0)[:, :3]
    assert float(beta.amax(1).min()) >= 0.5
    log, true = torch.log(over_their_greatest(beta.double())), logs(x[:, :3], total[:3])
    true -= true.amax(1, keepdim=True)
    for depth, tolerance in [(-10, 4e-6), (-80, 3e-5)]:
        seen = true > depth
        torch.testing.assert_close(log[seen], true[seen], rtol=0, atol=tolerance)


@pytest.mark.parametrize("greatest", [1e9, 5e9, 1e13, 1e20])
def test_great_numbers_of_words_are_shared_out_as_small_ones(backend, greatest):
    documents, x, alpha = problem(k=5)
    x *= greatest
    total = torch.full((16,), 9.0, dtype=torch.float64)
    beta = expected_topics(x, torch.arange(len(x)), total, topics=5, prior=0.1)
    true = torch.exp(logs(0.1 + x[:, :5], total[:5]))
    true /= true.amax(1, keepdim=True)
    torch.testing.assert_close(over_their_greatest(beta.double())[:, :5], true, rtol=1e-5, atol=1e-30)
    many = replace(documents, counts=documents.counts * greatest)
    beta = over_their_greatest(beta)
    result = fold_in(many, beta, alpha, topics=5, iterations=10, tolerance=0.0)
    gamma, statistics = folded(many, torch.log(true), alpha[:5], iterations=10, tolerance=0.0)
    torch.testing.assert_close(result.gamma[:, :5].double(), gamma, rtol=1e-3, atol=1e-5 * greatest)
    torch.testing.assert_close(result.statistics[:, :5].double(), statistics, rtol=1e-3, atol=1e-5 * greatest)


@pytest.mark.parametrize("k", [2, 5, 16, 17, 50, 64, 100, 128, 200])
def test_the_fixed_point_is_the_oracles(backend, k):
    documents, beta, alpha = problem(k)
    result = fold_in(documents, beta, alpha, topics=k, iterations=60, tolerance=0.0)
    gamma, statistics = folded(documents, torch.log(beta[:, :k]), alpha[:k], iterations=60, tolerance=0.0)
    torch.testing.assert_close(result.gamma[:, :k].double(), gamma, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(result.statistics[:, :k].double(), statistics, rtol=2e-4, atol=1e-5)
    assert (result.statistics[:, k:] == 0).all()
    # every word is shared out among the topics, none is lost
    torch.testing.assert_close(result.statistics.sum(), documents.counts.sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tolerance", [0.3, 0.01, 1e-3])
def test_each_document_ends_where_its_gammas_rest(backend, tolerance):
    documents, beta, alpha = problem(seed=1)
    result = fold_in(documents, beta, alpha, topics=5, iterations=100, tolerance=tolerance)
    gamma, _ = folded(documents, torch.log(beta[:, :5]), alpha[:5], iterations=100, tolerance=tolerance)
    torch.testing.assert_close(result.gamma[:, :5].double(), gamma, rtol=1e-3, atol=1e-4)
    assert len(documents) - 1 <= result.iterations < 100 * len(documents)


def test_a_document_without_words_has_the_prior(backend):
    documents, beta, alpha = problem()
    result = fold_in(documents, beta, alpha, topics=5)
    torch.testing.assert_close(result.gamma[3], alpha)
    nothing = Documents(torch.zeros(3, dtype=torch.int64), torch.empty(0, dtype=torch.int32), torch.empty(0))
    assert torch.equal(fold_in(nothing, beta, alpha, topics=5).gamma, alpha.expand(2, -1))


def test_starts_of_another_dtype_are_refused(backend):
    documents, beta, alpha = problem()
    wrong = replace(documents, starts=documents.starts.int())
    with pytest.raises(ValueError, match="starts"):
        fold_in(wrong, beta, alpha, topics=5)


def test_it_goes_on_from_where_it_was_told_to(backend):
    documents, beta, alpha = problem()
    half = fold_in(documents, beta, alpha, topics=5, iterations=7, tolerance=0.0)
    whole = fold_in(documents, beta, alpha, topics=5, iterations=14, tolerance=0.0)
    more = fold_in(documents, beta, alpha, topics=5, iterations=7, tolerance=0.0, gamma=half.gamma)
    torch.testing.assert_close(more.gamma, whole.gamma, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prior", [0.3, 0.01, 0.001])
@pytest.mark.parametrize("k", [3, 16, 50])
def test_expected_topics(backend, k, prior):
    generator = torch.Generator().manual_seed(2)
    x = torch.zeros(30, width_for(k))
    x[:, :k] = torch.rand(30, k, generator=generator) * 100
    x[:4, 1:] = 0.0
    x[7] = 0.0
    total = prior * 30 + 0.25 * x.double().sum(0)
    row = torch.tensor([4, 29, 0, 7])
    beta = expected_topics(x, row, total, topics=k, prior=prior, scale=0.25)
    true = logs(prior + 0.25 * x[row, :k].double(), total[:k])
    true = torch.exp(true - true.amax(1, keepdim=True))
    torch.testing.assert_close(over_their_greatest(beta[:, :k]).double(), true, rtol=5e-6, atol=1e-12)
    assert (beta[:, k:] == 0).all()


def test_a_topic_without_words_is_a_topic(backend):
    """Of few words its sum is near 0, too: the others keep theirs."""
    x = torch.zeros(3, 16)
    x[:2, 0], x[1, 1] = 9.0, 5.0
    total = 0.001 * 3 + x.double().sum(0)
    beta = expected_topics(x, torch.arange(3), total, topics=3, prior=0.001)[:, :3]
    torch.testing.assert_close(over_their_greatest(beta)[0], torch.tensor([1.0, 0.0, 0.0]))
    true = torch.exp(logs(0.001 + x[1, :3], total[:3]))
    torch.testing.assert_close(
        over_their_greatest(beta)[1].double(), true / true.max(), rtol=5e-6, atol=1e-30
    )
    assert float(over_their_greatest(beta)[2, 2]) == 1.0


@pytest.mark.parametrize("alpha", [0.2, 0.001])
@pytest.mark.parametrize("prior", [0.3, 0.01, 0.001])
def test_a_word_at_the_prior_is_shared_out_as_any_other(backend, prior, alpha):
    """As every word is before it was met."""
    k = 12
    documents, x, _ = problem(k, seed=5)
    x[:20], x[20:] = 0.0, x[20:] * 50
    total = prior * len(x) + x.double().sum(0)
    beta = expected_topics(x, torch.arange(len(x)), total, topics=k, prior=prior)
    alphas = torch.full((width_for(k),), alpha)
    log_beta = logs(prior + x[:, :k], total[:k])
    result = fold_in(documents, beta, alphas, topics=k, iterations=20, tolerance=0.0)
    gamma, statistics = folded(documents, log_beta, alphas[:k], iterations=20, tolerance=0.0)
    torch.testing.assert_close(result.gamma[:, :k].double(), gamma, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(result.statistics[:, :k].double(), statistics, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(result.statistics.sum(), documents.counts.sum(), rtol=1e-5, atol=0)
    mine = document_bound(documents, log_beta, alphas, result.gamma, topics=k)
    torch.testing.assert_close(mine, bound(documents, log_beta, alphas[:k], result.gamma[:, :k]))


def test_what_the_kernels_cannot_take_is_refused_or_left_to_the_twin(backend):
    documents, beta, alpha = problem()
    with pytest.raises(ValueError, match="word must be torch"):
        fold_in(replace(documents, word=documents.word.long()), beta, alpha, topics=5)
    with pytest.raises(ValueError, match="gamma must be shaped"):
        fold_in(documents, beta, alpha, topics=5, gamma=torch.ones(3, 16))
    x, total = beta[:, :10].clone(), torch.full((10,), 9.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="there is no word 40"):
        expected_topics(x, torch.tensor([40]), total, topics=5, prior=0.1)
    with pytest.raises(ValueError, match="topics is 17, but a row of x has 16 numbers"):
        expected_topics(beta, torch.tensor([39]), torch.ones(16).double(), topics=17, prior=0.1)
    row = torch.tensor([3, 1])
    narrow = expected_topics(x, row, total, topics=5, prior=0.1)  # ten are no whole register
    wide = expected_topics(
        torch.cat([x, torch.zeros(40, 6)], 1), row, torch.cat([total, total[:6]]), topics=5, prior=0.1
    )
    torch.testing.assert_close(
        over_their_greatest(narrow), over_their_greatest(wide)[:, :10], rtol=1e-5, atol=0
    )
    result = fold_in(documents, beta[:, :10], alpha[:10], topics=5)
    torch.testing.assert_close(
        result.gamma[:, :5], fold_in(documents, beta, alpha, topics=5).gamma[:, :5], rtol=1e-4, atol=1e-4
    )


def test_the_bound_is_the_oracles(backend):
    documents, beta, alpha = problem()
    gamma = fold_in(documents, beta, alpha, topics=5, iterations=50).gamma
    log_beta = torch.log(beta[:, :5].double())
    mine = document_bound(documents, log_beta, alpha, gamma, topics=5)
    torch.testing.assert_close(
        mine, bound(documents, log_beta, alpha[:5], gamma[:, :5]), rtol=1e-8, atol=1e-8
    )


def test_the_bound_rises_with_every_iteration(backend):
    documents, beta, alpha = problem(seed=3)
    gamma, before = None, torch.full((len(documents),), -math.inf, dtype=torch.float64)
    for _ in range(8):
        gamma = fold_in(documents, beta, alpha, topics=5, iterations=1, tolerance=0.0, gamma=gamma).gamma
        now = document_bound(documents, torch.log(beta[:, :5].double()), alpha, gamma, topics=5)
        assert (now >= before - 1e-5).all()
        before = now


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d, b, a: (replace(d, word=d.word + 1), b, a), "has no row"),
        (lambda d, b, a: (replace(d, word=d.word - 40), b, a), "has no row"),
        (lambda d, b, a: (replace(d, counts=d.counts[1:]), b, a), "counts must be shaped"),
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
