"""``murmurate topics`` and its corpora: read again, read otherwise, changed, or gone."""

from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest

from murmurate.cli.main import main
from murmurate.datasets import corpus_world as of_world
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.record.stored import seal
from murmurate.training.run_folder import read_run
from murmurate.training.worker import work
from murmurate.training.worker_context import WorkerContext
from short_runs import refused

ZOO = [f"{a} {b} {a} {c}\n" for a in ("ant", "bee", "cow") for b in ("dog", "emu") for c in ("fox", "gnu")]


def run(*arguments):
    return main([str(a) for a in arguments])


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """(a file of text, a run on it); what this process had read of it is forgotten."""
    path, folder = tmp_path / "zoo.txt", tmp_path / "run"
    path.write_text("".join(ZOO * 4))
    few = ("--topics", 2, "--alpha", 0.2, "--launcher", "inline", "--passes", 2, "--out", folder)
    assert run("topics", "fit", path, *few) == 0
    of_world._read.cache_clear()
    return path, folder


def shown(capsys, folder):
    """Of each topic: its words, and its coherence."""
    capsys.readouterr()
    assert run("topics", "show", folder, "--json") == 0
    topics = json.loads(capsys.readouterr().out)
    return {t["topic"]: [one["word"] for one in t["words"]] for t in topics}, topics[0]["coherence"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda path: path.write_text(path.read_text().replace("ant", "zebu")),
            "is not what the run was fitted on",
        ),
        (lambda path: path.write_text(path.read_text() + ZOO[0] * 3), "48 documents over 7 words then, 51"),
        (lambda path: path.unlink(), "There is no"),
    ],
)
def test_a_run_knows_its_words_when_its_corpus_is_another_or_gone(zoo, capsys, tmp_path, change, words):
    path, folder = zoo
    other = tmp_path / "other.txt"
    other.write_text("".join(ZOO))
    transform = ("topics", "transform", folder, other, "--out", tmp_path / "w.npz")
    before, coherence = shown(capsys, folder)
    assert coherence is not None
    assert run(*transform) == 0
    weights = np.load(tmp_path / "w.npz")["topics"]
    change(path)
    of_world._read.cache_clear()
    with pytest.warns(UserWarning, match=words):
        assert shown(capsys, folder) == (before, None)
    assert run(*transform) == 0
    assert np.array_equal(np.load(tmp_path / "w.npz")["topics"], weights)
    capsys.readouterr()
    for verb in (("resume", folder, "--env-steps", 500), ("topics", "evaluate", folder)):
        assert words in refused(capsys, *verb)


def test_the_same_corpus_written_again_is_the_same(zoo, capsys):
    path, folder = zoo
    os.utime(path, ns=(0, 0))
    assert shown(capsys, folder)[1] is not None
    assert run("resume", folder, "--env-steps", 200) == 0


def test_a_run_is_told_where_its_corpus_lies_by_now(zoo, capsys, tmp_path):
    path, folder = zoo
    moved, other = tmp_path / "elsewhere" / "animals.txt", tmp_path / "other.txt"
    other.write_text("".join(ZOO * 5))
    moved.parent.mkdir()
    path.rename(moved)
    of_world._read.cache_clear()
    more = ("resume", folder, "--env-steps", 300)
    capsys.readouterr()
    assert "Give its present path: murmurate resume DIR --world.path NEW" in refused(capsys, *more)
    assert "is not what the run was fitted on: 48 documents" in refused(capsys, *more, "--world.path", other)
    assert run(*more, "--world.path", moved) == 0
    assert run(*more[:2], "--env-steps", 400) == 0, "it is remembered"
    assert shown(capsys, folder)[1] is not None


def test_a_run_whose_fingerprint_was_deleted_goes_on_with_a_corpus_that_has_moved(zoo, capsys, tmp_path):
    path, folder = zoo
    (folder / "source.json").unlink()
    path.rename(tmp_path / "moved.txt")
    of_world._read.cache_clear()
    assert run("resume", folder, "--env-steps", 300, "--world.path", tmp_path / "moved.txt") == 0
    assert len(json.loads((folder / "source.json").read_text())["vocabulary"]) == 7
    capsys.readouterr()
    (tmp_path / "moved.txt").rename(path)
    of_world._read.cache_clear()
    assert "Give its present path: murmurate resume" in refused(capsys, "topics", "evaluate", folder)


