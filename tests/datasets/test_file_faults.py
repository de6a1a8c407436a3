"""What is wrong in a file is refused with file and line, or skipped and counted."""

from __future__ import annotations

import gzip
import re

import numpy as np
import pytest

from drawn import dense, same
from murmurate.datasets import _lines
from murmurate.datasets.generated import generate
from murmurate.datasets.reading import Skipped, read
from murmurate.datasets.writing import write
from murmurate.errors import Refusal

HEAD = "4\n5\n6\n"
GOOD = ["1 1 2", "1 5 1", "2 2 3", "3 1 1", "4 3 7", "4 4 2"]
MM = "%%MatrixMarket matrix coordinate real general\n4 5 6\n"
LDA = ["2 0:2 4:1", "1 1:3", "1 0:1", "2 2:7 3:2"]
SVM = ["0 1:2 5:1", "0 2:3", "0 1:1", "0 3:7 4:2"]


def with_line(lines, index, text):
    return "\n".join([*lines[:index], text, *lines[index + 1 :]]) + "\n"


# (bad line, cause, words of the refusal)
TRIPLES = [
    ("2 2", "malformed line", "'2 2' is not 'document word count'"),
    ("2 2 3 4", "malformed line", "is not 'document word count'"),
    ("2;2;3", "malformed line", "is not"),
    ("2 two 3", "malformed line", "is not"),
    ("2 2 three", "malformed line", "'three' is no count"),
    ("2 1_0 3", "malformed line", "is not"),
    ("2 2 nan", "count of zero or below", "1 or more"),
    ("2 2 inf", "count too large", "largest"),
    ("2 2 -3", "count of zero or below", "-3"),
    ("2 2 0", "count of zero or below", "1 or more"),
    ("2 2 0.37", "fractional count", "tf-idf"),
    ("2 2 99999999999", "count too large", "largest is 2147483647"),
    ("2 6 3", "word out of range", "word 6 is not in 1..5"),
    ("2 0 3", "word out of range", "word 0 is not in 1..5"),
    ("2 99999999999 3", "word out of range", "word 99999999999"),
    ("5 2 3", "document out of range", "document 5 is not in 1..4"),
    ("0 2 3", "document out of range", "document 0 is not in 1..4"),
    ("-2 2 3", "document out of range", "document -2"),
]


@pytest.mark.parametrize(("line", "cause", "words"), TRIPLES)
@pytest.mark.parametrize("kind", ["uci", "matrix-market"])
def test_entries(tmp_path, kind, line, cause, words):
    head = HEAD if kind == "uci" else MM
    path = tmp_path / "x.txt"
    path.write_text(head + with_line(GOOD, 2, line))
    number = head.count("\n") + 3
    with pytest.raises(
        Refusal, match=f"^{re.escape(str(path))}, line {number}: .*{re.escape(words)}.*skip_bad"
    ):
        read(path, kind=kind)
    skipped = Skipped()
    made = read(path, kind=kind, skip_bad=True, skipped=skipped)
    assert dense(made).tolist() == [[2, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 7, 2, 0]]
    assert skipped.causes == {cause: 1}
    assert skipped.documents.tolist() == [1]
    assert f"1 x {cause}" in str(skipped)


PAIRS = [
    ("1 1:", "malformed line", "'' is no count"),
    ("1 1 3", "malformed line", "'1' is not 'word:count'"),
    ("1 a:3", "malformed line", "is not 'word:count'"),
    ("1 1:3:4", "malformed line", "'3:4' is no count"),
    ("1 1:-3", "count of zero or below", "-3"),
    ("1 1:0", "count of zero or below", "1 or more"),
    ("1 1:0.5", "fractional count", "tf-idf"),
    ("1 7:3", "word out of range", "word 7 is not in"),
    ("1 -1:3", "word out of range", "word -1"),
    ("0", "empty document", "empty"),
    ("", "empty document", "empty"),
]


