"""Sparse matrices in ``.npz`` files, as scipy saves them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._corpus_writer import CorpusWriter
from murmurate.datasets._record_errors import RecordErrors
from murmurate.datasets.corpus import FRACTIONS, blocks
from murmurate.errors import Refusal

_BIGGEST = 2**31 - 1


def convert(path: Path, transpose: bool, errors: RecordErrors, folder: Path) -> tuple[NDArray[np.int64], int]:
    """Convert to ``words.npy`` and ``counts.npy``; returns [D] lengths, and V. The matrix has to fit
    into memory."""
    rows, columns, counts, shape = _coordinates(path)
    if transpose:
        rows, columns, shape = columns, rows, shape[::-1]
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, columns, counts = rows[order], columns[order], counts[order]
    kept = CorpusWriter(folder, shape[1], errors)
    for first, last in blocks(np.arange(len(rows) + 1)):
        part = [array[first:last] for array in (rows, columns, counts)]
        sound = _sound(part[0], part[1], part[2], shape, errors)
        kept.add(*(array[sound].astype(np.int32) for array in part))
    return kept.finish(shape[0]), shape[1]


def _sound(
    rows: NDArray[Any],
    columns: NDArray[Any],
    counts: NDArray[Any],
    shape: tuple[int, int],
    errors: RecordErrors,
) -> NDArray[np.bool_]:
    """[n]: whether an entry counts; zeros do not, and what is wrong is refused or counted."""
    wrongs = {
        "document out of range": (rows < 0) | (rows >= shape[0]),
        "word out of range": (columns < 0) | (columns >= shape[1]),
        "count of zero or below": ~(counts >= 0),  # stored zeros are no fault of a matrix
        "count too large": counts > _BIGGEST,
        "fractional count": counts != np.floor(counts),
    }
    sound: NDArray[np.bool_] = np.not_equal(counts, 0)
    for cause, wrong in wrongs.items():
        wrong &= sound
        if wrong.any():
            at = int(wrong.argmax())
            detail = f"{cause}: word {columns[at]} has {counts[at]:g}"
            hint = f". {FRACTIONS[:-1]}" if cause == "fractional count" else ""
            where = f"document {rows[at]} (from 0)"
            errors.bad(where, cause, detail + hint, count=int(np.count_nonzero(wrong)))
            sound &= ~wrong
    return sound


def _coordinates(path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], tuple[int, int]]:
    """Rows, columns, counts [N], and the shape, of a csr, csc or coo matrix. Raises Refusal."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            parts = {name: stored[name] for name in stored.files}
        form = parts["format"].item()
        form = form.decode() if isinstance(form, bytes) else str(form)
        shape = (int(parts["shape"][0]), int(parts["shape"][1]))
        data = _numbers(parts["data"])
        if form == "coo":
            return _alike(parts["row"], parts["col"], data, shape)
        if form not in ("csr", "csc"):
            raise Refusal(
                f"{path} is a sparse matrix of format {form}. Save it as csr: save_npz(path, m.tocsr())."
            )
        starts = parts["indptr"].astype(np.int64)
        outer = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
        inner = parts["indices"]
        rows, columns = (outer, inner) if form == "csr" else (inner, outer)
        return _alike(rows, columns, data, shape)
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error
    except (zipfile.BadZipFile, ValueError, KeyError, IndexError, EOFError, TypeError) as error:
        raise Refusal(
            f"{path} is cut short, damaged, or no sparse matrix of scipy ({error}). Write it again with "
            "scipy.sparse.save_npz."
        ) from error


def _alike(
    rows: NDArray[Any], columns: NDArray[Any], counts: NDArray[Any], shape: tuple[int, int]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], tuple[int, int]]:
    if not len(rows) == len(columns) == len(counts):
        raise ValueError(f"{len(rows)} rows, {len(columns)} columns and {len(counts)} counts")
    return rows, columns, counts, shape


def _numbers(data: NDArray[Any]) -> NDArray[Any]:
    if data.dtype.kind not in "biuf":
        raise ValueError(f"counts of type {data.dtype}")
    return data.astype(np.int8) if data.dtype.kind == "b" else data
