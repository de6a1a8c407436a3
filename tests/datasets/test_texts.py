"""Text in Markdown, CSV and JSON lines, the names of documents, and pairs of words."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import math
import os

import numpy as np
import pytest

from murmurate.datasets import collocations
from murmurate.datasets._markdown import prose
from murmurate.datasets._record_errors import RecordErrors
from murmurate.datasets._texts import TextSource
from murmurate.datasets.reading import Skipped, detect_kind, read
from murmurate.datasets.tokens import Tokens
from murmurate.errors import Refusal

ALL = Tokens(min_letters=1, min_df=1, max_df=1.0)
PAGE = """---
title: hidden
---
# A *Heading*

Some `inline` [linked words](https://example.org/address) and ![a picture](x.png).
Next<br>line.

```python
code = hidden
```

    indented = hidden

<div class="hidden">hidden</div>

| left | right |
|---|---|
| cell | other |
"""


def counts(corpus) -> list[dict[str, int]]:
    rows = []
    for first, last in zip(corpus.starts[:-1], corpus.starts[1:], strict=True):
        words = [corpus.vocabulary[w] for w in corpus.words[first:last]]
        rows.append(dict(zip(words, corpus.counts[first:last].tolist(), strict=True)))
    return rows


def test_prose_of_markdown():
    words = " ".join(prose(PAGE).split())
    assert words == "A Heading Some inline linked words and a picture. Next line. left right cell other"
    assert prose("a<br/>b<BR />c<br class='wide'>d<wbr>e<b>f</b>") == "a b c def"
    assert prose("---\nno front matter, a rule above") == "no front matter, a rule above"
    assert prose("---\n---\nthe first\n\n---\nthe second") == "the first\nthe second"
    assert prose("---\n\nbetween rules\n\n---\n\nthe rest") == "between rules\nthe rest"
    for begin in ("", "\ufeff"):
        assert prose(f"{begin}---\r\ntitle: hello\r\n---\r\nbody\r\n") == "body"


def test_a_name_that_is_not_utf_8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("ant\n")
    assert counts(read(tmp_path, tokens=ALL)) == [{"ant": 1}]
    source = TextSource(tmp_path, "text")
    assert list(source.names()) == [source.pick([0])[0].name] == [r"caf\udce9.txt"]  # a table can hold it


def test_a_name_with_half_of_a_surrogate_pair(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(r'{"id": "r\ud83d", "text": "ant"}')
    assert list(TextSource(path, "jsonl", "text", "id").names()) == [r"r\ud83d"]


def test_only_files_that_can_be_seen_are_documents(tmp_path):
    (tmp_path / "page.md").write_text("ant\n")
    (tmp_path / "._page.md").write_bytes(b"\xff")
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "link.md").symlink_to(tmp_path / "none.md")
    (tmp_path / ".obsidian" / "plugins").mkdir(parents=True)
    (tmp_path / ".obsidian" / "plugins" / "README.md").write_text("bee\n")
    assert counts(read(tmp_path, tokens=ALL)) == [{"ant": 1}]
    assert list(TextSource(tmp_path, "markdown").names()) == ["page.md"]


def test_a_folder_that_may_not_be_listed_is_told(tmp_path, monkeypatch):
    listed = os.scandir

    def denied(path):
        if os.path.basename(path) == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listed(path)

    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.txt").write_text("ant\n")
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.warns(UserWarning, match="closed is left out: Permission denied"):
        assert list(TextSource(tmp_path, "text").names()) == ["open/page.txt"]


def test_a_folder_of_markdown(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.md").write_text("ant **bee**\n\n```\nhidden\n```\n")
    (tmp_path / "deep" / "a.markdown").write_text("bee bee\n")
    (tmp_path / "c.md").write_text("```\nhidden\n```\n")
    assert detect_kind(tmp_path) == "markdown"
    skipped = Skipped()
    assert counts(read(tmp_path, tokens=ALL, skipped=skipped)) == [{"ant": 1, "bee": 1}, {"bee": 2}]
    assert skipped.documents.tolist() == [1]
    source = TextSource(tmp_path, "markdown")
    assert list(source.names()) == ["b.md", "c.md", "deep/a.markdown"]
    assert source.pick([2])[2] == ("deep/a.markdown", "bee bee")
    (tmp_path / "d.md").write_text("cow")  # is noticed by the cache
    assert counts(read(tmp_path, tokens=ALL))[-2] == {"cow": 1}
    (tmp_path / "e.txt").write_text("*dog*")  # a folder with .txt files is read for these, as ever
    assert detect_kind(tmp_path) == "text"
    assert counts(read(tmp_path, tokens=ALL)) == [{"dog": 1}]
    assert len(read(tmp_path, tokens=ALL, kind="markdown")) == 4
    with pytest.raises(Refusal, match="is one document"):
        read(tmp_path / "b.md", kind="markdown")


def test_suffixes_of_documents_in_capitals(tmp_path):
    (tmp_path / "A.MD").write_text("ant")
    (tmp_path / "b.md").write_text("bee")
    assert counts(read(tmp_path, tokens=ALL)) == [{"ant": 1}, {"bee": 1}]
    (tmp_path / "C.TXT").write_text("*cow*")
    assert counts(read(tmp_path, tokens=ALL)) == [{"cow": 1}]
    assert TextSource(tmp_path, "markdown").pick([1])[1].text == "*cow*"  # plain text, not Markdown


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz", "jsonl", "jsonl.gz"])
def test_a_column(tmp_path, suffix):
    rows = [("x1", "ant, bee\nant"), ("x2", 'a "cow"'), ("x3", "bee" * 60_000)]
    path = tmp_path / f"papers.{suffix}"
    opened = gzip.open if suffix.endswith("gz") else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if "json" in suffix:
            file.write("\n".join(json.dumps({"id": i, "body": text}) for i, text in rows) + "\n\n")
        else:
            file.write("\ufeff")
            table = csv.writer(file, delimiter="\t" if suffix == "tsv" else ",")
            table.writerows([("id", "body"), *rows])
    made = read(path, column="body", tokens=ALL)
    assert counts(made) == [{"ant": 2, "bee": 1}, {"cow": 1}, {"bee" * 60_000: 1}]
    assert list(TextSource(path, detect_kind(path), "body", "id").names()) == ["x1", "x2", "x3"]
    assert TextSource(path, detect_kind(path), "body").pick([1]) == {1: ("1", 'a "cow"')}
    with pytest.raises(Refusal, match=r"has the columns id, body.*--column body"):
        read(path, tokens=ALL)
    with pytest.raises(Refusal, match=r"no column 'text'. Its columns: id, body. .*--column"):
        read(path, column="text", tokens=ALL)
    with pytest.raises(Refusal, match="name-column"):
        read(path, column="body", name_column="title", tokens=ALL)


def test_one_column_needs_no_name_and_only_kinds_with_columns_have_them(tmp_path):
    (tmp_path / "a.csv").write_text("text\nant\nbee\n")
    assert counts(read(tmp_path / "a.csv", tokens=ALL)) == [{"ant": 1}, {"bee": 1}]
    (tmp_path / "a.txt").write_text("ant\n")
    with pytest.raises(Refusal, match=r"--column .* is for corpora of kind csv or jsonl"):
        read(tmp_path / "a.txt", column="text")


@pytest.mark.parametrize(
    ("name", "content", "line", "detail"),
    [
        ("a.csv", b"id,body\n1,ant\n2\n3,bee\n", 3, "1 fields, and there are 2 columns"),
        ("a.csv", b"id,body\n1,ant\n2,  \n3,bee\n", 3, "column 'body' is empty"),
        ("a.csv", b"id,body\n1,ant\n2,\xff\n3,bee\n", 3, "byte 0xff is not UTF-8; iconv -f latin1 -t utf-8 "),
        ("a.csv", b'id,body\n1,ant\n2,bee\n3,"cat\n4,dog\n', 4, "a quote in it is not closed"),
        ("a.jsonl", b'{"body": "ant"}\n{"body": \n{"body": "bee"}\n', 2, "no JSON object"),
        ("a.jsonl", b'{"body": "ant"}\n{"body": 5}\n{"body": "bee"}\n', 2, "'5', which is no text"),
        ("a.jsonl", b'{"body": "ant"}\n{"id": "x"}\n{"body": "bee"}\n', 2, "column 'body' is empty"),
        ("a.jsonl", b'{"body": "ant"}\n["body"]\n{"body": "bee"}\n', 2, "no JSON object"),
        ("a.jsonl", b'{"body": "ant"}\n{"body": "\xff"}\n{"body": "bee"}\n', 2, "byte 0xff is not UTF-8"),
    ],
)
def test_errors_in_records_are_refused_or_left_out(tmp_path, name, content, line, detail):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(Refusal, match=f"line {line}: .*{detail}.*--skip-bad"):
        read(path, column="body", tokens=ALL)
    skipped = Skipped()
    made = read(path, column="body", tokens=ALL, skip_bad=True, skipped=skipped)
    assert counts(made) == [{"ant": 1}, {"bee": 1}]
    assert len(skipped.documents) == 1
    assert skipped.causes.total() == 1


def test_a_tsv_has_tabs_whatever_the_case_of_its_name(tmp_path):
    (tmp_path / "A.TSV").write_text("a,b,c\ttext\n1\tant\n2\tbee\n")
    assert counts(read(tmp_path / "A.TSV", column="text", tokens=ALL)) == [{"ant": 1}, {"bee": 1}]


def test_a_line_that_is_not_utf8_takes_no_other_row_with_it(tmp_path):
    """The quotes of a text of several lines, in one of which a byte is wrong."""
    for wrong, text in ((2, b'"caf\xe9\ncat"'), (3, b'"cat\ncaf\xe9"'), (3, b'"cat\ncaf\xe9\ncat"')):
        (tmp_path / "a.csv").write_bytes(b"id,body\n0," + text + b'\n1,ant\n2,"bee"\n')
        with pytest.raises(Refusal, match=f"line {wrong}: byte 0xe9 is not UTF-8"):
            read(tmp_path / "a.csv", column="body")
        skipped = Skipped()
        made = read(tmp_path / "a.csv", column="body", tokens=ALL, skip_bad=True, skipped=skipped)
        assert counts(made) == [{"ant": 1}, {"bee": 1}]
        assert (skipped.documents.tolist(), skipped.causes) == ([0], {"not UTF-8": 1})


def test_a_column_whose_name_others_have_too_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("id,text,,text,\n1,cat dog,,old,\n2,cat,,old,\n")
    with pytest.raises(Refusal, match=r"x.csv, line 1: 2 columns are called 'text'"):
        read(tmp_path / "x.csv", column="text")
    (tmp_path / "y.csv").write_text("text,,\ncat dog,,\ncat,,\n")
    assert counts(read(tmp_path / "y.csv", column="text", tokens=ALL)) == [{"cat": 1, "dog": 1}, {"cat": 1}]
    (tmp_path / "x.csv").write_text("text,text\ncat,dog\n")
    with pytest.raises(Refusal, match="2 columns are called 'text'"):
        read(tmp_path / "x.csv")


@pytest.mark.parametrize("bigrams", [False, True])
@pytest.mark.parametrize(("name", "content"), [("x.txt", ""), ("x.csv", "text\n"), ("x.jsonl", "\n")])
def test_a_file_without_documents_is_refused_as_such(tmp_path, name, content, bigrams):
    (tmp_path / name).write_text(content)
    with pytest.raises(Refusal, match=f"{name} has no documents"):
        read(tmp_path / name, bigrams=bigrams)


def test_texts_without_a_word_of_the_vocabulary_are_refused_as_such(tmp_path):
    (tmp_path / "x.txt").write_text("quartz zebra\nzebra\n")
    with pytest.raises(Refusal, match=r"No text in .*x.txt has one of the 2 words of the vocabulary"):
        read(tmp_path / "x.txt", vocabulary=["cat", "dog"])


def test_a_csv_without_a_header_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(Refusal, match="no header"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"id,text\r1,ant\r")  # lines as old Macs ended them
    with pytest.raises(Refusal, match="line 1: the header is no row of CSV"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text('"text\n(long)"\nant\n')  # a quoted name of two lines
    with pytest.raises(Refusal, match=r"line 1: the header is no row of CSV .*one line a row"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_header_that_is_not_utf8_cannot_be_skipped(tmp_path, skip_bad):
    (tmp_path / "a.csv").write_bytes("id,t\xe9xt\n1,ant\n".encode("latin1"))
    with pytest.raises(Refusal, match=r"line 1: byte 0xe9 is not UTF-8; iconv .*Latin-1. Convert the file"):
        read(tmp_path / "a.csv", column="id", skip_bad=skip_bad)


OTHERS = " ".join(chr(97 + i) * 3 + chr(97 + j) for i in range(26) for j in range(26))


# -- pairs of words -----------------------------------------------------------------------------------------


def oracle(texts: list[str], tokens: Tokens, least: int, npmi: float) -> set[str]:
    """By the definition, with probabilities."""
    words = [text.split() for text in texts]
    total = sum(map(len, words))
    found = set()
    for a in {w for text in words for w in text}:
        for b in {w for text in words for w in text}:
            both = sum(text[i : i + 2] == [a, b] for text in words for i in range(len(text)))
            if both < least or a == b or not (tokens.counts(a) and tokens.counts(b)):
                continue
            p, p_a, p_b = (n / total for n in (both, *(sum(text.count(w) for text in words) for w in (a, b))))
            if math.log(p / (p_a * p_b)) / -math.log(p) >= npmi:
                found.add(f"{a}_{b}")
    return found


@pytest.mark.parametrize("seed", range(5))
def test_collocations_are_pairs_with_a_high_npmi(seed, monkeypatch):
    random = np.random.default_rng(seed)
    frequent = random.choice(["new", "york", "the", "cow", "dog"], (30, 12), p=[0.1, 0.1, 0.3, 0.25, 0.25])
    texts = [" ".join(row).replace("new", "new york") for row in frequent]
    tokens = Tokens(stop_words=frozenset(["the"]))
    for least, npmi in ((5, 0.5), (3, 0.1), (5, 0.3)):
        monkeypatch.setattr(collocations, "_LEAST_COUNT", least)
        monkeypatch.setattr(collocations, "_LEAST_NPMI", npmi)
        found = collocations.find_collocations(texts, tokens)
        assert found == oracle(texts, tokens, least, npmi)
    assert "new_york" in found


def test_rare_pairs_are_forgotten_where_there_are_many(monkeypatch):
    monkeypatch.setattr(collocations, "_MOST_PAIRS", 50)
    letters = [chr(97 + i) * 3 for i in range(26)]
    texts = [" ".join(np.random.default_rng(i).permutation(letters)) + " new york" * 2 for i in range(20)]
    assert "new_york" in collocations.find_collocations(texts, ALL)


def test_bigrams_count_as_one_word_and_new_texts_are_counted_alike(tmp_path):
    texts = ["machine learning is fun", "deep machine learning", "the machine of learning", "fun fun machine"]
    path = tmp_path / "a.txt"
    path.write_text("\n".join([*texts * 5, OTHERS]) + "\n")
    tokens = Tokens(min_df=6, max_df=1.0)  # without "deep", which is in 5 documents
    made = read(path, tokens=tokens, bigrams=True)
    assert made.vocabulary == ("fun", "machine", "machine_learning")
    assert counts(made)[:4] == [
        {"machine_learning": 1, "fun": 1},
        {"machine_learning": 1},
        {"machine": 1},
        {"fun": 2, "machine": 1},
    ]
    again = read(path, vocabulary=made.vocabulary, bigrams=True)
    assert counts(again) == counts(made)
    # without the option a vocabulary's pair is a word that no text has
    with pytest.warns(UserWarning, match="1 of the 3 words"):
        assert counts(read(path, vocabulary=made.vocabulary))[0] == {"machine": 1, "fun": 1}


def test_a_pair_that_the_bounds_leave_out_leaves_its_words(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("new york\n" * 5 + "new\nyork\n" * 4 + OTHERS + "\n")
    made = read(path, tokens=Tokens(min_df=4, max_df=1.0), bigrams=True)
    assert made.vocabulary == ("new", "new_york", "york")
    made = read(path, tokens=Tokens(min_df=4, max_df=4), bigrams=True)  # the pair is in 5
    assert made.vocabulary == ("new", "york")
    assert counts(made)[0] == {"new": 1, "york": 1}


def test_documents_are_those_of_names(tmp_path):
    """Documents with errors keep their place."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "ant", "n": "one"}\n{"t": 3, "n": "two"}\n\n{"t": "bee", "n": "three"}\n')
    source = TextSource(path, "jsonl", "t", "n")
    documents = list(source.documents(RecordErrors(path, skip=True)))
    assert [d.name for d in documents] == list(source.names()) == ["one", "two", "three"]
    assert [d.text for d in documents] == ["ant", "", "bee"]
