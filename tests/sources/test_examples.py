"""Corpora as sources: held-out documents, and mini-batches that omit no document."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from drawn import count, same
from murmurate.cli.options import change
from murmurate.datasets import corpus_world as documents
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.datasets.generated import generate
from murmurate.datasets.interface import Subset
from murmurate.datasets.tokens import STOP_WORDS, Tokens
from murmurate.datasets.writing import write
from murmurate.errors import Refusal
from murmurate.sources.examples import ExampleOrder, ExampleSource


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("corpus") / "docword.small.txt"
    write(generate(documents=101, vocabulary=40, topics=3, mean_length=20, seed=0).corpus, path, "uci")
    return path


def numbered(count):
    """Document d has the word d alone."""
    return Corpus(
        np.arange(count + 1), np.arange(count, dtype=np.int32), np.ones(count, np.int32), None, count
    )


def source(count=10, batch=3, rank=0, replicas=1, seed=0):
    documents = Subset(numbered(count), np.arange(count))
    return ExampleSource(
        documents, batch, ExampleOrder(len(documents), seed=seed, rank=rank, replicas=replicas)
    )


def taken(it, batches):
    return [next(it).data.words.tolist() for _ in range(batches)]


def test_what_is_kept_back_depends_on_its_seed_alone(path):
    world = CorpusWorld(str(path), validation=10, test=0.2)
    train, validation, test = world.divided()
    assert (len(train), len(validation), len(test)) == (71, 10, 20)
    everything = np.concatenate([part.indices for part in (train, validation, test)])
    assert sorted(everything) == list(range(101))
    again = dataclasses.replace(world).divided()
    assert all((a.indices == b.indices).all() for a, b in zip((train, validation, test), again, strict=True))
    other = dataclasses.replace(world, split_seed=1).divided()
    assert not (other[2].indices == test.indices).all()
    assert world.spec().examples == 71
    assert world.spec().observation_shape == (40,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation": 101}, "nothing is left"),
        ({"test": 0.995}, "nothing is left"),
        ({"test": -0.1}, "world.test is -0.1"),
        ({"validation": 1.5}, "world.validation is 1.5"),
        ({"path": ""}, "say which corpus"),
        ({"path": "/nowhere/docword.txt"}, "nowhere"),
        ({"min_df": 3}, "--min-df.* is for corpora of kind text or .*, and .* is read as uci"),
        ({"max_df": 1}, "--max-df.* is for corpora of kind text"),
        ({"max_vocabulary": 9}, "--max-vocabulary.* is for corpora of kind text"),
        ({"min_letters": 1}, "--min-letters.* is for corpora of kind text"),
        ({"stop_words": __file__}, "--stop-words.* is for corpora of kind text"),
        ({"stop_words": "/nowhere/stop.txt"}, "nowhere/stop.txt cannot be read"),
        ({"min_df": -1}, "min_df is -1"),
    ],
)
def test_what_cannot_be_divided_is_refused(path, changes, words):
    with pytest.raises(Refusal, match=words):
        dataclasses.replace(CorpusWorld(str(path)), **changes).divided()


TEXTS = ["The cat's here", "the old cat of Köln", "a dog, the dog", "Hund und Katze", "und so on"]


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("", Tokens()),
        ("--min-df 1 --max-df 1.0", Tokens(min_df=1, max_df=1.0)),
        ("--min-df 1 --max-df 1", Tokens(min_df=1, max_df=1)),
        ("--min-df 0.4 --max-df 6e-1", Tokens(min_df=0.4, max_df=0.6)),
        ("--min-df 1 --max-vocabulary 2", Tokens(min_df=1, max_vocabulary=2)),
        ("--min-df 1 --min-letters 4", Tokens(min_df=1, min_letters=4)),
        ("--stop-words mine.txt --min-df 1", Tokens(stop_words=frozenset(["und", "of", "s"]), min_df=1)),
        ("--stop-words none --min-df 1", Tokens(stop_words=STOP_WORDS, min_df=1)),
    ],
)
def test_options_of_text_are_the_tokens_of_python(words, tokens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zoo.txt").write_text("\n".join(TEXTS))
    Path("mine.txt").write_text("Und\n\nof 's")
    world = change(CorpusWorld("zoo.txt", cache="kept"), words.split(), "")
    monkeypatch.chdir("/")
    made = count(TEXTS, tokens)
    assert same(world.load(), made.select(made.lengths > 0))
    assert world.load() is dataclasses.replace(world).load()
    assert (tmp_path / "kept").is_dir()


def test_one_document_is_not_all_of_them_and_stop_words_are_read_again(tmp_path):
    path, stop = tmp_path / "zoo.txt", tmp_path / "stop.txt"
    path.write_text("cat dog\ncat\n")
    worlds = [CorpusWorld(str(path), min_df=1, max_df=most) for most in (1, 1.0)]
    assert [world.load().vocabulary for world in worlds] == [("dog",), ("cat", "dog")]
    for word, left in [("dog", ("cat",)), ("cat", ("dog",))]:
        stop.write_text(word)
        documents._read.cache_clear()  # as a new process has it
        world = CorpusWorld(str(path), min_df=1, max_df=1.0, stop_words=str(stop))
        assert world.load().vocabulary == left
    stop.write_bytes(b"\xff")
    with pytest.raises(Refusal, match="not UTF-8"):
        world.tokens()
    with pytest.raises(Refusal, match="words of a given --vocabulary"):
        CorpusWorld(str(path), min_df=1, vocabulary=str(path)).load()


@pytest.mark.parametrize(("count", "batch"), [(10, 3), (10, 10), (7, 20), (12, 4)])
def test_a_pass_sees_each_document_once(count, batch):
    it = source(count, batch)
    seen = [word for words in taken(it, 5 * count) for word in words]
    for first in range(0, len(seen) - count, count):
        assert sorted(seen[first : first + count]) == list(range(count))
    assert seen[:count] != seen[count : 2 * count]


def test_replicas_share_a_pass_without_overlap():
    sources = [source(12, 2, rank, replicas=3) for rank in range(3)]
    seen = [word for it in sources for words in taken(it, 2) for word in words]
    assert sorted(seen) == list(range(12))


def test_more_replicas_than_documents_share_them():
    assert sorted(taken(source(2, 2, rank=4, replicas=5), 1)[0]) == [0, 1]


def test_it_goes_on_where_it_was():
    one = source()
    taken(one, 7)
    other = source()
    other.load(one.state())
    assert taken(other, 9) == taken(one, 9)
    assert one.exact
    assert taken(source(seed=1), 3) != taken(source(seed=2), 3)
    assert 2 < other.fields()["passes"] < 5
