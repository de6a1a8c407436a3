"""``murmurate topics`` on a user's own texts: names, columns and options, from a file to a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from topic_runs import run, summary

from murmurate.cli.topics_page import _excerpt
from short_runs import refused


def test_text_is_resumed_and_asked_with_the_words_it_was_begun_with(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zoo.txt").write_text("Hund und Katze und Maus\n" * 20 + "Stadt und Land\n" * 20)
    Path("mine.txt").write_text("und")
    said = ("--min-df", 1, "--max-df", 1.0, "--stop-words", "mine.txt", "--max-vocabulary", 4)
    inline = ("--topics", 2, "--batch", 8, "--validation", 4, "--launcher", "inline", "--out", "run")
    assert run("topics", "fit", "zoo.txt", *said, *inline, "--passes", 1) == 0
    monkeypatch.chdir("/")
    assert run("resume", tmp_path / "run", "--env-steps", 200) == 0
    capsys.readouterr()
    assert run("topics", "show", tmp_path / "run", "--json") == 0
    words = {one["word"] for row in json.loads(capsys.readouterr().out) for one in row["words"]}
    assert words == {"hund", "katze", "land", "maus"}
    assert run("topics", "evaluate", tmp_path / "run", tmp_path / "zoo.txt", "--json") == 0
    assert json.loads(capsys.readouterr().out)["test_documents"] == 40


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """The present folder, with a CSV of texts about two subjects."""
    monkeypatch.chdir(tmp_path)
    lines = ["id,stars,text"]
    for i in range(40):
        subject = "kettle boils water quickly" if i % 2 else "novel tells <b>moving</b> story"
        lines.append(f"r{i:02},5,{subject} number {chr(97 + i % 7)}{chr(97 + i % 5)}{chr(97 + i % 3)}")
    Path("reviews.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def reviews(texts):
    """The folder of a run on that file."""
    few = ("--topics", 2, "--alpha", 0.1, "--prior", 0.1, "--batch", 8, "--passes", 40, "--out", "run")
    named = ("--column", "text", "--name-column", "id")
    assert run("topics", "fit", "reviews.csv", *named, *few, "--launcher", "inline", "--seed", 2) == 0
    return texts / "run"


def test_a_csv_column_to_topics_of_named_documents(reviews, capsys):
    capsys.readouterr()
    assert run("topics", "transform", reviews, "reviews.csv", "--csv") == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["name", "document", "topic_0", "topic_1"]
    assert [row[:2] for row in rows[1:]] == [[f"r{i:02}", str(i)] for i in range(40)]
    likeliest = [float(row[2]) > 0.5 for row in rows[1:]]
    assert likeliest == [likeliest[0], likeliest[1]] * 20
    assert likeliest[0] != likeliest[1]

    Path("new.csv").write_text("text\nthe kettle boils\nnothing known\n")  # the run's column, and no names
    assert run("topics", "transform", reviews, "new.csv", "--out", "new.data", "--csv") == 0
    assert [line.split(",")[0] for line in Path("new.data").read_text().splitlines()] == ["document", "0"]
    assert "column document says" in capsys.readouterr().out
    assert run("topics", "transform", reviews, "new.csv", "--csv") == 0
    table, remark = capsys.readouterr()
    assert table == Path("new.data").read_text()
    assert "1 document is not in the corpus; the column document says" in remark
    assert run("topics", "transform", reviews, "reviews.csv", "--out", "w.npz") == 0
    with np.load("w.npz") as arrays:
        assert arrays["names"].tolist() == [f"r{i:02}" for i in range(40)]
        assert len(arrays["topics"]) == 40
    capsys.readouterr()
    assert "as in --out" in refused(capsys, "topics", "transform", reviews, "reviews.csv")


def test_the_page_has_a_map_documents_and_meanings(reviews, capsys):
    assert run("topics", "show", reviews, "--samples", 2, "--json") == 0
    topics = json.loads(capsys.readouterr().out.splitlines()[-1])
    for row in topics:
        assert len(row["documents"]) == 2
        assert all(row["words"][0]["word"] in d["text"] for d in row["documents"])
        assert all(d["name"].startswith("r") for d in row["documents"])
    page = (reviews / "topics.html").read_text()
    assert page.count("<circle") == 2
    assert "&lt;b&gt;moving" in page
    assert "<b>moving" not in page
    assert "Lower is better" in page
    assert run("topics", "show", reviews, "--samples", 0) == 0
    assert "<h3>Documents" not in (reviews / "topics.html").read_text()


def test_documents_without_names_have_their_numbers_in_the_file(texts, capsys):
    few = ("--topics", 2, "--batch", 8, "--passes", 3, "--launcher", "inline", "--out", "run")
    assert run("topics", "fit", "reviews.csv", "--column", "text", *few) == 0
    assert run("topics", "show", "run", "--samples", 1, "--json") == 0
    topics = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = Path("reviews.csv").read_text().splitlines()[1:]
    for (document,) in (row["documents"] for row in topics):
        word, number = document["name"].split()
        assert word == "document"
        assert document["text"] in lines[int(number)]  # as `transform` and pandas number them


def test_texts_with_half_of_a_surrogate_pair_are_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{word} \ud83d"}) for word in ("kettle", "novel") * 10]
    Path("chat.jsonl").write_text("\n".join(lines) + "\n")
    few = ("--topics", 2, "--batch", 8, "--passes", 1, "--launcher", "inline", "--out", "run")
    assert run("topics", "fit", "chat.jsonl", *few) == 0
    assert run("topics", "show", "run") == 0
    assert "kettle ?" in Path("run/topics.html").read_text()


def test_an_excerpt_of_a_text_without_spaces_has_its_first_letters():
    assert _excerpt("  a few\nwords ") == "a few words"
    assert _excerpt("word " * 100).endswith("word word ...")
    assert _excerpt("x" * 300) == "x" * 220 + " ..."


def test_figures_are_explained(reviews, capsys):
    capsys.readouterr()
    assert run("topics", "evaluate", reviews) == 0
    said = capsys.readouterr().out
    assert "if nothing was learned" in said
    assert "so with few of them it has many digits" in said


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--topics", 0), "--topics is 0"),
        (("--batch", "x"), "--batch takes integer"),
        (("--min-letters", 0), "--min-letters is 0"),
        (("--validation", 0.9, "--test", 0.5), "Use a smaller --validation and --test"),
        (("--column", "body"), "no column 'body'. Its columns: id, stars, text"),
        (("--max-df", 1), "Lower --min-df, raise --max-df"),
        (("--passes", 0), "--passes"),
    ],
)
def test_errors_name_options_as_they_were_typed(capsys, options, words):
    said = refused(capsys, "topics", "fit", "reviews.csv", "--column", "text", *options, "--out", "other")
    assert words in said
    assert "agent." not in said
    assert "world." not in said


def test_markdown_beside_text_files_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pages").mkdir()
    for name in ("a.txt", "b.txt", "c.md"):
        Path("pages", name).write_text("ant bee\n")
    few = ("--max-df", 1.0, "--topics", 1, "--updates", 1, "--launcher", "inline", "--out", "run")
    with pytest.warns(UserWarning, match="1 Markdown files in .* are left out.*--kind markdown"):
        run("topics", "fit", "pages", "--validation", 0, "--test", 0, *few)


def test_a_small_corpus_is_gone_through_more_often(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("few.txt").write_text("ant bee\nant cow\nbee cow\n" * 4)
    few = (
        "--topics",
        2,
        "--batch",
        4,
        "--max-df",
        1.0,
        "--validation",
        0,
        "--test",
        0,
        "--launcher",
        "inline",
    )
    assert run("topics", "fit", "few.txt", *few, "--out", "run") == 0
    assert summary(Path("run"))["updates"] == 60  # of 4 documents, in 20 passes through 12
