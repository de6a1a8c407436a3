"""Words, and the vocabulary's cut, by hand."""

from __future__ import annotations

import tracemalloc
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import check, count, dense
from murmurate.datasets import corpus, tokens
from murmurate.datasets.reading import read
from murmurate.datasets.tokens import Tokens, WordCounter
from murmurate.errors import Refusal

ALL = Tokens(min_df=1, max_df=1.0)
WORDS = tuple(sorted(chr(97 + i // 10) * 3 + chr(97 + i % 10) for i in range(100)))


def test_words_are_runs_of_letters():
    text = "The Köln-Bonn line: 3x re_use, don't STOP! Жук a"
    assert Tokens().words_of(text) == ["köln", "bonn", "line", "stop", "жук"]
    assert Tokens(min_letters=1, stop_words=frozenset()).words_of("a b2c") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी की किताब", ["हिन्दी", "की", "किताब"]),
        ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
        ("می\u200cخواهم کتاب", ["می\u200cخواهم", "کتاب"]),
        ("র\u200d্যাব", ["র\u200d্যাব"]),
        ("re\u0301sume\u0301, résumé", ["résumé", "résumé"]),
        ("a\u0301 \u0301b", ["á", "b"]),
    ],
)
def test_signs_on_letters_are_part_of_their_word(text, words):
    assert Tokens(min_letters=1, stop_words=frozenset()).words_of(text) == words


@given(st.text(st.sampled_from("aKé\u0301\u0947\u200c\u200d1_ .هİ½") | st.characters(), max_size=30))
def test_words_are_what_a_walk_over_the_characters_finds(text):
    text = unicodedata.normalize("NFC", text.lower())
    words, word = [], ""
    for c, following in zip(text, text[1:] + " ", strict=False):
        joins = c in "\u200c\u200d" and (is_letter(following) or is_sign(following))
        if is_letter(c) or (word and (joins or is_sign(c))):
            word += c
        else:
            words, word = [*words, word], ""
    assert Tokens(min_letters=1, stop_words=frozenset()).words_of(text) == [w for w in [*words, word] if w]


def is_sign(c):
    return unicodedata.category(c).startswith("M")


def is_letter(c):
    return c.isalnum() and not c.isdecimal()


def test_counts_by_hand():
    made = count(["cat dog cat", "", "dog bird"], ALL)
    assert made.vocabulary == ("bird", "cat", "dog")
    assert dense(made).tolist() == [[0, 2, 1], [0, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize("vocabulary", [None, WORDS])
def test_what_was_counted_is_ordered_a_few_documents_at_a_time(vocabulary, monkeypatch):
    counting = WordCounter(ALL, vocabulary)
    for _ in range(2_000):
        counting.add(" ".join(reversed(WORDS)))
    cut = corpus.blocks
    for module in (corpus, tokens):
        monkeypatch.setattr(module, "blocks", lambda starts: cut(starts, 4_000))
    tracemalloc.start()
    try:
        made = counting.finish()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    check(made)
    assert made.vocabulary == WORDS
    assert len(made.words) == 200_000
    assert most / len(made.words) < 24


@pytest.mark.parametrize(
    ("tokens", "vocabulary"),
    [
        (Tokens(min_df=2, max_df=1.0), ("cat", "dog", "emu")),
        (Tokens(min_df=0.6, max_df=1.0), ("cat", "dog")),
        (Tokens(min_df=1, max_df=2), ("bird", "emu", "fox")),
        (Tokens(min_df=1, max_df=0.75), ("bird", "cat", "emu", "fox")),
        (Tokens(min_df=1, max_df=1.0, max_vocabulary=2), ("dog", "fox")),  # by tokens, not by documents
        (Tokens(min_df=1, max_df=1.0, max_vocabulary=3), ("cat", "dog", "fox")),
    ],
)
def test_the_cut(tokens, vocabulary):
    texts = ["dog cat emu", "dog cat emu bird", "dog cat", "dog fox fox fox fox fox"]
    made = count(texts, tokens)
    assert made.vocabulary == vocabulary
    whole = count(texts, ALL)
    columns = [whole.vocabulary.index(word) for word in vocabulary]
    assert dense(made).tolist() == dense(whole)[:, columns].tolist()


def test_a_share_keeps_words_that_are_exactly_at_the_bound():
    assert 0.07 * 100 > 7
    assert 0.29 * 100 < 29
    texts = ["cow"] * 7 + ["emu"] * 29 + ["fox"] * 6 + ["dog"] * 58
    assert count(texts, Tokens(min_df=0.07, max_df=0.29)).vocabulary == ("cow", "emu")


def test_numbers_of_numpy_are_read_as_pythons(tmp_path):
    texts = ["dog cat", "dog cat", "dog"]
    assert count(texts, Tokens(min_df=np.int64(1), max_df=np.float32(0.75))).vocabulary == ("cat",)
    (tmp_path / "x.txt").write_text("\n".join(texts))
    tokens = Tokens(min_df=np.int64(2), max_df=1.0, max_vocabulary=np.int32(1))
    made = read(tmp_path / "x.txt", tokens=tokens, skip_bad=np.bool_(True), bigrams=np.bool_(False))
    assert made.vocabulary == ("dog",)
    (tmp_path / "x.ldac").write_text("1 0:1\n1 1:2\n")
    read_again = read(tmp_path / "x.ldac", vocabulary_size=np.int64(5), one_based=np.bool_(False))
    assert read_again.vocabulary_size == 5


def test_a_given_vocabulary_is_kept_whole():
    made = count(["cat zebra", "dog dog"], vocabulary=["zebra", "dog", "newt"])
    assert made.vocabulary == ("zebra", "dog", "newt")
    assert dense(made).tolist() == [[1, 0, 0], [0, 2, 0]]


@pytest.mark.parametrize("wrong", [{"min_df": -1}, {"max_df": 1.5}, {"max_vocabulary": 0}, {"min_df": True}])
def test_cuts_that_are_none(wrong):
    with pytest.raises(Refusal, match=next(iter(wrong))):
        Tokens(**wrong)


def test_a_cut_that_leaves_nothing_says_what_to_change():
    with pytest.raises(Refusal, match=r"Lower --min-df"):
        count(["cat", "dog"], Tokens(min_df=2))
    with pytest.raises(
        Refusal, match=r"of 2 documents, --min-df 2 asks for .* least 2, .*--max-df 0\.5 .* most 1\."
    ):
        count(["cat dog", "cat"], Tokens(min_df=2))


def test_texts_without_a_word_that_counts_are_not_blamed_on_the_cut():
    with pytest.raises(Refusal, match=r"none of 2 documents has a word of 3 letters .* lower --min-letters"):
        count(["1 2", "of the a3b"])
