"""Corpora against dense tables, and what they refuse."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import check, corpora, corpus, dense, same
from murmurate.datasets import corpus as module
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.interface import split_indices
from murmurate.errors import MissingExtra, Refusal


class Rows:
    """What ``from_scipy`` reads of a sparse matrix."""

    def __init__(self, table, dtype=np.int64):
        table = np.asarray(table)
        self.shape = table.shape
        which, self.indices = np.nonzero(table)
        self.data = table[which, self.indices].astype(dtype)
        self.indptr = np.concatenate([[0], np.cumsum(np.bincount(which, minlength=len(table)))])

    def tocsr(self):
        return self


@given(corpora())
def test_entries_in_any_order_are_the_table(drawn):
    check(drawn)
    assert drawn.tokens == dense(drawn).sum()
    assert drawn.lengths.tolist() == (dense(drawn) > 0).sum(axis=1).tolist()


def test_entries_of_one_pair_are_summed_and_zeros_left_out():
    made = Corpus.from_entries(
        [1, 0, 1, 1], [2, 0, 2, 1], [3, 1, 4, 0], shape=(3, 3), vocabulary=["a", "b", "c"]
    )
    assert dense(made).tolist() == [[1, 0, 0], [0, 0, 7], [0, 0, 0]]
    assert made.starts.tolist() == [0, 1, 2, 2]
    assert made.vocabulary == ("a", "b", "c")


@given(seed=st.integers(0, 2**31), entries=st.sampled_from([1, 7, 1 << 20]))
@settings(max_examples=40)
def test_select_is_the_rows_of_the_table(seed, entries):
    made = corpus(seed, empty=True)
    random = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        cut = module.blocks
        patch.setattr(module, "blocks", lambda starts: cut(starts, entries))
        chosen = random.integers(0, len(made), random.integers(0, 60))
        mask = random.random(len(made)) < 0.5
        for documents in (chosen, mask):
            part = made.select(documents)
            check(part)
            assert np.array_equal(dense(part), dense(made)[documents])


@given(seed=st.integers(0, 2**31), shared=st.integers(1, 30))
@settings(max_examples=40)
def test_over_other_words_is_the_columns_of_the_table(seed, shared):
    made = dataclasses.replace(corpus(seed, empty=True), vocabulary=tuple(f"w{i}" for i in range(30)))
    columns = np.random.default_rng(seed).permutation(30)[:shared]
    names = ("other", *(f"w{i}" for i in columns))
    expected = np.concatenate([np.zeros((len(made), 1)), dense(made)[:, columns]], axis=1)
    if not expected.any():
        with pytest.raises(Refusal, match="no word"):
            made.with_vocabulary(names)
        return
    over = made.with_vocabulary(names)
    chosen = np.random.default_rng(seed).integers(0, len(made), 10)
    part = over.select(chosen)
    check(part)
    assert part.vocabulary == names
    assert np.array_equal(dense(part), expected[chosen])
    assert (len(over), over.tokens) == (len(made), expected.sum())


def test_select_copies_and_refuses_what_is_not_there():
    made = corpus(0)
    part = made.select([3])
    part.counts[:] = 77
    assert not (made.counts == 77).any()
    for wrong in ([-1], [40], [True, False]):
        with pytest.raises(IndexError):
            made.select(wrong)


@given(seed=st.integers(0, 2**31), entries=st.integers(1, 500))
def test_blocks_cover_all_documents_once(seed, entries):
    starts = corpus(seed, empty=True).starts
    ranges = module.blocks(starts, entries)
    assert [a for a, _ in ranges] == [0] + [b for _, b in ranges[:-1]]
    assert ranges[-1][1] == len(starts) - 1
    longest = np.diff(starts).max()
    assert all(starts[b] - starts[a] <= entries + longest for a, b in ranges)


@pytest.mark.parametrize(("validation", "test"), [(5, 7), (0.125, 0.175), (5, 0.175), (0, 0), (0, 39)])
def test_a_split_has_every_example_once(validation, test):
    parts = split_indices(40, validation, test, seed=5)
    sizes = [round(s * 40) if isinstance(s, float) else s for s in (validation, test)]
    assert [len(p) for p in parts] == [40 - sum(sizes), *sizes]
    assert sorted(np.concatenate(parts)) == list(range(40))
    again = split_indices(40, validation, test, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_another_seed_splits_otherwise():
    assert len({tuple(split_indices(40, 10, 0, seed)[1]) for seed in range(4)}) == 4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((20, 20), "nothing is left"),
        ((-1, 0), "-1"),
        ((0, 1.5), "share"),
        ((0, math.inf), "share"),
        ((0.9, 0.2), "nothing is left"),
    ],
)
def test_invalid_splits(sizes, words):
    with pytest.raises(Refusal, match=words):
        split_indices(40, *sizes, seed=0)


def test_a_matrix_is_its_table_and_keeps_empty_rows():
    made = corpus(1, empty=True)
    for dtype in (np.int8, np.int64, np.float32):
        table = dense(made) % 100
        back = Corpus.from_scipy(Rows(table, dtype), [f"w{i}" for i in range(30)])
        assert np.array_equal(dense(back), table)
        assert back.vocabulary is not None
        assert back.vocabulary[7] == "w7"


@pytest.mark.parametrize(
    ("table", "words"),
    [([[0.5, 1]], "tf-idf"), ([[-1, 2]], "negative"), ([[float("nan")]], "number"), ([[2**31]], "above")],
)
def test_matrices_that_count_nothing(table, words):
    with pytest.raises(Refusal, match=words):
        Corpus.from_scipy(Rows(table, np.float64))


def test_a_sum_without_room_names_its_document_and_word():
    with pytest.raises(Refusal, match="Document 1 has word 2 2147483648 times"):
        Corpus.from_entries([0, 1, 1], [0, 2, 2], [1, 2**30, 2**30], shape=(2, 3))


def test_ids_are_integers_of_any_dtype_and_there_may_be_none():
    with pytest.raises(Refusal, match="word ids are float64, and must be integers"):
        Corpus.from_entries([0, 1], [0.5, 1.9], [1, 2], shape=(2, 3))
    empty = Corpus.from_entries([], [], [], shape=(2, 3))
    assert (empty.starts.tolist(), len(empty.words)) == ([0, 0, 0], 0)
    far, unsigned = 2**22, np.array([0, 1], np.uint64)  # document and word exceed the 53 bits of float64
    assert Corpus.from_entries([far, far], unsigned, [1, 1], shape=(far + 1, 2)).words.tolist() == [0, 1]


def test_a_dense_table_is_refused_with_the_remedy():
    with pytest.raises(Refusal, match="csr_matrix"):
        Corpus.from_scipy(np.ones((2, 2)))


def test_a_row_of_a_sparse_array_is_refused_with_the_remedy():
    sparse = pytest.importorskip("scipy.sparse")
    row = sparse.csr_array(np.array([[1, 0, 2]]))[0]
    with pytest.raises(Refusal, match=r"has the shape \(3,\).*counts\.reshape\(1, -1\)"):
        Corpus.from_scipy(row)
    assert dense(Corpus.from_scipy(row.reshape(1, -1))).tolist() == [[1, 0, 2]]


def test_a_matrix_of_scipy_comes_back():
    sparse = pytest.importorskip("scipy.sparse")
    made = corpus(2, empty=True)
    matrix = made.as_scipy()
    assert np.array_equal(matrix.toarray(), dense(made))
    assert np.shares_memory(matrix.data, made.counts)
    for form in (sparse.coo_matrix, sparse.csc_matrix, sparse.lil_matrix, sparse.csr_array):
        assert same(Corpus.from_scipy(form(matrix)), made)
    messy = sparse.csr_matrix(([1, 2, 0, 4], [2, 0, 1, 2], [0, 4]), shape=(1, 3))
    assert dense(Corpus.from_scipy(messy)).tolist() == [[2, 0, 5]]
    assert messy.indices.tolist() == [2, 0, 1, 2]  # the caller's is as it was


def test_a_matrix_without_scipy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(MissingExtra, match=r"murmurate\[topics\]"):
        corpus(0).as_scipy()


def _arrays(starts, words, counts):
    return np.array(starts, np.int64), np.array(words, np.int32), np.array(counts, np.int32)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (_arrays([], [], []), "starts rise"),
        (_arrays([0, 2], [1], [1]), "starts rise"),
        (_arrays([0, 2, 1, 2], [1, 2], [1, 1]), "starts rise"),
        (_arrays([1, 2], [1, 2], [1, 1]), "starts rise"),
        ((np.array([0, 1], np.int32), *_arrays([], [1], [1])[1:]), "starts are"),
    ],
)
def test_arrays_that_are_no_rows(arrays, words):
    with pytest.raises(Refusal, match=words):
        Corpus(*arrays, None, 5)


def test_a_vocabulary_has_a_word_for_each_id():
    with pytest.raises(Refusal, match="2 words"):
        Corpus(*_arrays([0, 1], [1], [1]), ("a", "b"), 5)
