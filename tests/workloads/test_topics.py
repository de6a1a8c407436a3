"""The estimate of a topic model: words, documents' topics, perplexities, coherence."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch

from drawn import check
from murmurate.datasets import corpus as corpora
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.generated import generate
from murmurate.errors import Refusal
from murmurate.workloads import topics as module
from murmurate.workloads.topics import Topics, split_tokens
from oracles.topics import folded

K, WORDS = 4, 60


def drawn(documents=200):
    result = generate(
        documents=documents,
        vocabulary=WORDS,
        topics=K,
        mean_length=50,
        seed=2,
        topic_mass=6.0,
        alpha_mass=1.0,
    )
    return result.corpus, torch.from_numpy(np.ascontiguousarray(result.phi.T)).float()


def true_topics():
    corpus, share = drawn()
    return corpus, Topics(share * 1e5 + 0.01, torch.full((K,), 0.25))


def test_a_word_of_a_topic_has_its_share():
    topics = Topics(torch.tensor([[8.0, 1.5], [1.5, 0.5], [0.5, 8.0], [0.0, 0.0]]), torch.ones(2))
    assert topics.top_words(2) == [[(0, 0.8), (1, 0.15)], [(2, 0.8), (0, 0.15)]]
    assert topics.weights().tolist() == [0.5, 0.5]
    assert len(topics.top_words(99)[0]) == 4


@pytest.mark.filterwarnings("error")
def test_a_corpus_that_cannot_be_written_makes_no_noise():
    corpus, topics = true_topics()
    for array in (corpus.starts, corpus.words, corpus.counts):
        array.flags.writeable = False
    torch.set_warn_always(True)
    try:
        topics.transform(corpus)
        topics.completion_perplexity(corpus)
        topics.bound_perplexity(corpus)
        topics.coherence(corpus)
    finally:
        torch.set_warn_always(False)


def test_documents_of_one_topic_are_put_there():
    topics = Topics(torch.tensor([[99.0, 1.0], [1.0, 99.0]]), torch.full((2,), 0.1))
    corpus = Corpus(
        np.array([0, 1, 2, 4, 4]),
        np.array([0, 1, 0, 1], np.int32),
        np.array([30, 30, 15, 15], np.int32),
        None,
        2,
    )
    weights = topics.transform(corpus)
    assert weights.shape == (4, 2)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert weights[0, 0] > 0.95
    assert weights[1, 1] > 0.95
    np.testing.assert_allclose(weights[2:], 0.5, atol=0.01)


def test_perplexity_of_what_was_drawn_lies_between_the_truth_and_counting():
    corpus, topics = true_topics()
    result = topics.completion_perplexity(corpus)
    frequency = np.bincount(corpus.words, corpus.counts, minlength=WORDS) / corpus.tokens
    counting = math.exp(-np.sum(frequency[frequency > 0] * np.log(frequency[frequency > 0])))
    assert 1 < result < 0.7 * counting
    everything_alike = Topics(torch.ones(WORDS, K), torch.full((K,), 0.25))
    assert everything_alike.completion_perplexity(corpus) == pytest.approx(WORDS, rel=1e-5)


def test_completion_is_the_oracles():
    """Word by word: fold in what is shown, score what is not."""
    corpus, topics = true_topics()
    shown, kept = split_tokens(corpus, 0.5, seed=3)
    log, tokens = 0.0, 0
    theta = topics.transform(shown).astype(np.float64)
    share = topics.word_shares().numpy()
    for d in range(len(kept)):
        for i in range(kept.starts[d], kept.starts[d + 1]):
            log += kept.counts[i] * math.log(theta[d] @ share[kept.words[i]])
            tokens += int(kept.counts[i])
    assert topics.completion_perplexity(corpus, seed=3) == pytest.approx(math.exp(-log / tokens), rel=1e-9)
    assert topics.completion_perplexity(corpus, seed=4) != topics.completion_perplexity(corpus, seed=3)


def test_dividing_loses_no_token():
    corpus, _ = drawn()
    shown, kept = split_tokens(corpus, 0.3, seed=0)
    total = np.zeros((len(corpus), WORDS), int)
    for part in (shown, kept):
        check(part)
        document = np.repeat(np.arange(len(part)), np.diff(part.starts))
        np.add.at(total, (document, part.words), part.counts)
    document = np.repeat(np.arange(len(corpus)), np.diff(corpus.starts))
    whole = np.zeros_like(total)
    np.add.at(whole, (document, corpus.words), corpus.counts)
    assert (total == whole).all()
    assert shown.tokens / corpus.tokens == pytest.approx(0.3, abs=0.02)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_tokens(corpus, 1.0, seed=0)


def test_a_corpus_in_parts_is_divided_as_the_whole():
    corpus, _ = drawn()
    random = np.random.default_rng(3)
    parts = [split_tokens(corpus.select(range(a, a + 50)), 0.5, random) for a in range(0, 200, 50)]
    for whole, some in zip(split_tokens(corpus, 0.5, 3), zip(*parts, strict=True), strict=True):
        assert np.array_equal(whole.counts, np.concatenate([part.counts for part in some]))
        assert np.array_equal(whole.words, np.concatenate([part.words for part in some]))


@pytest.mark.parametrize("ask", ["transform", "completion_perplexity", "bound_perplexity"])
def test_memory_does_not_grow_with_the_entries(ask, monkeypatch):
    """NYTimes has 79.5 million of them: at 50 bytes for each that is the 4 GB that a process may have."""
    monkeypatch.setattr(module, "_DOCUMENTS", 50)
    monkeypatch.setattr(corpora, "_BLOCK", 4_000)
    documents, each = 2_000, 100
    words = np.tile(np.arange(each, dtype=np.int32), documents)
    names = tuple(f"w{i}" for i in range(each))
    starts = np.arange(documents + 1) * each
    corpus = Corpus(starts, words, np.full(len(words), 2, np.int32), names, each)
    topics = Topics(torch.ones(each, 2), torch.ones(2), iterations=1)
    tracemalloc.start()
    try:
        getattr(topics, ask)(corpus.with_vocabulary(names[::-1]))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / len(words) < 8


def test_the_bound_does_not_depend_on_how_many_documents_there_are():
    corpus, topics = true_topics()
    twice = corpus.select(np.r_[np.arange(len(corpus)), np.arange(len(corpus))])
    assert topics.bound_perplexity(twice) == pytest.approx(topics.bound_perplexity(corpus), rel=1e-9)
    assert topics.full_bound_perplexity(twice, prior=0.1) < topics.full_bound_perplexity(corpus, prior=0.1)
    # half of them that stand for all have the same topics' terms
    half = corpus.select(range(len(corpus) // 2))
    scaled = topics.full_bound_perplexity(half, prior=0.1, documents=len(corpus))
    assert scaled == pytest.approx(topics.full_bound_perplexity(corpus, prior=0.1), rel=0.1)
    # a bound on the chance of the words cannot say that they are likelier than the truth's own prediction
    assert topics.bound_perplexity(corpus) > topics.completion_perplexity(corpus)


def test_coherence_of_words_that_stand_together():
    """Topic 0's words are always together, topic 1's never."""
    corpus = Corpus(
        np.array([0, 2, 4, 5, 6]),
        np.array([0, 1, 0, 1, 2, 3], np.int32),
        np.ones(6, np.int32),
        None,
        5,
    )
    matrix = torch.full((5, 3), 0.01)
    matrix[[0, 1], 0] = 9.0
    matrix[[2, 3], 1] = 9.0
    matrix[[0, 4], 2] = 9.0  # word 4 is in no document
    values = Topics(matrix, torch.ones(3)).coherence(corpus, number=2)
    np.testing.assert_allclose(values, [1.0, -1.0, -1.0], atol=1e-12)


def test_diversity_counts_different_words():
    matrix = torch.full((24, 3), 0.01)
    matrix[[0, 1], 0] = 9.0
    matrix[[0, 2], 1] = 9.0
    matrix[[0, 3], 2] = 9.0
    topics = Topics(matrix, torch.ones(3))
    assert topics.diversity(2) == pytest.approx(4 / 6)
    assert topics.diversity() == pytest.approx(4 / 6)  # a quarter of eight words each
    assert Topics(torch.ones(24, 3), torch.ones(3)).diversity(2) == pytest.approx(1 / 3)
    assert Topics(torch.ones(2, 3), torch.ones(3)).diversity() == pytest.approx(1 / 3)


def test_independent_words_have_coherence_zero():
    random = np.random.default_rng(0)
    present = random.random((40_000, 2)) < 0.3
    starts = np.r_[0, np.cumsum(present.sum(1))].astype(np.int64)
    words = np.nonzero(present)[1].astype(np.int32)
    corpus = Corpus(starts, words, np.ones(len(words), np.int32), None, 2)
    (value,) = Topics(torch.ones(2, 1), torch.ones(1)).coherence(corpus, number=2)
    assert abs(value) < 0.01


def test_the_weights_of_documents_are_the_oracles():
    corpus, topics = true_topics()
    some = corpus.select(range(20))
    from murmurate.losses.topics import Documents

    documents = Documents(
        torch.from_numpy(some.starts), torch.from_numpy(some.words), torch.from_numpy(some.counts).float()
    )
    total = topics.matrix.double().sum(0)
    log_beta = torch.digamma(topics.matrix.double()) - torch.digamma(total)
    gamma, _ = folded(documents, log_beta, topics.alpha, iterations=100, tolerance=1e-4)
    expected = gamma / gamma.sum(1, keepdim=True)
    np.testing.assert_allclose(topics.transform(some), expected.numpy(), atol=2e-4)


def test_nothing_to_measure_is_refused():
    corpus, topics = true_topics()
    nothing = corpus.select([])
    with pytest.raises(ValueError, match="no word"):
        topics.completion_perplexity(nothing)
    with pytest.raises(ValueError, match="without a word"):
        topics.bound_perplexity(nothing)


def test_documents_over_another_number_of_words_are_refused():
    _, topics = true_topics()
    asked = (topics.transform, topics.document_bounds, topics.coherence, topics.completion_perplexity)
    for words in (WORDS - 1, WORDS + 1):  # the ids of the first are among the topics' words
        other = Corpus.from_entries([0], [words - 1], [3], shape=(1, words))
        for ask in asked:
            with pytest.raises(Refusal, match=rf"over {words} words, and the topics over {WORDS}\. Count"):
                ask(other)
        with pytest.raises(Refusal, match=f"over {words} words"):
            topics.probabilities(np.ones((2, words)))


def test_the_full_bound_is_gensims_on_the_same_topics():
    """gensim's definition: exp(-log_perplexity), on all documents and on some that stand for more."""
    gensim = pytest.importorskip("gensim.models", reason="gensim is what it is compared with")
    corpus, share = drawn()
    prior, alpha, matrix = 0.05, 0.25, share * 1e4 + 0.05
    model = gensim.LdaModel(
        id2word={v: str(v) for v in range(WORDS)},
        num_topics=K,
        alpha=[alpha] * K,
        eta=prior,
        iterations=1000,
        gamma_threshold=1e-6,
        dtype=np.float64,
    )
    model.state.sstats = matrix.double().T.numpy() - prior
    model.sync_state()
    bags = [list(zip(*corpus_entries(corpus, d), strict=True)) for d in range(len(corpus))]
    topics = Topics(matrix, torch.full((K,), alpha))
    for documents in (None, 5 * len(corpus)):
        theirs = math.exp(-model.log_perplexity(bags, total_docs=documents))
        mine = topics.full_bound_perplexity(corpus, prior=prior, documents=documents)
        assert mine == pytest.approx(theirs, rel=1e-3)