def test_words_of_an_older_tokeniser_are_told_from_another_corpus(tmp_path, capsys):
    path, folder = tmp_path / "zoo.txt", tmp_path / "run"
    path.write_text("".join(ZOO * 4).replace("emu", "été"))
    few = ("--topics", 2, "--launcher", "inline", "--passes", 1, "--out", folder)
    assert run("topics", "fit", path, *few) == 0
    known = json.loads((folder / "source.json").read_text())
    del known["tokeniser"]
    (folder / "source.json").write_text(json.dumps(seal(known | {"digest": "another"}, "source.json")))
    capsys.readouterr()
    assert "earlier version split them in another" in refused(capsys, "resume", folder, "--env-steps", 500)


def test_a_vocabulary_that_is_not_where_it_was_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(generate(documents=90, vocabulary=30, topics=2, seed=0).corpus, tmp_path / "x.mtx", "matrix-market")
    words = "".join(f"word{v:02}\n" for v in range(30))
    (tmp_path / "words.txt").write_text(words)
    few = ("--topics", 2, "--launcher", "inline", "--passes", 1, "--out", "run")
    assert run("topics", "fit", "x.mtx", "--vocabulary", "words.txt", *few) == 0
    (tmp_path / "words.txt").rename("w.txt")
    of_world._read.cache_clear()
    capsys.readouterr()
    more = ("resume", "run", "--env-steps", 200)
    assert "--world.vocabulary NEW" in refused(capsys, *more)
    assert "murmurate resume DIR --world.vocabulary FILE" in refused(
        capsys, *more, "--world.vocabulary", "none"
    )
    assert run(*more, "--world.vocabulary", "w.txt") == 0


def test_a_replica_that_reads_another_corpus_is_refused(zoo):
    path, folder = zoo
    path.write_text("".join(ZOO * 5))
    with pytest.raises(Refusal, match="is not what the run was fitted on"):
        work(read_run(folder, recipe), WorkerContext(1, None, None, folder, 0.0))


def test_what_is_skipped_is_counted(capsys, tmp_path):
    path, folder = tmp_path / "zoo.txt", tmp_path / "run"
    path.write_bytes("".join(ZOO * 4).encode() + b"caf\xe9\n\n\n")
    found = {"not UTF-8": 1, "empty document": 2}
    few = ("--topics", 2, "--launcher", "inline", "--passes", 1, "--skip-bad")
    assert run("topics", "fit", path, *few, "--out", folder) == 0
    words = "skipped: 2 x empty document, 1 x not UTF-8; 3 documents are not in the corpus"
    assert words in capsys.readouterr().out
    assert summary(folder)["skipped"] == found
    assert [e["causes"] for e in summary(folder)["events"] if e["event"] == "skipped"] == [found]
    other = ("topics", "evaluate", folder, path, "--skip-bad")
    assert run(*other) == 0
    assert words in capsys.readouterr().out
    assert run(*other, "--json") == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == found
    assert run("topics", "evaluate", "--skip-bad", folder, path) == 0
    capsys.readouterr()
    for words in (("--skip-bad", "true"), ("--skip-bad=yes",)):  # as `topics fit` takes it
        assert run("topics", "evaluate", folder, path, *words, "--json") == 0
        assert json.loads(capsys.readouterr().out)["skipped"] == found
    assert run("topics", "evaluate", folder, path, "--skip-bad", "false") == 2
    assert "zoo.txt" in capsys.readouterr().err


def test_what_could_be_fitted_can_be_transformed(capsys, tmp_path, monkeypatch):
    """As the run read it, where it is the same file; as it is said, where it is another one."""
    drawn = generate(documents=90, vocabulary=30, topics=2, seed=0).corpus
    entries = np.repeat(np.arange(90), drawn.lengths), drawn.words, drawn.counts
    sideways = Corpus.from_entries(entries[1], entries[0], entries[2], shape=(30, 90))
    for name in ("x", "y"):
        write(sideways, tmp_path / f"{name}.mtx", "matrix-market")
    (tmp_path / "words.txt").write_text("".join(f"word{v:02}\n" for v in range(30)))
    told = ("--transpose", "--vocabulary", "words.txt", "--cache", "kept")
    monkeypatch.chdir(tmp_path)
    few = ("--topics", 2, "--launcher", "inline", "--passes", 1)
    assert run("topics", "fit", "x.mtx", *told, *few, "--out", "run") == 0
    monkeypatch.chdir("/")  # what was said there holds here
    of_world._read.cache_clear()
    assert run("resume", tmp_path / "run", "--env-steps", 100) == 0
    assert shown(capsys, tmp_path / "run")[0][0][0].startswith("word")
    monkeypatch.chdir(tmp_path)
    for name, options in (("x", ()), ("y", told)):
        assert run("topics", "transform", "run", f"{name}.mtx", *options, "--out", f"{name}.npz") == 0
        assert run("topics", "evaluate", "run", f"{name}.mtx", *options) == 0
        assert len(np.load(f"{name}.npz")["topics"]) == 90
    assert not list(tmp_path.glob("*.corpus"))
    capsys.readouterr()
    said = refused(capsys, "topics", "evaluate", "run", "y.mtx", "--vocabulary", "words.txt")
    assert "add --transpose" in said


