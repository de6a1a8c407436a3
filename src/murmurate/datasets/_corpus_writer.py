"""Writes the entries of documents to arrays on disk, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._record_errors import RecordErrors
from murmurate.datasets.corpus import ordered

Ids = NDArray[np.int32]
_BIGGEST = 2**31 - 1
_BUCKET = 1 << 20  # entries of a bucket, about


class Unordered(Exception):
    """A document came after one with a greater number."""


class ArrayFile:
    """A one-dimensional ``.npy`` file that grows."""

    def __init__(self, path: Path, dtype: type) -> None:
        self._dtype = np.dtype(dtype)
        self._file = open(path, "wb")  # noqa: SIM115
        self.size = 0
        self._header()

    def _header(self) -> None:
        shape = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, shape)  # padded by numpy: as long for any size

    def append(self, values: NDArray[np.int32] | NDArray[np.int64]) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self.size += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class CorpusWriter:
    """Writes ``words.npy`` and ``counts.npy`` below a folder; documents come in their order.

    Words of a document may come in any order and more than once: they are sorted and summed. A sum without
    room in 32 bits is a fault.
    """

    def __init__(self, folder: Path, vocabulary_size: int, errors: RecordErrors) -> None:
        self._errors = errors
        self._words = ArrayFile(folder / "words.npy", np.int32)
        self._counts = ArrayFile(folder / "counts.npy", np.int32)
        self._vocabulary_size = vocabulary_size
        self._lengths = np.zeros(1024, np.int64)
        self._open: tuple[Ids, Ids, Ids] = (np.zeros(0, np.int32),) * 3  # the last document: it may go on

    def add(self, documents: Ids, words: Ids, counts: Ids) -> None:
        """[n] each, of documents none of which is before the last one added. Raises Unordered."""
        before = self._open[0]
        if not len(documents):
            return
        if (documents[1:] < documents[:-1]).any() or (len(before) and documents[0] < before[0]):
            raise Unordered
        last = int(np.searchsorted(documents, documents[-1]))  # where the last document begins
        new = (documents, words, counts)
        if last or (len(before) and before[0] != documents[-1]):
            joined = [np.concatenate([a, b[:last]]) for a, b in zip(self._open, new, strict=True)]
            self._write(joined[0], joined[1], joined[2])
            self._open = (documents[last:], words[last:], counts[last:])
        else:
            joined = [np.concatenate([a, b]) for a, b in zip(self._open, new, strict=True)]
            self._open = (joined[0], joined[1], joined[2])

    def _write(self, documents: Ids, words: Ids, counts: Ids) -> None:
        documents, words, counts = self._summed(documents, words, counts)
        if not len(documents):
            return
        first, last = int(documents[0]), int(documents[-1])
        if last >= len(self._lengths):
            self._lengths = np.concatenate([self._lengths, np.zeros(last + 1, np.int64)])
        self._lengths[first : last + 1] += np.bincount(documents - first)
        self._words.append(words)
        self._counts.append(counts)

    def _summed(self, documents: Ids, words: Ids, counts: Ids) -> tuple[Ids, Ids, Ids]:
        documents, words, sums = ordered(documents, words, counts, self._vocabulary_size)
        sound = sums <= _BIGGEST
        if not sound.all():
            at = int(sound.argmin())
            self._errors.bad(
                f"document {documents[at]} (from 0)",
                "count too large",
                f"word {words[at]} (from 0) is there {sums[at]} times, and the largest count is {_BIGGEST}",
                count=int(np.count_nonzero(~sound)),
            )
            documents, words, sums = documents[sound], words[sound], sums[sound]
        return documents, words, sums.astype(np.int32, copy=False)

    def finish(self, documents: int) -> NDArray[np.int64]:
        """Distinct words of each of ``documents`` documents [D]."""
        self._write(*self._open)
        self.close()
        lengths = np.zeros(documents, np.int64)
        known = min(documents, len(self._lengths))
        lengths[:known] = self._lengths[:known]
        return lengths

    def close(self) -> None:
        """What was added last may be missing from the files."""
        self._words.close()
        self._counts.close()


class Buckets:
    """Entries in any order of documents: by ranges of documents to files, then one range at a time."""

    def __init__(self, folder: Path, documents: int, entries: int) -> None:
        count = min(max(entries // _BUCKET, 1), 256, max(documents, 1))
        self._width = -(-documents // count)
        self._paths = [folder / f"bucket-{b}.bin" for b in range(count)]
        self._files = [open(path, "wb") for path in self._paths]  # noqa: SIM115

    def add(self, documents: Ids, words: Ids, counts: Ids) -> None:
        bucket = documents // self._width
        order = np.argsort(bucket, kind="stable")
        rows = np.stack([documents, words, counts], axis=1)[order]
        edges = np.searchsorted(bucket[order], np.arange(len(self._files) + 1))
        for file, first, last in zip(self._files, edges[:-1], edges[1:], strict=True):
            if last > first:
                file.write(rows[first:last].data)

    def sorted(self) -> Iterator[tuple[Ids, Ids, Ids]]:
        """Ranges of documents, in order, each sorted by document."""
        for path, file in zip(self._paths, self._files, strict=True):
            file.close()
            rows = np.fromfile(path, np.int32).reshape(-1, 3)
            path.unlink()
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            yield rows[:, 0], rows[:, 1], rows[:, 2]