def corpus_entries(corpus, document):
    part = slice(corpus.starts[document], corpus.starts[document + 1])
    return corpus.words[part].tolist(), corpus.counts[part].tolist()


def test_topics_in_a_plane_keep_hellinger_distances() -> None:
    """Three topics lie in a plane: distances are those of the definition, as are their shares of variance."""
    matrix = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)) ** 4 + 0.01
    topics = Topics(matrix, torch.ones(3))
    points, shown = topics.plane()
    roots = np.sqrt(topics.word_shares().numpy())
    for i in range(3):
        for j in range(3):
            distance = np.linalg.norm(roots[:, i] - roots[:, j])
            assert np.linalg.norm(points[i] - points[j]) == pytest.approx(distance, abs=1e-9)
    assert shown == pytest.approx(1.0)
    more = torch.rand(30, 8, generator=torch.Generator().manual_seed(1)) ** 4 + 0.01
    points, shown = Topics(more, torch.ones(8)).plane()
    centred = np.sqrt((more.double() / more.double().sum(0)).numpy()).T
    centred = centred - centred.mean(0)
    variance = np.linalg.svd(centred, compute_uv=False) ** 2
    assert shown == pytest.approx(variance[:2].sum() / variance.sum())
    np.testing.assert_allclose((points**2).sum(0), variance[:2], rtol=1e-9)
    alone, shown = Topics(matrix[:, :1], torch.ones(1)).plane()
    assert (alone.tolist(), shown) == ([[0.0, 0.0]], 1.0)
