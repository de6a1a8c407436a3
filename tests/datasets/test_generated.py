"""What is drawn follows the model it was drawn from; what the library says is found where it stands."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from drawn import check, same
from murmurate.datasets import generated
from murmurate.datasets.tokens import Tokens
from murmurate.errors import Refusal


def test_a_seed_is_a_corpus():
    one, two, other = (generated.generate(300, 200, 5, 40, seed).corpus for seed in (1, 1, 2))
    assert same(one, two)
    assert not same(one, other)
    check(one)


def test_means_are_those_of_the_model():
    # E[count of v] per token = sum_k alpha_k phi_kv / sum alpha; the length has mean 60
    made = generated.generate(20_000, 50, 4, 60, seed=3)
    corpus = made.corpus
    assert len(corpus) == 20_000
    assert corpus.vocabulary_size == 50
    tokens = np.add.reduceat(corpus.counts, corpus.starts[:-1])
    assert tokens.min() >= 1
    assert tokens.mean() == pytest.approx(60, rel=0.02)
    assert np.log(tokens).std() == pytest.approx(0.5, rel=0.03)
    found = np.bincount(corpus.words, weights=corpus.counts, minlength=50) / corpus.tokens
    expected = made.alpha @ made.phi / made.alpha.sum()
    assert np.abs(found - expected).max() < 0.003
    assert made.phi.sum(axis=1) == pytest.approx(np.ones(4))
    assert made.alpha.sum() == pytest.approx(4)
    assert (np.diff(made.alpha) < 0).all()


def test_documents_have_topics_of_their_own():
    # Cov of two words' shares within documents is that of theta ~ Dirichlet(alpha), seen through phi
    made = generated.generate(20_000, 6, 3, 400, seed=4, topic_mass=5, length_sigma=0.01)
    corpus = made.corpus
    table = np.zeros((len(corpus), 6))
    table[np.repeat(np.arange(len(corpus)), corpus.lengths), corpus.words] = corpus.counts
    share = table / table.sum(axis=1, keepdims=True)
    mean = made.alpha / 4
    theta_cov = (np.diag(mean) - np.outer(mean, mean)) / (4 + 1)
    topics_cov = made.phi.T @ theta_cov @ made.phi
    word_mean = mean @ made.phi
    second = topics_cov + np.outer(word_mean, word_mean)
    sampling = (np.diag(word_mean) - second) / 400  # E[Cov(share | theta)] of a multinomial
    assert np.abs(np.cov(share.T) - topics_cov - sampling).max() < 0.06 * np.abs(topics_cov).max()


def test_a_corpus_of_several_blocks_is_one_stream():
    made = generated.generate(generated._BLOCK + 5, 20, 2, 5, seed=0).corpus
    check(made)
    assert len(made) == generated._BLOCK + 5
    assert made.lengths.min() >= 1


@pytest.mark.parametrize("wrong", [{"documents": 0}, {"topics": 0}, {"mean_length": 0}, {"topic_mass": -1.0}])
def test_sizes_that_are_none(wrong):
    with pytest.raises(Refusal, match=next(iter(wrong))):
        generated.generate(**{"documents": 5, "vocabulary": 5, "topics": 2, **wrong})


SOURCE = '''"""Module words."""
import os  # loose comment
pi = "# no comment"
class Parrot:
    """Norwegian blue."""
    # plumage
    def squawk(self):
        """Loud."""
        return 1  # voom
# after
'''


def test_docstrings_and_comments_belong_to_the_innermost(tmp_path):
    (tmp_path / "b.py").write_text(SOURCE)
    (tmp_path / "a.py").write_text('"""First."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    for folder in ("test", "site-packages", "encodings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text('"""Hidden."""\n')
    assert list(generated.library_documents(tmp_path)) == [
        "First.",
        "Module words.\nloose comment\nafter",
        "Norwegian blue.\nplumage",
        "Loud.\nvoom",
    ]
    made = generated.library_text(folder=tmp_path, min_tokens=3, tokens=Tokens(min_df=1, max_df=1.0))
    assert made.vocabulary == ("blue", "comment", "loose", "module", "norwegian", "plumage", "words")
    assert made.lengths.tolist() == [4, 3]


def test_lines_are_counted_as_python_counts_them(tmp_path):
    (tmp_path / "a.py").write_text("# top\n\x0c\ndef f():\n    # inside\n    pass\n")
    assert list(generated.library_documents(tmp_path)) == ["\ntop", "\ninside"]


def test_the_library_is_english(tmp_path):
    made = generated.library_text(folder=Path(sysconfig.get_paths()["stdlib"]) / "email")
    check(made)
    assert len(made) > 100
    assert made.lengths.min() >= 1
    assert {"file", "list", "string"} <= set(made.vocabulary)
    assert not {"the", "and"} & set(made.vocabulary)


def test_a_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(Refusal, match="no Python sources"):
        generated.library_text(folder=tmp_path)
