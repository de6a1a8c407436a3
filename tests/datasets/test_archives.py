"""Files that are far larger inside than outside, or say that they are, and files that are none."""

from __future__ import annotations

import gzip
import io
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmurate.datasets._record_errors import RecordErrors
from murmurate.datasets.reading import Skipped, read
from murmurate.datasets.table import read_table
from murmurate.errors import Refusal

_MIB = 1 << 20


def _npz(path: Path, members: dict[str, tuple[tuple[int, ...], int]]) -> Path:
    """An archive of arrays of float64 zeros: (shape in the header, MiB that follow) by name."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (shape, size) in members.items():
            header = io.BytesIO()
            described: dict[str, Any] = {"descr": "<f8", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(header, described)
            with archive.open(f"{name}.npy", "w") as file:
                file.write(header.getvalue())
                for _ in range(size):
                    file.write(bytes(_MIB))
    return path


def test_an_archive_that_unpacks_to_far_more_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = _npz(tmp_path / "small.npz", {"data": ((80 * _MIB // 8,), 80)})  # 64 MiB are allowed of any file
    assert path.stat().st_size < _MIB
    words = r"small\.npz unpack to 83,886,\d+ or more.*without compression"
    for attempt in (lambda: read_table(path), lambda: read(path)):
        tracemalloc.start()
        try:
            with pytest.raises(Refusal, match=words):
                attempt()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 40 * _MIB


def test_an_array_larger_than_its_file_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = _npz(tmp_path / "short.npz", {"data": ((10**15,), 1)})
    with pytest.raises(Refusal, match=r"should have 8,000,000,000,000,000 bytes, and has 1,048,\d+"):
        read_table(path)
    with open(tmp_path / "short.npy", "wb") as file:
        shape: dict[str, Any] = {"descr": "<f8", "fortran_order": False, "shape": (10**15, 3)}
        np.lib.format.write_array_header_1_0(file, shape)
    with pytest.raises(Refusal, match="no table of numbers"):
        read_table(tmp_path / "short.npy")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": np.array([10**15, 4])}, "at most 2,147,483,646 documents or words"),
        ({"shape": np.array([2, 10**15])}, "at most 2,147,483,646 documents or words"),
        ({"shape": np.array([2**31 - 2, 4])}, "2,147,483,646 documents, and only 2 of them have words"),
        ({"indptr": np.array([0, 10**12, 3])}, "indptr does not rise"),
        ({"indices": np.array([[0, 1, 3]])}, "not one-dimensional|indptr does not rise"),
        ({"indices": np.array([0.0, 1.0, 3.0])}, "indices of types"),
    ],
)
def test_a_matrix_whose_sizes_do_not_fit_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    sound: dict[str, Any] = {
        "format": np.array(b"csr"), "shape": np.array([2, 4]), "data": np.array([1, 2, 1]),
        "indices": np.array([0, 1, 3]), "indptr": np.array([0, 2, 3]),
    }  # fmt: skip
    np.savez(tmp_path / "m.npz", **sound)
    assert len(read(tmp_path / "m.npz")) == 2
    np.savez(tmp_path / "n.npz", **(sound | changes))
    with pytest.raises(Refusal, match=words):
        read(tmp_path / "n.npz")


def test_blank_lines_by_the_million_in_a_small_file_are_refused(tmp_path: Path) -> None:
    table, corpus = tmp_path / "blank.csv.gz", tmp_path / "docword.blank.txt.gz"
    with gzip.open(table, "wb", compresslevel=1) as file:
        file.write(b"\n" * (2 * _MIB))
    with pytest.raises(Refusal, match="its first 1,000,000 lines hold no row"):
        read_table(table)
    with gzip.open(corpus, "wb", compresslevel=1) as file:
        file.write(b"2\n3\n1\n1 1 1\n")
        for _ in range(70):  # MiB, and 64 of them are allowed of any file
            file.write(b"\n" * _MIB)
    for skip_bad in (False, True):
        with pytest.raises(Refusal, match=r"unpack it first \(gunzip\)"):
            read(corpus, skip_bad=skip_bad)


def test_blank_lines_between_entries_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "docword.gaps.txt"
    path.write_bytes(b"2\n3\n2\n1 1 1\n" + b"\n" * (3 * _MIB) + b"2 3 4\n")
    skipped = Skipped()
    corpus = read(path, skipped=skipped)
    assert (corpus.starts.tolist(), corpus.words.tolist(), corpus.counts.tolist()) == (
        [0, 1, 2],
        [0, 2],
        [1, 4],
    )
    assert not skipped.causes


def test_documents_that_only_the_header_has_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "docword.many.txt"
    path.write_text("2147483646\n2147483646\n1\n1 1 1\n")
    with pytest.raises(Refusal, match="2,147,483,646 documents, and only 1 of them have words"):
        read(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for attempt in (read_table, read):
        with pytest.raises(Refusal, match="is a pipe or a device"):
            attempt(tmp_path / "pipe.csv")


def test_what_is_all_errors_is_refused_even_if_these_are_skipped(tmp_path: Path) -> None:
    errors = RecordErrors(tmp_path / "file", skip=True)
    errors.add(1, "malformed line", "no number", count=1_000_000)
    with pytest.raises(Refusal, match=r"line 2: more than 1,000,000 errors, the last one: no number"):
        errors.add(2, "malformed line", "no number")
