"""Every format by hand, and what is written comes back."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn import check, corpora, corpus, count, dense, same
from murmurate.datasets import _corpus_writer, _lines
from murmurate.datasets._format_detection import detect_kind
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.reading import Skipped, read
from murmurate.datasets.tokens import Tokens
from murmurate.datasets.writing import write
from murmurate.errors import Refusal

TABLE = [[2, 0, 0, 1], [0, 0, 12, 0], [1, 1, 0, 0]]
UCI = "3\n4\n5\n1 1 2\n1 4 1\n2 3 12\n3 1 1\n3 2 1\n"
WORDS = "ant\nbee\ncow\ndog\n"
FILES = {
    "docword.zoo.txt": UCI,
    "zoo.mtx": "%%MatrixMarket matrix coordinate integer general\n% a remark\n3 4 5\n" + UCI[6:],
    "zoo.mm": "%%MatrixMarket matrix coordinate real general\n3 4 5\n1 1 2.0\n1 4 1\n2 3 1.2e1\n3 1 1.\n"
    "3 2 1\n",
    "zoo.dat": "2 0:2 3:1\n1 2:12\n2 0:1 1:1\n",
    "zoo.svm": "1 1:2 4:1\n-1 3:12 # remark\n0.5 1:1.0 2:1\n",
}
OPTIONS = {
    "zoo.dat": {"vocabulary_size": 4},
    "zoo.svm": {"vocabulary_size": 4, "one_based": True},
}
KIND = {
    "docword.zoo.txt": "uci",
    "zoo.mtx": "matrix-market",
    "zoo.mm": "matrix-market",
    "zoo.dat": "lda-c",
    "zoo.svm": "svmlight",
}
KINDS = ["uci", "matrix-market", "lda-c", "svmlight", "npz"]


def options(kind, made):
    """What a reader has to be told of a written file."""
    needs_size = kind in ("lda-c", "svmlight") and made.vocabulary is None
    size = {"vocabulary_size": made.vocabulary_size} if needs_size else {}
    return {"kind": kind, **size, **({"one_based": True} if kind == "svmlight" else {})}


def put(path, text):
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", FILES)
def test_each_format_by_hand(tmp_path, name, packed):
    path = put(tmp_path / (name + packed), FILES[name])
    skipped = Skipped()
    made = read(path, skipped=skipped, **OPTIONS.get(name, {}))
    check(made)
    assert detect_kind(path) == KIND[name]
    assert dense(made).tolist() == TABLE
    assert made.vocabulary is None
    assert not skipped.causes
    assert not len(skipped.documents)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("crlf", UCI.replace("\n", "\r\n")),
        ("padded", UCI.replace("1 4 1\n", "  1\t4   1 \n")),
        ("blank lines", UCI.replace("2 3 12\n", "\n2 3 12\n\n") + "\n"),
        ("no end", UCI[:-1]),
        ("words in any order", UCI.replace("1 1 2\n1 4 1\n", "1 4 1\n1 1 2\n")),
        ("documents in any order", UCI.replace("1 1 2\n", "") + "1 1 2\n"),
        ("a pair twice", UCI.replace("5\n1 1 2\n", "6\n1 1 1\n1 1 1\n")),
        ("signs and zeros", UCI.replace("2 3 12\n", "+2 03 0012\n")),
        ("a count as a real", UCI.replace("2 3 12\n", "2 3 12.0\n")),
    ],
)
def test_uci_as_others_write_it(tmp_path, change, text):
    made = read(put(tmp_path / "docword.x.txt", text))
    check(made)
    assert dense(made).tolist() == TABLE


def test_documents_without_a_line_are_told(tmp_path):
    text = "6\n4\n5\n2 1 2\n2 4 1\n4 3 12\n6 1 1\n6 2 1\n"
    skipped = Skipped()
    made = read(put(tmp_path / "docword.x.txt", text), skipped=skipped)
    assert dense(made).tolist() == TABLE
    assert skipped.documents.tolist() == [0, 2, 4]
    assert str(skipped) == "3 documents are not in the corpus"
    skipped.documents = skipped.documents[:1]
    assert str(skipped) == "1 document is not in the corpus"


def test_the_vocabulary_beside_is_found(tmp_path):
    for name in ("docword.zoo.txt.gz", "zoo.mtx", "zoo.dat"):
        path = put(tmp_path / name, FILES[name.removesuffix(".gz")])
        beside = "vocab.zoo.txt" if "docword" in name else f"{name}.vocab.txt"
        put(tmp_path / beside, WORDS.replace("\n", "\r\n") if name == "zoo.mtx" else WORDS)
        assert read(path).vocabulary == ("ant", "bee", "cow", "dog")
    (tmp_path / "vocab.zoo.txt").unlink()
    assert read(tmp_path / "docword.zoo.txt.gz").vocabulary is None
    assert read(tmp_path / "docword.zoo.txt.gz", vocabulary=["a", "b", "c", "d"]).vocabulary == (
        "a",
        "b",
        "c",
        "d",
    )


def test_words_of_a_corpus_that_was_there_before_are_not_those_of_another(tmp_path):
    path = tmp_path / "x.mtx"
    named = Corpus.from_entries([0], [0], [2.0], shape=(1, 2), vocabulary=("ant", "bee"))
    write(named, path, "matrix-market")
    assert read(path).vocabulary == ("ant", "bee")
    unnamed = Corpus.from_entries([0], [1], [3.0], shape=(1, 2))
    with pytest.raises(Refusal, match=r"x.mtx.vocab.txt would be read as the vocabulary.*Remove it"):
        write(unnamed, path, "matrix-market")
    write(unnamed, tmp_path / "y.mtx", "matrix-market")
    assert read(tmp_path / "y.mtx").vocabulary is None


def test_counts_that_scipy_writes_as_unsigned(tmp_path):
    put(tmp_path / "x.mtx", "%%MatrixMarket matrix coordinate unsigned-integer general\n1 2 1\n1 2 3\n")
    assert read(tmp_path / "x.mtx").tokens == 3


def test_the_other_way_round(tmp_path):
    lines = [
        "%%MatrixMarket matrix coordinate integer general",
        "4 3 5",
        "1 1 2",
        "1 3 1",
        "2 3 1",
        "3 2 12",
        "4 1 1",
    ]
    path = put(tmp_path / "x.mtx", "\n".join(lines) + "\n")
    assert dense(read(path, transpose=True)).tolist() == TABLE
    put(tmp_path / "x.mtx.vocab.txt", WORDS)
    with pytest.raises(Refusal, match="add --transpose"):
        read(path)
    assert read(path, transpose=True).vocabulary == ("ant", "bee", "cow", "dog")
    right = put(tmp_path / "zoo.mtx", FILES["zoo.mtx"])
    put(tmp_path / "zoo.mtx.vocab.txt", WORDS)
    with pytest.raises(Refusal, match="leave out --transpose"):
        read(right, transpose=True)


@pytest.mark.parametrize(
    ("text", "one_based", "table"),
    [
        ("1 qid:3 1:2 3:1\n2 qid:3 2:1\n", False, [[0, 2, 0, 1], [0, 0, 1, 0]]),
        ("1,2 1:2 3:1\n2 2:1\n", True, [[2, 0, 1], [0, 1, 0]]),
        ("# all\n+1 0:1\n", False, [[1]]),
        ("# all\r\n#\r\n\t# of\n1 0:1 # it\n#\n1 1:2\n # end", False, [[1, 0], [0, 2]]),
    ],
)
def test_svmlight_as_others_write_it(tmp_path, text, one_based, table):
    path = put(tmp_path / "x.svmlight", text)
    assert dense(read(path, one_based=one_based)).tolist() == table


def test_remarks_are_no_documents_but_lines(tmp_path):
    path = put(tmp_path / "x.svm", "# a\n1 0:1\n# b\n# c\n1 # no word\n# d\n\n1 1:1\n")
    with pytest.raises(Refusal, match="line 5: the document is empty"):
        read(path, one_based=False)
    skipped = Skipped()
    read(path, one_based=False, skip_bad=True, skipped=skipped)
    assert skipped.causes == {"empty document": 2}
    assert skipped.documents.tolist() == [1, 2]


@given(made=corpora())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_comes_back(tmp_path_factory, kind, made):
    folder = tmp_path_factory.mktemp("written")
    for name in ("x", "docword.x.txt.gz"):
        if kind != "npz" or name == "x":
            write(made, folder / name, kind)
            assert same(read(folder / name, **options(kind, made)), made)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_comes_back_through_small_chunks(tmp_path, kind, monkeypatch):
    """Documents, lines and compressed blocks that go across the edges of chunks."""
    made = corpus(7, documents=300, vocabulary=40)
    for bytes_ in (1, 50, 999):
        monkeypatch.setattr(_lines, "CHUNK_BYTES", bytes_)
        for packed in ("", ".gz") if kind != "npz" else ("",):
            write(made, tmp_path / f"x{bytes_}{packed}", kind)
            assert same(read(tmp_path / f"x{bytes_}{packed}", **options(kind, made)), made)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_entries_in_any_order_are_sorted(tmp_path_factory, seed):
    made = corpus(seed, documents=30, vocabulary=20)
    folder = tmp_path_factory.mktemp("shuffled")
    write(made, folder / "x.mtx", "matrix-market")
    *head, body = (folder / "x.mtx").read_text().split("\n", 2)
    lines = np.random.default_rng(seed).permutation(body.split("\n")[:-1])
    put(folder / "docword.y.txt.gz", "\n".join([*head[1].split(), *lines]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_corpus_writer, "_BUCKET", 7)
        patch.setattr(_lines, "CHUNK_BYTES", 100)
        back = read(folder / "docword.y.txt.gz")
    assert same(back, made)


def test_several_gzip_members_are_one_file(tmp_path):
    data = UCI.encode()
    (tmp_path / "docword.x.txt.gz").write_bytes(gzip.compress(data[:9]) + gzip.compress(data[9:]) + b"\0" * 9)
    assert dense(read(tmp_path / "docword.x.txt.gz")).tolist() == TABLE


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_matrices_as_scipy_saves_them(tmp_path, form):
    table = np.array(TABLE)
    rows, columns = np.nonzero(table if form != "csc" else table.T)
    values = (table if form != "csc" else table.T)[rows, columns].astype(np.float64)
    order = np.random.default_rng(0).permutation(5) if form == "coo" else np.arange(5)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=3))])
    parts = {
        "csr": {"indices": columns, "indptr": starts},
        "csc": {"indices": columns, "indptr": starts},
        "coo": {"row": rows[order], "col": columns[order]},
    }[form]
    np.savez(tmp_path / "x.npz", data=values[order], shape=(3, 4), format=np.array(form.encode()), **parts)
    assert dense(read(tmp_path / "x.npz")).tolist() == TABLE
    assert dense(read(tmp_path / "x.npz", transpose=True)).tolist() == table.T.tolist()


@pytest.mark.parametrize("form", ["csr_matrix", "csc_matrix", "coo_matrix", "csr_array"])
def test_scipy_reads_and_writes_the_same(tmp_path, form):
    sparse = pytest.importorskip("scipy.sparse")
    io = pytest.importorskip("scipy.io")
    made = corpus(4)
    write(made, tmp_path / "ours.npz", "npz")
    write(made, tmp_path / "ours.mtx", "matrix-market")
    loaded = sparse.load_npz(tmp_path / "ours.npz")
    assert np.array_equal(loaded.toarray(), dense(made))
    assert np.array_equal(io.mmread(tmp_path / "ours.mtx").toarray(), dense(made))
    theirs = getattr(sparse, form)(loaded).astype(np.float32)
    sparse.save_npz(tmp_path / "theirs.npz", theirs)
    io.mmwrite(tmp_path / "theirs.mtx", theirs)
    assert same(read(tmp_path / "theirs.npz"), made)
    assert same(read(tmp_path / "theirs.mtx"), made)


def test_text_a_document_a_line_or_a_file(tmp_path):
    texts = ["cat dog cat", "the dog", "Bird of prey"]
    tokens = Tokens(min_df=1, max_df=1.0)
    line = put(tmp_path / "zoo.txt.gz", "\n".join(texts))
    (tmp_path / "zoo" / "deep").mkdir(parents=True)
    for name, text in zip(("a.txt", "deep/b.txt", "deep/c.txt"), texts, strict=True):
        put(tmp_path / "zoo" / name, text)
    for path in (line, tmp_path / "zoo"):
        assert detect_kind(path) == "text"
        made = read(path, tokens=tokens)
        assert same(made, count(texts, tokens))
        skipped = Skipped()
        known = read(path, vocabulary=["dog", "emu"], skipped=skipped)
        assert known.vocabulary == ("dog", "emu")
        assert dense(known).tolist() == [[1, 0], [1, 0]]
        assert skipped.documents.tolist() == [2]


def test_words_that_no_text_can_have_are_told(tmp_path):
    path = put(tmp_path / "zoo.txt", "Dog COVID-19 c++ new_york\n")
    words = put(tmp_path / "words.txt", "dog\nCOVID\ncovid\nmp3\nnew_york\nc++\n")
    with pytest.warns(UserWarning, match="4 of the 6 words of the vocabulary cannot be found"):
        made = read(path, vocabulary=words)
    assert dense(made).tolist() == [[1, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a", "2 0:2 3:1\n1 2:12\n", "lda-c"),
        ("a", "7 0:2 3:1\n8 2:12\n", "svmlight"),
        ("a", "%%MatrixMarket matrix coordinate real general\n", "matrix-market"),
        ("a.gz", "3\n4\n5\n1 1 2\n", "uci"),
        ("a.txt", "once upon a time\n", "text"),
        ("a.txt", "3\n4\n5\n1 1 2\n", "uci"),
        ("a.ldac", "7 0:2 3:1\n", "lda-c"),
        ("A.LDAC.GZ", "7 0:2 3:1\n", "lda-c"),
        ("A.TSV", "a,b,c\ttext\n", "csv"),
        ("A.TXT", "once upon a time\n", "text"),
        ("a", "1 2:12\n", None),  # a label, or the number of words
        ("a", "once upon a time\n", None),
        ("a", b"\x00\x01\x02" * 99, None),
        ("a", "", None),
    ],
)
def test_kinds_by_name_and_content(tmp_path, name, content, kind):
    path = put(tmp_path / name, content)
    if kind is not None:
        assert detect_kind(path) == kind
        return
    with pytest.raises(Refusal, match="uci, matrix-market, lda-c, svmlight, npz, text"):
        read(path)


def test_words_that_no_line_can_hold_are_not_written(tmp_path):
    for words, message in (
        (["a\nb", "c"], "Word 0"),
        (["c", "\ud800"], "Word 1"),  # a half of a character, which no encoding has
        (["c", "c"], r"Words 0 and 1 .*'c'\. Rename one"),
    ):
        made = Corpus.from_entries([0], [0], [1], shape=(1, 2), vocabulary=words)
        with pytest.raises(Refusal, match=message):
            write(made, tmp_path / "docword.x.txt", "uci")
        assert not list(tmp_path.iterdir())
    with pytest.raises(Refusal, match="The kinds"):
        write(made, tmp_path / "x", "parquet")
    with pytest.raises(Refusal, match="cannot be written"):
        write(corpus(0), tmp_path / "no" / "x", "uci")


@pytest.mark.parametrize("kind", KINDS)
def test_documents_without_a_word_are_written_only_where_they_are_read_again(tmp_path, kind):
    made = Corpus.from_entries([0, 2], [1, 0], [3, 4], shape=(3, 2))
    if kind not in ("lda-c", "svmlight"):
        write(made, tmp_path / "x", kind)
        skipped = Skipped()
        assert len(read(tmp_path / "x", skipped=skipped, **options(kind, made))) == 2
        assert skipped.documents.tolist() == [1]
        return
    with pytest.raises(Refusal, match=r"Document 1 \(from 0\) has no word.*corpus\.lengths > 0.*uci"):
        write(made, tmp_path / "x", kind)
    assert not list(tmp_path.iterdir())
    with_words = made.select(made.lengths > 0)  # as the message advises
    write(with_words, tmp_path / "x", kind)
    assert same(read(tmp_path / "x", **options(kind, made)), with_words)


def test_a_folder_without_text_says_what_is_missing(tmp_path):
    (tmp_path / "readme.md").write_text("words")
    with pytest.raises(Refusal, match=r"no \.txt file"):
        read(tmp_path, kind="text")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bag.txt", "2\n3\n2\n1 1 2\n2 3 1\n"),
        ("x.mtx", "%%MatrixMarket matrix coordinate integer general\n2 3 2\n1 1 2\n2 3 1\n"),
        ("x.ldac", "1 0:2\n1 2:1\n"),
        ("x.svm", "0 0:2\n1 2:1\n"),
    ],
)
def test_a_byte_order_mark_is_passed_over(tmp_path, name, text):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        options = {"one_based": False} if name == "x.svm" else {}
        assert dense(read(path, **options)).tolist() == [[2, 0, 0], [0, 0, 1]]
