"""A corpus is converted once, in bounded memory; what is stale or damaged is made anew."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drawn import corpus, dense, same
from murmurate.datasets import _cache
from murmurate.datasets.generated import generate
from murmurate.datasets.reading import read
from murmurate.datasets.tokens import Tokens
from murmurate.datasets.writing import write
from murmurate.errors import Refusal
from sessions import session
from waiting import DEADLINE_SECONDS, until


@pytest.fixture
def source(tmp_path):
    made = corpus(0)
    write(made, tmp_path / "docword.x.txt", "uci")
    return tmp_path / "docword.x.txt", made


def beside(path):
    return path.with_name(path.name + ".corpus")


def child(script, *arguments):
    return session([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE)


def said(process):
    out, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0
    return out.split()


def test_a_source_is_read_once(source):
    path, made = source
    read(path)
    times, size = path.stat(), path.stat().st_size
    path.write_bytes(b"x" * size)  # nobody may look into it any more
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = read(path)
    assert same(again, made)
    assert isinstance(again.words, np.memmap)
    assert not again.words.flags.writeable


def test_a_changed_source_is_noticed(source):
    path, made = source
    first = read(path)
    other = corpus(1)
    write(other, path, "uci")
    assert same(read(path), other)
    assert same(first, made)  # what was mapped stays as it was
    text = path.read_bytes()
    path.write_bytes(text[: text.rindex(b" ")] + b" 9\n")
    os.utime(path, ns=(0, 0))
    assert read(path).counts[-1] == 9


def test_changed_options_are_noticed(tmp_path):
    path = tmp_path / "x.ldac"
    path.write_text("2 1:2 2:1\n1 3:1\n")
    assert read(path).words.tolist() == [1, 2, 3]
    assert read(path, one_based=True).words.tolist() == [0, 1, 2]
    assert read(path, vocabulary_size=9).vocabulary_size == 9
    words = tmp_path / "x.ldac.vocab.txt"
    for names in ("a\nb\nc\nd\n", "a\nb\nc\ne\n"):
        words.write_text(names)
        assert read(path).vocabulary == tuple(names.split())
    text = tmp_path / "zoo.txt"
    text.write_text("cat dog\ncat\n")
    assert read(text, tokens=Tokens(min_df=1, max_df=1.0)).vocabulary == ("cat", "dog")
    assert read(text, tokens=Tokens(min_df=1, max_df=1)).vocabulary == ("dog",)
    only = Tokens(min_df=1, max_df=1.0, stop_words=frozenset(["dog"]))
    assert read(text, tokens=only).vocabulary == ("cat",)


def test_a_changed_folder_of_text_is_noticed(tmp_path):
    folder = tmp_path / "zoo"
    folder.mkdir()
    (folder / "a.txt").write_text("cat dog")
    tokens = Tokens(min_df=1, max_df=1.0)
    assert len(read(folder, tokens=tokens)) == 1
    (folder / "b.txt").write_text("emu")
    assert read(folder, tokens=tokens).vocabulary == ("cat", "dog", "emu")


def promise_too_much(path):
    with open(path, "r+b") as file:
        shape = {"descr": "<i8", "fortran_order": False, "shape": (2**58,)}
        np.lib.format.write_array_header_1_0(file, shape)


DAMAGES = {
    "words cut short": lambda cache: os.truncate(cache / "words.npy", 200),
    "words of another": lambda cache: np.save(cache / "words.npy", np.zeros(3, np.int32)),
    "counts gone": lambda cache: (cache / "counts.npy").unlink(),
    "starts of more than memory": lambda cache: promise_too_much(cache / "starts.npy"),
    "starts empty": lambda cache: (cache / "starts.npy").write_bytes(b""),
    "description cut short": lambda cache: os.truncate(cache / "corpus.json", 30),
    "description gone": lambda cache: (cache / "corpus.json").unlink(),
    "nothing there": lambda cache: [file.unlink() for file in cache.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_anew(source, damage):
    path, made = source
    read(path)
    DAMAGES[damage](beside(path))
    assert same(read(path), made)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, beside(path).name]


SLOW = """
import sys
from murmurate.datasets import _lines
from murmurate.datasets.reading import read
_lines.CHUNK_BYTES = 16  # a conversion of minutes
read(sys.argv[1])
"""


def test_a_conversion_that_is_killed_leaves_no_cache(tmp_path):
    made = generate(3000, 2000, 5, 100, seed=0).corpus
    path = tmp_path / "docword.x.txt"
    write(made, path, "uci")
    with child(SLOW, path) as process:

        def begun() -> bool:
            assert process.poll() is None
            return any(file.stat().st_size > 0 for file in tmp_path.glob(".*.tmp/words.npy"))

        until(begun, "the conversion's first words")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not beside(path).exists()
    assert same(read(path), made)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, beside(path).name]


MAPPED = """
import re, sys
from murmurate.datasets.reading import read
made = read(sys.argv[1])
maps = open("/proc/self/maps").read()
print(*[re.search(rf"(r\\S+) \\S+ \\S+ (\\d+) .*/{name}.npy\\n", maps)[2] for name in ("words", "counts")])
print(made.tokens)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_processes_share_one_copy(tmp_path):
    """Several begin at once: one converts, and all map its files."""
    made = generate(2000, 1000, 5, 100, seed=0).corpus
    path = tmp_path / "docword.x.txt.gz"
    write(made, path, "uci")
    with child(MAPPED, path) as one, child(MAPPED, path) as two, child(MAPPED, path) as three:
        found = [said(process) for process in (one, two, three)]
    files = [str((beside(path) / f"{name}.npy").stat().st_ino) for name in ("words", "counts")]
    assert found == [[*files, str(made.tokens)]] * 3