@pytest.mark.parametrize(
    ("kind", "line", "cause", "words"),
    [(kind, *row) for kind in ("lda-c", "svmlight") for row in PAIRS]
    + [
        ("lda-c", "3 1:3", "malformed line", "3 words are promised, and 1 are there"),
        ("lda-c", "one 1:3", "malformed line", "'one' is not the number of words"),
        ("svmlight", "one 1:3", "malformed line", "'one' is no label"),
        ("svmlight", "1 0:3", "word out of range", "--one-based false"),
    ],
)
def test_documents_of_pairs(tmp_path, kind, line, cause, words):
    path = tmp_path / "x.dat"
    path.write_text(with_line(LDA if kind == "lda-c" else SVM, 1, line))
    options = {"kind": kind, "vocabulary_size": 5, **({"one_based": True} if kind == "svmlight" else {})}
    with pytest.raises(Refusal, match=f"^{re.escape(str(path))}, line 2: .*{re.escape(words)}"):
        read(path, **options)
    skipped = Skipped()
    made = read(path, skip_bad=True, skipped=skipped, **options)
    assert dense(made).tolist() == [[2, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 7, 2, 0]]
    assert skipped.causes == {cause: 1}
    assert skipped.documents.tolist() == [1]


@pytest.mark.parametrize("kind", ["uci", "lda-c"])
def test_the_line_is_found_in_a_large_file(tmp_path, kind, monkeypatch):
    """Far behind the first chunk, and several in one file."""
    monkeypatch.setattr(_lines, "CHUNK_BYTES", 5000)
    made = generate(400, 300, 5, 60, seed=0).corpus
    write(made, tmp_path / "docword.x.txt", kind)
    lines = (tmp_path / "docword.x.txt").read_text().split("\n")[:-1]
    wrong = {n: lines[n] for n in (390, 301, 120)}
    options = {"kind": kind, **({"vocabulary_size": 300} if kind == "lda-c" else {})}
    for number in wrong:
        lines[number] += "x"
        (tmp_path / "docword.x.txt").write_text("\n".join(lines))
        with pytest.raises(Refusal, match=f"line {number + 1}:"):
            read(tmp_path / "docword.x.txt", **options)
    skipped = Skipped()
    rest = read(tmp_path / "docword.x.txt", skip_bad=True, skipped=skipped, **options)
    assert skipped.causes == {"malformed line": 3}
    if kind == "lda-c":
        assert skipped.documents.tolist() == [120, 301, 390]
        assert same(rest, made.select(np.setdiff1d(np.arange(400), skipped.documents)))
    else:
        assert rest.tokens == made.tokens - sum(int(line.split()[2]) for line in wrong.values())


@pytest.mark.parametrize("kind", ["uci", "matrix-market"])
def test_a_header_that_promises_other_than_there_is(tmp_path, kind):
    head = HEAD if kind == "uci" else MM
    path = tmp_path / "x.txt"
    for lines, words, cause in (
        (GOOD[:4], "promises 6 entries, and there are only 4", "entries that the header promises"),
        ([*GOOD, "4 5 1"], "promises 6 entries, and there are 7", "entries that the header does not have"),
    ):
        path.write_text(head + "\n".join(lines) + "\n")
        number = head.count("\n") + len(lines)
        with pytest.raises(Refusal, match=f"line {number}: the header {words}"):
            read(path, kind=kind)
        skipped = Skipped()
        made = read(path, kind=kind, skip_bad=True, skipped=skipped)
        assert len(made.words) == len(lines)
        assert skipped.causes == {cause: abs(6 - len(lines))}


