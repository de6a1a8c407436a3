"""Writes the entries of documents to arrays on disk, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._record_errors import RecordErrors
from murmurate.datasets.corpus import LARGEST_COUNT, sort_and_sum

Entries = NDArray[np.int32]  # [3, n]: document, word, count
_BUCKET = 1 << 20  # approximate number of entries in a bucket
# a number of documents above ``_LARGEST_RATIO`` x (documents with words + ``_BUCKET``) must be wrong
_LARGEST_RATIO = 10


class Unordered(Exception):
    """A document came after a document with a greater number."""


class _ArrayFile:
    """A one-dimensional ``.npy`` file of int32 that grows."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115
        self._size = 0
        self._write_header()

    def _write_header(self) -> None:
        shape = {"descr": "<i4", "fortran_order": False, "shape": (self._size,)}
        # ``close`` overwrites the header in place: numpy pads it, so its length does not depend on the size
        np.lib.format.write_array_header_1_0(self._file, shape)

    def append(self, values: NDArray[np.int32]) -> None:
        self._file.write(np.ascontiguousarray(values).data)
        self._size += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class CorpusWriter:
    """Writes ``words.npy`` and ``counts.npy`` to a folder. Documents must come in the order of their numbers.

    The words of a document may come in any order and more than once: they are sorted, and their counts are
    summed. A sum above ``LARGEST_COUNT`` is an error, which ``errors`` refuses or counts.
    """

    def __init__(self, folder: Path, errors: RecordErrors) -> None:
        self.greatest_word = -1
        self._errors = errors
        self._words = _ArrayFile(folder / "words.npy")
        self._counts = _ArrayFile(folder / "counts.npy")
        # (numbers of documents, numbers of their distinct words)
        self._lengths: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []
        self._last_document = np.empty((3, 0), np.int32)  # entries kept back: more of the document may come

    def add(self, entries: Entries) -> None:
        """Add entries. Raises Unordered if a document's number is less than that of a document before it."""
        entries = np.concatenate([self._last_document, entries], axis=1)
        documents = entries[0]
        if (documents[1:] < documents[:-1]).any():
            raise Unordered
        # index of the first entry of the last document; 0 if there is none
        last_start = np.searchsorted(documents, documents[-1:]).sum()
        self.add_documents(entries[:, :last_start])
        self._last_document = entries[:, last_start:]

    def add_documents(self, entries: Entries) -> None:
        """Add entries in any order; they must be all entries of their documents."""
        documents, words, sums = sort_and_sum(*entries)
        too_large = sums > LARGEST_COUNT
        if too_large.any():
            at = int(too_large.argmax())
            self._errors.add(
                f"document {documents[at]} (from 0)",
                "count too large",
                f"word {words[at]} (from 0) is there {sums[at]} times, above {LARGEST_COUNT}",
                count=int(np.count_nonzero(too_large)),
            )
            documents, words, sums = documents[~too_large], words[~too_large], sums[~too_large]
        if len(documents):
            self._lengths.append(np.unique(documents, return_counts=True))
            self._words.append(words)
            self._counts.append(sums.astype(np.int32, copy=False))
            self.greatest_word = max(self.greatest_word, int(words.max()))

    def finish(self, documents: int) -> NDArray[np.int64]:
        """Write the last document, and close the files. Returns [D], the number of distinct words of each
        document. documents: D. Raises Refusal if far fewer documents than D have words."""
        self.add_documents(self._last_document)
        self.close()
        with_words = sum(len(lengths) for _, lengths in self._lengths)
        if documents > _LARGEST_RATIO * (with_words + _BUCKET):
            raise self._errors.refusal(
                "its sizes",
                f"{documents:,} documents, and only {with_words:,} of them have words",
                "Correct the number of documents.",
            )
        lengths = np.zeros(documents, np.int64)
        for numbers, part in self._lengths:
            lengths[numbers] += part
        return lengths

    def close(self) -> None:
        """Close the files without writing the last document."""
        self._words.close()
        self._counts.close()


class Buckets:
    """Groups entries by ranges of documents, in one file for each range (bucket sort on disk)."""

    def __init__(self, folder: Path, documents: int, entries: int) -> None:
        count = min(max(entries // _BUCKET, 1), 256, max(documents, 1))
        self._width = -(-documents // count)
        self._paths = [folder / f"bucket-{b}.bin" for b in range(count)]
        self._files = [open(path, "wb") for path in self._paths]  # noqa: SIM115

    def add(self, entries: Entries) -> None:
        bucket = entries[0] // self._width
        order = np.argsort(bucket, kind="stable")
        rows = np.ascontiguousarray(entries.T[order])
        edges = np.searchsorted(bucket[order], np.arange(len(self._files) + 1))
        for file, first, last in zip(self._files, edges[:-1], edges[1:], strict=True):
            file.write(rows[first:last].data)

    def ranges(self) -> Iterator[Entries]:
        """The entries of each range of documents, in the order of ranges."""
        for path, file in zip(self._paths, self._files, strict=True):
            file.close()
            yield np.fromfile(path, np.int32).reshape(-1, 3).T
            path.unlink()
