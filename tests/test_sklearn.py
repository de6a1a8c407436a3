"""The estimator: scikit-learn's checks, its own figures on the same lambda, and its replicas."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from murmurate.datasets.corpus import Corpus
from murmurate.launch import script, script_ranks
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.gala import GALA
from murmurate.workloads.topic_model import TopicModel

pytest.importorskip("sklearn", reason="the estimator is for those who have scikit-learn")

import sklearn.decomposition
from scipy.sparse import csc_matrix, csr_matrix
from sklearn.base import clone
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from murmurate.sklearn import LatentDirichletAllocation
from murmurate.sklearn.in_memory import CorpusPasses
from topics_in_sklearn import DOCUMENTS, PRIORS, WORDS, K, counts, fitted, theirs


def test_it_is_an_estimator():
    """No check is expected to fail: with the tags of whole, non-negative numbers all can be passed."""
    results = check_estimator(
        LatentDirichletAllocation(batch_size=10, max_iter=5), on_fail=None, on_skip=None
    )
    wrong = {r["check_name"]: r["exception"] for r in results if r["status"] not in ("passed", "skipped")}
    assert not wrong
    assert sum(r["status"] == "passed" for r in results) > 40


def test_perplexity_score_and_transform_are_scikit_learns_on_the_same_lambda():
    mine = fitted(total_samples=5000)
    other = theirs(mine, total_samples=5000)
    x = counts()[300:]
    assert mine.perplexity(x) == pytest.approx(other.perplexity(x), rel=1e-3)
    assert mine.score(x) == pytest.approx(other.score(x), rel=1e-3)
    sampled = mine.perplexity(x, sub_sampling=True)
    assert sampled == pytest.approx(other.perplexity(x, sub_sampling=True), rel=1e-3)
    assert sampled < 0.99 * mine.perplexity(x)  # the topics' own terms weigh less beside more documents
    np.testing.assert_allclose(mine.transform(x), other.transform(x), atol=5e-3)
    raw = mine.transform(x, normalize=False)
    np.testing.assert_allclose(raw.sum(1), K * 0.2 + np.asarray(x.sum(1)).ravel(), rtol=1e-4)


@pytest.mark.parametrize("prior", [0.0125, 0.01, 0.001])
def test_words_at_a_small_prior_are_as_unlikely_as_scikit_learn_has_them(prior):
    """But for its E-step, which loses them: it adds 2e-16 to their chances."""
    mine = fitted()
    mine.components_[:, :20] = mine.topic_word_prior_ = prior
    other = theirs(mine)
    other.topic_word_prior_ = prior
    x = counts()[300:]
    assert mine.score(x) == pytest.approx(other.score(x), rel=1e-3)
    assert mine.perplexity(x) == pytest.approx(other.perplexity(x), rel=3e-3)


def test_a_step_is_scikit_learns():
    """From the same lambda, on the same documents; its E-step begins elsewhere and ends at the same place."""
    exact = {"max_doc_update_iter": 1000, "mean_change_tol": 1e-6, "batch_size": 100, "total_samples": 800}
    mine = fitted(**exact, max_iter=1)
    other = theirs(mine, **{k: v for k, v in exact.items() if k != "max_iter"})
    before = mine.components_.copy()
    mine.partial_fit(counts()[:100])
    other.partial_fit(counts()[:100])
    assert np.abs(mine.components_ - before).max() > 1.0
    np.testing.assert_allclose(mine.components_, other.components_, rtol=1e-3, atol=1e-2)
    assert mine.n_batch_iter_ == other.n_batch_iter_


@pytest.mark.parametrize("step_rule", ["robbins-monro", "average"])
def test_batch_learning_steps_to_lambda_hat_of_all_documents(step_rule):
    exact = {"max_doc_update_iter": 1000, "mean_change_tol": 1e-6}
    batch = {"learning_method": "batch", "step_rule": step_rule, **exact}
    mine = fitted(max_iter=3, **batch)
    assert mine.n_batch_iter_ == 4
    _, statistics = theirs(fitted(max_iter=2, **batch), **exact)._e_step(
        counts(), cal_sstats=True, random_init=False
    )
    np.testing.assert_allclose(mine.components_, 0.1 + statistics, rtol=1e-3, atol=1e-2)


def test_it_finds_what_scikit_learn_finds():
    mine = fitted(max_iter=5, max_doc_update_iter=20)
    other = sklearn.decomposition.LatentDirichletAllocation(
        **PRIORS, max_iter=5, batch_size=50, max_doc_update_iter=20, learning_method="online"
    ).fit(counts())
    assert mine.bound_ == pytest.approx(mine.perplexity(counts()), rel=1e-9)
    assert mine.bound_ < 1.02 * other.bound_
    assert mine.n_iter_ == 5


# -- what is drawn, and going on --------------------------------------------------------------------------


def test_the_same_seed_learns_the_same():
    one, same, other = fitted(), fitted(), clone(fitted()).set_params(random_state=4).fit(counts())
    np.testing.assert_array_equal(one.components_, same.components_)
    assert np.abs(one.components_ - other.components_).max() > 1.0
    theirs = LatentDirichletAllocation(**PRIORS | {"random_state": np.random.RandomState(3)}, max_iter=3)
    theirs.set_params(batch_size=50).fit(counts())
    np.testing.assert_array_equal(one.components_, theirs.components_)


def test_partial_fit_goes_on_where_it_was():
    settings = {"batch_size": 40, "total_samples": DOCUMENTS}
    whole = LatentDirichletAllocation(**PRIORS, **settings)
    whole.partial_fit(counts()[:40])
    parts = pickle.loads(pickle.dumps(whole))
    whole.partial_fit(counts()[40:])
    for first in range(40, DOCUMENTS, 40):
        parts = pickle.loads(pickle.dumps(parts)).partial_fit(counts()[first : first + 40])
    assert parts.n_batch_iter_ == whole.n_batch_iter_ == 11
    np.testing.assert_allclose(parts.components_, whole.components_, rtol=1e-3, atol=1e-2)
    assert parts.perplexity(counts()) < 1.1 * fitted(max_iter=1, batch_size=40).perplexity(counts())


def test_partial_fit_is_online_also_after_batch_learning():
    batch = fitted(learning_method="batch", max_iter=3)
    before = batch.components_.copy()
    batch.set_params(total_samples=DOCUMENTS).partial_fit(counts()[:5])
    kept = np.corrcoef(batch.components_.ravel(), before.ravel())[0, 1]
    assert kept > 0.8, "five documents do not replace what all of them taught"
    assert batch.n_batch_iter_ == 5


def test_it_ends_when_the_perplexity_stands_still(capsys):
    still = fitted(evaluate_every=2, perp_tol=1e9, max_iter=9, verbose=1)
    assert still.n_iter_ == 4
    reported = capsys.readouterr().out.splitlines()
    assert len(reported) == 4
    assert reported[3].startswith("iteration: 4 of max_iter: 9, perplexity: ")
    assert float(reported[3].split()[-1]) == pytest.approx(still.bound_, rel=1e-3)
    assert fitted(evaluate_every=1, perp_tol=0.0, max_iter=3).n_iter_ == 3


def print_passes():
    starts, run = [], script.run
    script.run = lambda *args, **more: starts.append(1) or run(*args, **more)
    fitted(strategy="all-reduce", replicas=2, verbose=1, max_iter=4, evaluate_every=3)
    print(len(starts), "starts")


def test_passes_are_printed_as_they_end_by_one_replica_without_a_new_start():
    """In a process of its own: a fork server of earlier tests has another standard output."""
    words = [sys.executable, "-c", "import test_sklearn; test_sklearn.print_passes()"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line[:25] for line in lines] == [f"iteration: {n} of max_iter: 4"[:25] for n in (1, 2, 3, 4)]
    assert ["perplexity" in line for line in lines] == [False, False, True, False]
    assert last == "2 starts"  # one for the passes before an evaluation, and one after it


def test_printing_changes_no_result(capsys):
    rule = {"step_rule": "average", "max_iter": 4}
    np.testing.assert_array_equal(fitted(**rule).components_, fitted(verbose=1, **rule).components_)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_all_that_says_the_same_learns_the_same():
    whole = counts()
    row, column = whole.nonzero()
    twice = csr_matrix(  # each count as two entries of one place
        (
            np.r_[whole.data - 1, np.ones(whole.nnz)],
            (np.r_[row, row], np.r_[column, column]),
        ),
        shape=whole.shape,
    )
    wanted = fitted().components_
    for x in (whole.toarray(), whole.astype(np.int32), csc_matrix(whole), twice, whole.astype(np.float32)):
        result = LatentDirichletAllocation(**PRIORS, max_iter=3, batch_size=50).fit(x)
        assert result.components_.dtype == (np.float32 if x.dtype == np.float32 else np.float64)
        np.testing.assert_array_equal(result.components_.astype(np.float64), wanted)


def test_threads_say_the_same():
    one = fitted()
    more = pickle.loads(pickle.dumps(one)).set_params(n_jobs=3)
    np.testing.assert_array_equal(one.transform(counts()), more.transform(counts()))
    assert one.score(counts()) == pytest.approx(more.score(counts()), rel=1e-12)


def test_a_pipeline_over_text_has_named_topics():
    text = ["ships sail the sea", "the sea and the ships", "dogs bark at cats", "cats flee dogs"] * 5
    pipe = make_pipeline(CountVectorizer(), LatentDirichletAllocation(2, random_state=0)).fit(text)
    names = ["latentdirichletallocation0", "latentdirichletallocation1"]
    assert list(pipe.get_feature_names_out()) == names
    topics = pipe.transform(["sea ships", "cats dogs"])
    assert topics.argmax(1).tolist() in ([0, 1], [1, 0])


# -- replicas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [
        ("all-reduce", 2),
        ("dpsgd", 2),
        ("dpsgd", 1),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("hogwild", 2), (GALA(), 2))),
    ],
)
def test_replicas_on_real_processes_find_topics_together(strategy, replicas):
    alone = fitted(max_iter=4, batch_size=25)
    result = fitted(max_iter=4, batch_size=25, strategy=strategy, replicas=replicas)
    assert result.bound_ < 1.15 * alone.bound_
    assert result.n_batch_iter_ > 4 * DOCUMENTS / 25 / replicas
    later = pickle.loads(pickle.dumps(result)).set_params(total_samples=DOCUMENTS).partial_fit(counts())
    assert later.n_batch_iter_ > result.n_batch_iter_
    assert later.perplexity(counts()) < 1.15 * alone.bound_


def test_all_reduce_learns_the_same_twice():
    result = [fitted(strategy="all-reduce", replicas=2).components_ for _ in range(2)]
    np.testing.assert_array_equal(*result)


def test_equal_documents_are_not_taken_for_a_mistake_in_a_loop(capfd):
    """Replicas begin with equal gradients there, as in a loop that does not share its batches out."""
    same = np.ones((DOCUMENTS, WORDS), int)
    LatentDirichletAllocation(2, strategy="all-reduce", replicas=2, max_iter=1).fit(same)
    assert capfd.readouterr().err == ""


def test_other_ranks_of_torchrun_get_the_result(monkeypatch):
    def on_another_rank(main, **settings):
        """Runs ``main`` in threads; the results are as a rank that is not main receives them."""
        results = run(main, launcher="inline", **settings)
        return [script_ranks._unpacked(script_ranks._packed(result)) for result in results]

    run = script.run
    monkeypatch.setattr(script, "run", on_another_rank)
    assert fitted(strategy="all-reduce", replicas=2, max_iter=1).bound_ < WORDS


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(
    ("total", "batch", "replicas"), [(10, 3, 1), (10, 3, 2), (7, 2, 3), (1, 4, 3), (3, 1, 2)]
)
def test_replicas_divide_each_pass(total, batch, replicas, shuffled):
    passes = CorpusPasses(TopicModel(batch=batch), total, 0, first=1, number=2, shuffled=shuffled)
    parts = [list(passes.parts(total, rank, replicas)) for rank in range(replicas)]
    (count,) = {len(own) for own in parts}
    assert count == 2 * -(-total // (batch * replicas))
    for number in range(2):
        now = [p for own in parts for p in own[number * count // 2 : (number + 1) * count // 2]]
        assert all(1 <= len(part) <= batch for part in now)
        seen = np.concatenate(now)
        assert set(seen) == set(range(total))
        assert len(seen) == total or total < batch * replicas or batch == 1
    assert shuffled or (np.diff(np.concatenate(parts[0])) > 0).sum() >= len(np.concatenate(parts[0])) - 2


@pytest.mark.parametrize(
    ("rule", "own", "expected"),
    [("paper", None, (0.2, True)), ("paper", 0.5, (0.5, False)), ("average", None, (None, False))],
)
def test_under_the_papers_steps_rho_follows_them(monkeypatch, rule, own, expected):
    """As on the command line (``corpus-lda``): equation 13, unless rho is the user's."""

    def look(self, replicas, shrinks):
        raise ValueError(f"rho {self.global_learning_rate}, scaled {self.scale_rates}")

    monkeypatch.setattr(DPSGD, "check", look)
    strategy = DPSGD(global_learning_rate=own)
    with pytest.raises(ValueError, match="rho {}, scaled {}".format(*expected)):
        LatentDirichletAllocation(strategy=strategy, replicas=2, step_rule=rule, learning_rate=0.2).fit(
            counts()
        )


def test_other_figures_are_those_of_its_topics():
    mine, corpus = fitted(), Corpus.from_scipy(counts())
    assert mine.topics_.full_bound_perplexity(corpus, prior=0.1) == pytest.approx(mine.perplexity(counts()))
    assert 1 < mine.topics_.completion_perplexity(corpus) < WORDS
    assert not hasattr(LatentDirichletAllocation(), "topics_")