def test_documents_without_words_do_not_count_as_documents_with_words(tmp_path):
    (tmp_path / "docword.x.txt").write_text("11000000\n5\n3\n1 1 1\n10999999 1 1\n11000000 1 1\n")
    with pytest.raises(Refusal, match="11,000,000 documents, and only 3 of them have words"):
        read(tmp_path / "docword.x.txt")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("4\nfive\n6\n", 2, "'five' where the number of words"),
        ("4\n5\n1 1 1\n", 3, "number of entries"),
        ("4\n", 1, "the file ends where"),
        ("", 1, "the file ends where"),
        ("-4\n5\n6\n", 1, "number of documents"),
        ("4\n3000000000\n6\n", 3, "At most"),
    ],
)
def test_headers_of_uci(tmp_path, text, line, words):
    (tmp_path / "docword.x.txt").write_text(text)
    for skip in (False, True):
        with pytest.raises(Refusal, match=f"line {line}: .*{words}"):
            read(tmp_path / "docword.x.txt", skip_bad=skip)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("4 5 6\n1 1 1\n", 1, "banner"),
        ("%%MatrixMarket matrix array real general\n4 5\n", 1, "dense"),
        ("%%MatrixMarket matrix coordinate pattern general\n4 5 6\n", 1, "holds no counts"),
        ("%%MatrixMarket matrix coordinate real symmetric\n4 4 6\n", 1, "holds no counts"),
        ("%%MatrixMarket matrix coordinate real general\n% x\n4 5\n", 3, "'4 5' is not"),
    ],
)
def test_headers_of_matrix_market(tmp_path, text, line, words):
    (tmp_path / "x.mtx").write_text(text)
    with pytest.raises(Refusal, match=f"line {line}: .*{words}"):
        read(tmp_path / "x.mtx")