MEMORY = """
import re, sys
from murmurate.datasets import _corpus_writer
from murmurate.datasets.reading import read
_corpus_writer._BUCKET = 1 << 16
def peak_kib():  # of this program alone; getrusage's has what its parent had
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak_kib()
read(sys.argv[1])
print(peak_kib() - before)
"""


@pytest.fixture(scope="module")
def large():
    return generate(25_000, 5000, 10, 120, seed=0).corpus


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "name",
    [
        "docword.x.txt.gz",
        "x.ldac",
        pytest.param("docword.x.txt", marks=pytest.mark.slow),
        pytest.param("x.mtx", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_file(tmp_path, name, large):
    made = large
    path = tmp_path / name
    write(made, path, {".mtx": "matrix-market", ".ldac": "lda-c"}.get(path.suffix, "uci"))
    entries_mb = len(made.words) * 8 / 2**20
    assert entries_mb > 15
    if name == "x.mtx":  # the last document first: all has to be sorted
        *head, body = path.read_bytes().split(b"\n", 2)
        cut = body.rindex(b"\n25000 ")
        while body.rfind(b"\n25000 ", 0, cut) >= 0:
            cut = body.rfind(b"\n25000 ", 0, cut)
        path.write_bytes(b"\n".join([*head, body[cut + 1 :] + body[: cut + 1]]))
    with child(MEMORY, path) as process:
        grown_mb = int(said(process)[0]) / 2**10
    assert grown_mb < entries_mb / 2
    options = {"vocabulary_size": 5000} if name == "x.ldac" else {}
    assert same(read(path, **options), made)


def test_a_cache_in_another_folder(tmp_path):
    made = {}
    for seed, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        made[name] = corpus(seed)
        write(made[name], tmp_path / name / "docword.x.txt", "uci")
    for _ in range(2):
        for name, expected in made.items():
            path = tmp_path / name / "docword.x.txt"
            assert same(read(path, cache=tmp_path / "far" / "kept"), expected)
            assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert len(list((tmp_path / "far" / "kept").iterdir())) == 2  # namesakes do not take each other's place


def test_a_cache_of_a_source_whose_name_is_not_utf_8(source, tmp_path):
    path, made = source
    renamed = path.rename(tmp_path / os.fsdecode(b"docword.\xe9.txt"))
    assert same(read(renamed, cache=tmp_path / "kept"), made)


@pytest.mark.parametrize("later", [False, True])
def test_two_hosts_with_equal_process_ids_share_a_folder(source, monkeypatch, later):
    """Without locks both convert; the second one begins and ends before the first has ended."""
    path, made = source
    monkeypatch.setattr(_cache.fcntl, "flock", no_locks)
    store, ended = _cache._store, []

    def store_slowly(*arguments):
        if not ended:
            ended.append(True)
            if later:
                store(*arguments)
            ended.append(read(path))
            if later:
                return
        store(*arguments)

    monkeypatch.setattr(_cache, "_store", store_slowly)
    assert same(read(path), made)
    assert same(ended[1], made)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, beside(path).name]


def no_locks(*_):
    raise OSError


def test_what_is_in_the_way_is_not_deleted(source):
    path, _ = source
    beside(path).mkdir()
    (beside(path) / "thesis.tex").write_text("years")
    with pytest.raises(Refusal, match="in the way"):
        read(path)
    assert (beside(path) / "thesis.tex").read_text() == "years"
    shutil.rmtree(beside(path))
    beside(path).write_text("a file")
    with pytest.raises(Refusal, match="in the way"):
        read(path)


def test_a_place_that_cannot_be_written_names_the_option(source):
    path, _ = source
    with pytest.raises(Refusal, match=re.escape("give it another folder with --cache")):
        read(path, cache=path)  # a file, not a folder
    assert len(list(path.parent.iterdir())) == 1


def test_a_place_that_may_not_be_looked_into_names_the_option(source, tmp_path, monkeypatch):
    exists = Path.exists

    def denied(path):
        if path.parent.name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(Refusal, match=r"cannot be written: Permission denied.* with --cache"):
        read(source[0], cache=tmp_path / "secret")


def test_an_error_without_a_number_keeps_its_words(source, monkeypatch):
    def save(*arguments):
        raise OSError("24 requested and 8 written")  # numpy's, on a full disk

    monkeypatch.setattr(_cache.np, "save", save)
    with pytest.raises(Refusal, match="cannot be written: 24 requested and 8 written"):
        read(source[0])


def test_a_source_that_may_not_be_read_is_refused(source, monkeypatch):
    opened = os.open

    def denied(path, *arguments, **options):
        if path == source[0]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(_cache.os, "open", denied)
    with pytest.raises(Refusal, match=r"docword\.x\.txt cannot be read: Permission denied"):
        read(source[0], kind="uci")


def test_a_refused_conversion_leaves_nothing(source):
    path, _ = source
    path.write_text(path.read_text() + "1 1 x\n")
    with pytest.raises(Refusal, match="no count"):
        read(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_cache_is_no_corpus_of_its_own(tmp_path, monkeypatch):
    """Neither by its name, nor as text of a folder that it stands in."""
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "a.txt").write_text("cat dog\ndog\n")
    tokens = Tokens(min_df=1, max_df=1.0)
    assert len(read(tmp_path / "zoo" / "a.txt", tokens=tokens)) == 2
    with pytest.raises(Refusal, match="Name the corpus itself"):
        read(beside(tmp_path / "zoo" / "a.txt"))
    monkeypatch.chdir(tmp_path / "zoo")
    assert dense(read(".", tokens=tokens)).tolist() == [[1, 2]]
    assert beside(tmp_path / "zoo").exists()


def test_any_word_is_kept(source):
    path, _ = source
    words = ["a\nb", "ü", " ", *(f"w{i}" for i in range(27))]
    for _ in range(2):
        assert read(path, vocabulary=words).vocabulary == tuple(words)


def test_a_mapped_corpus_is_used_as_any(source):
    path, made = source
    mapped = read(path)
    assert np.array_equal(dense(mapped.select([3, 1])), dense(made)[[3, 1]])
    assert mapped.tokens == made.tokens