@pytest.mark.parametrize(("word", "first"), [("true", 0), ("YES", 0), ("1", 0), ("False", 1), ("0", 1)])
def test_true_and_false_are_what_fit_takes_for_them(nameless, capsys, tmp_path, word, first):
    (tmp_path / "x.svm").write_text("7 1:9\n")
    told = ("--one-based", word, "--out", tmp_path / "w.npz")
    assert run("topics", "transform", nameless, tmp_path / "x.svm", *told) == 0
    words = np.load(tmp_path / "x.svm.corpus" / "words.npy")
    assert words.tolist() == [first]
    capsys.readouterr()
    said = refused(capsys, "topics", "evaluate", nameless, tmp_path / "x.svm", "--one-based", "Ja")
    assert "'Ja' is neither true nor false" in said


@pytest.fixture(scope="module")
def nameless(tmp_path_factory):
    """A run on word ids alone."""
    here = tmp_path_factory.mktemp("nameless")
    write(generate(documents=60, vocabulary=30, topics=2, seed=0).corpus, here / "x.npz", "npz")
    few = ("--topics", 2, "--launcher", "inline", "--passes", 1, "--out", here / "run")
    assert run("topics", "fit", here / "x.npz", *few) == 0
    return here / "run"


def test_a_place_that_cannot_be_written_is_refused(nameless, capsys, tmp_path):
    shown(capsys, nameless)
    (tmp_path / "w.npz").mkdir()
    x = nameless.parent / "x.npz"
    for arguments in (
        ("show", nameless, "--out", tmp_path / "no" / "page.html"),
        ("show", nameless, "--out", tmp_path),
        ("transform", nameless, x, "--out", tmp_path / "w.npz"),
    ):
        assert f"{arguments[-1]} cannot be written" in refused(capsys, "topics", *arguments)


def test_the_page_is_what_it_says_it_is(tmp_path, capsys, monkeypatch):
    """UTF-8, whatever the system writes by itself."""
    path, folder = tmp_path / "zoo.txt", tmp_path / "run"
    path.write_text("".join(ZOO * 4).replace("emu", "жук"), encoding="utf-8")
    few = ("--topics", 2, "--launcher", "inline", "--passes", 1, "--out", folder)
    assert run("topics", "fit", path, *few) == 0
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    shown(capsys, folder)
    page = (folder / "topics.html").read_bytes().decode("utf-8")
    assert "charset=utf-8" in page
    assert "жук" in page


def test_text_has_no_place_among_words_without_names(nameless, capsys, tmp_path):
    capsys.readouterr()
    (tmp_path / "x.txt").write_text("cat dog\ncat dog emu\n" * 20)
    for verb, *more in (("transform", "--out", tmp_path / "w.npz"), ("evaluate",)):
        said = refused(capsys, "topics", verb, nameless, tmp_path / "x.txt", *more)
        assert "without names of its 30 words" in said


def test_runs_from_before_the_stricter_bounds_go_on_with_their_own(tmp_path, capsys):
    """A run of format 5 stores 2 letters and 95%, also where its corpus is one of numbers."""
    made = generate(documents=60, vocabulary=20, topics=2, mean_length=20, seed=0).corpus
    write(made, tmp_path / "docword.x.txt", "uci")
    (tmp_path / "x.txt").write_text("".join(ZOO * 4).replace("ant", "ox"))
    few = ("--topics", 2, "--launcher", "inline", "--passes", 2)
    former = {"min_letters": 2, "max_df": 0.95}
    for name, words in (("docword.x.txt", None), ("x.txt", {"ox", "bee", "cow", "dog", "emu", "fox", "gnu"})):
        folder = tmp_path / f"run-{name}"
        options = () if words is None else ("--min-letters", 2, "--max-df", 0.95)
        assert run("topics", "fit", tmp_path / name, *few, *options, "--out", folder) == 0
        stored = json.loads((folder / "run.json").read_text()) | {"format": 5}
        stored["world"] = {
            k: v for k, v in stored["world"].items() if k not in ("bigrams", "column", "name_column")
        } | former
        (folder / "run.json").write_text(json.dumps(seal(stored, "run.json")))
        of_world._read.cache_clear()
        assert run("resume", folder, "--env-steps", 400) == 0
        assert summary(folder)["resume_exact"]
        if words is not None:
            found, _ = shown(capsys, folder)
            assert set(found[0]) == words