@pytest.mark.parametrize("damage", ["cut", "corrupt"])
def test_a_gzip_that_ends_too_early_says_how_far_it_got(tmp_path, damage, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK_BYTES", 1000)
    made = generate(200, 300, 5, 60, seed=0).corpus
    path = tmp_path / "docword.x.txt.gz"
    write(made, path, "uci")
    data = bytearray(path.read_bytes())
    text = gzip.decompress(bytes(data)).split(b"\n")
    if damage == "cut":
        data = data[: len(data) // 2]
    else:
        data[-5] ^= 255  # of the length at its end: all lines can be read
    path.write_bytes(data)
    with pytest.raises(Refusal, match=r"line \d+: the gzip is .* after [\d,]+ complete lines") as refusal:
        read(path)
    lines = int(re.search(r"line (\d+):", str(refusal.value))[1])
    assert lines > len(text) // 3
    skipped = Skipped()
    rest = read(path, skip_bad=True, skipped=skipped)
    assert len(rest.words) == lines - 3
    assert same(rest.select(range(len(rest) - 1)), made.select(range(len(rest) - 1)))
    assert skipped.causes["gzip cut short"] == 1
    assert skipped.causes["entries that the header promises"] == len(made.words) - len(rest.words)


def test_a_gzip_cut_in_its_header_is_refused(tmp_path):
    path = tmp_path / "docword.x.txt.gz"
    path.write_bytes(gzip.compress(b"4\n5\n6\n")[:12])
    with pytest.raises(Refusal, match=r"line 1: .*cut short after 0 complete lines"):
        read(path, skip_bad=True)


def test_bytes_of_the_header_count(tmp_path):
    path, text = tmp_path / "docword.x.txt.gz", (HEAD + GOOD[0] + "\n").encode()
    path.write_bytes(gzip.compress(text) + gzip.compress(b"2")[:9])
    with pytest.raises(Refusal, match=rf"after 4 complete lines \({len(text)} bytes of text\)"):
        read(path)


def test_vocabularies(tmp_path):
    path = tmp_path / "docword.x.txt"
    path.write_text(HEAD + "\n".join(GOOD) + "\n")
    beside = tmp_path / "vocab.x.txt"
    for content, words in (
        (b"a\nb\nc\n", "has 5 words, and .*vocab.x.txt has 3"),
        (b"a\n\nc\nd\ne\n", "vocab.x.txt, line 2: there is no word"),
        (b"a\nb\n\xff\nd\ne\n", "vocab.x.txt, line 3: .* is not UTF-8"),
        (b"a\nb\nc\nb\ne\n", "vocab.x.txt, line 4: 'b' is in line 2 too"),
        (b"a\r\nb\r\nc\r\nd\r\na\n", "vocab.x.txt, line 5: 'a' is in line 1 too"),
        (b"", "has no words"),
    ):
        beside.write_bytes(content)
        with pytest.raises(Refusal, match=words):
            read(path)
    beside.write_bytes(b"\xef\xbb\xbfa\nb\nc\nd\n\xef\xbb\xbfe\n")
    assert read(path).vocabulary == ("a", "b", "c", "d", "\ufeffe")  # a mark is one at the beginning alone
    beside.unlink()
    with pytest.raises(Refusal, match=r"gone.txt cannot be read"):
        read(path, vocabulary=tmp_path / "gone.txt")
    with pytest.raises(Refusal, match="the given vocabulary has 1"):
        read(path, vocabulary=["a"])
    with pytest.raises(Refusal, match="The given vocabulary has 'b' twice"):
        read(path, vocabulary=["a", "b", "c", "b", "e"])
    (tmp_path / "x.ldac").write_text("1 2:1\n")
    with pytest.raises(Refusal, match=r"line 1: word 2 is not in 0..1"):
        read(tmp_path / "x.ldac", vocabulary=["a", "b"])


def matrix(path, counts, columns=(0, 1, 0), **changes):
    parts = {"indices": np.array(columns), "indptr": [0, 2, 3], "data": np.array(counts), "shape": (2, 3)}
    np.savez(path, **{**parts, "format": np.array(b"csr"), **changes})
    return path


@pytest.mark.parametrize(
    ("counts", "columns", "cause", "words"),
    [
        ([1, 1, 0.5], (0, 1, 0), "fractional count", r"document 1 \(from 0\): .*0.5.*tf-idf"),
        ([1, 1, -2], (0, 1, 0), "count of zero or below", "has -2"),
        ([1, 1, float("nan")], (0, 1, 0), "count of zero or below", "nan"),
        ([1, 1, 2.0**40], (0, 1, 0), "count too large", "too large"),
        ([1, 1, 1], (0, 1, 3), "word out of range", "word 3"),
    ],
)
def test_matrices(tmp_path, counts, columns, cause, words):
    path = matrix(tmp_path / "x.npz", counts, columns)
    with pytest.raises(Refusal, match=words):
        read(path)
    skipped = Skipped()
    assert dense(read(path, skip_bad=True, skipped=skipped)).tolist() == [[1, 1, 0]]
    assert skipped.causes == {cause: 1}
    assert skipped.documents.tolist() == [1]


TWICE = 2**30
SUMS = {  # document 1, word 2 (from 0) twice, with 2^30 each
    "uci": f"3\n4\n5\n1 1 2\n2 3 {TWICE}\n2 4 1\n2 3 {TWICE}\n3 2 1\n",
    "uci, in no order": f"3\n4\n5\n2 3 {TWICE}\n3 2 1\n2 4 1\n1 1 2\n2 3 {TWICE}\n",
    "lda-c": f"1 0:2\n3 2:{TWICE} 3:1 2:{TWICE}\n1 1:1\n",
    "svmlight": f"0 0:2\n0 2:{TWICE} 3:1 2:{TWICE}\n0 1:1\n",
    "npz": None,
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_without_room(tmp_path, name):
    path, text, kind = tmp_path / "x", SUMS[name], name.partition(",")[0]
    if text is None:
        entries = {"row": [0, 1, 1, 1, 2], "col": [0, 2, 3, 2, 1]}
        matrix(path, [2, TWICE, 1, TWICE, 1], format=np.array(b"coo"), shape=(3, 4), **entries)
        path.with_name("x.npz").rename(path)
    else:
        path.write_text(text)
    options = {"kind": kind, **({"one_based": False} if kind == "svmlight" else {})}
    words = rf"^{re.escape(str(path))}, document 1 \(from 0\): word 2 \(from 0\) is there {2 * TWICE} times"
    with pytest.raises(Refusal, match=words):
        read(path, **options)
    skipped = Skipped()
    made = read(path, skip_bad=True, skipped=skipped, **options)
    assert dense(made).tolist() == [[2, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert skipped.causes == {"count too large": 1}


def test_stored_zeros_are_no_fault_of_a_matrix(tmp_path):
    skipped = Skipped()
    assert len(read(matrix(tmp_path / "x.npz", [1, 1, 0]), skipped=skipped)) == 1
    assert not skipped.causes
    assert skipped.documents.tolist() == [1]


def test_files_that_are_no_matrix(tmp_path):
    path = matrix(tmp_path / "x.npz", [1, 1, 1])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(Refusal, match="cut short"):
        read(path)
    with pytest.raises(Refusal, match="csr: save_npz"):
        read(matrix(path, [1, 1, 1], format=np.array(b"bsr")))
    with pytest.raises(Refusal, match="save_npz"):
        read(matrix(path, [1, 1, 1], indptr=[0, 2, 9]))
    coo = {"format": np.array(b"coo"), "row": [0, 1, 1], "col": [0, 1, 2]}
    for short in ({"row": [0]}, {"col": [0, 1]}, {"data": [1]}):
        with pytest.raises(Refusal, match=r"rows, \d columns and \d counts.*save_npz"):
            read(matrix(path, [1, 1, 1], **{**coo, **short}))
    with pytest.raises(Refusal, match="rise from 0"):
        read(matrix(path, [1, 1, 1], indptr=[1, 2, 4]))
    with pytest.raises(Refusal, match=r"counts of type <U1. Save real numbers"):
        read(matrix(path, ["a", "b", "c"]))
    with pytest.raises(Refusal, match=r"documents or words can be read. Split it"):
        read(matrix(path, [1, 1, 1], shape=(2, 1 << 40)))


def test_text(tmp_path):
    folder = tmp_path / "zoo"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"cat dog\n")
    (folder / "b.txt").write_bytes(b"dog\ncaf\xe9\n")
    (folder / "c.txt").write_bytes(b" \n")
    (folder / "d.txt").write_bytes(b"dog cat\n")
    with pytest.raises(
        Refusal, match=r"zoo, b.txt, line 2: byte 0xe9 is not UTF-8; iconv -f latin1 -t utf-8"
    ):
        read(folder)
    (tmp_path / "wide.txt").write_bytes("cat dog\n".encode("utf-16"))
    with pytest.raises(Refusal, match=r"wide.txt, line 1: .* iconv -f utf-16 -t utf-8"):
        read(tmp_path / "wide.txt")
    (tmp_path / "zoo.txt").write_bytes(b"cat dog\n\ndog cat\ncat emu\n")
    with pytest.raises(Refusal, match=r"zoo.txt, line 2: the document is empty"):
        read(tmp_path / "zoo.txt")
    skipped = Skipped()
    made = read(folder, skip_bad=True, skipped=skipped, vocabulary=["cat", "dog"])
    assert dense(made).tolist() == [[1, 1], [1, 1]]
    assert skipped.causes == {"not UTF-8": 1, "empty document": 1}
    assert skipped.documents.tolist() == [1, 2]


def test_a_corpus_of_nothing_is_refused(tmp_path):
    (tmp_path / "docword.x.txt").write_text("3\n4\n0\n")
    with pytest.raises(Refusal, match="has no document with a word"):
        read(tmp_path / "docword.x.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["docword.x.txt"]
    (tmp_path / "zoo.txt").write_text("cat dog\ndog\n")
    with pytest.raises(Refusal, match=r"has one of the 1 words of the vocabulary\. Check"):
        read(tmp_path / "zoo.txt", vocabulary=["newt"])


def test_a_path_that_the_system_does_not_take_is_refused(tmp_path):
    with pytest.raises(Refusal, match="cannot be read: File name too long"):
        read(tmp_path / ("x" * 300))


def test_options_that_the_kind_does_not_have(tmp_path):
    path = tmp_path / "docword.x.txt"
    path.write_text(HEAD + "\n".join(GOOD) + "\n")
    for option in ({"transpose": True}, {"one_based": False}, {"vocabulary_size": 3}):
        with pytest.raises(Refusal, match=f"{next(iter(option))}= in Python.* is for corpora of kind"):
            read(path, **option)
    with pytest.raises(Refusal, match="one_based=True or one_based=False"):
        read(path, kind="svmlight")
    with pytest.raises(Refusal, match="no kind of corpus called 'parquet'"):
        read(path, kind="parquet")
    with pytest.raises(Refusal, match="is a folder"):
        read(tmp_path, kind="uci")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match=r"without \.txt"):
        read(tmp_path / "empty")
    with pytest.raises(Refusal, match="There is no"):
        read(tmp_path / "gone")
