"""Sparse matrices in ``.npz`` files, as scipy saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._archives import load_arrays
from murmurate.datasets._corpus_writer import CorpusWriter
from murmurate.datasets._entries import Parsed, valid_entries
from murmurate.datasets._headers import LARGEST, Header
from murmurate.datasets._record_errors import RecordErrors, refuse_unreadable
from murmurate.datasets.corpus import blocks
from murmurate.errors import Refusal


def convert(path: Path, transpose: bool, errors: RecordErrors, folder: Path) -> tuple[NDArray[np.int64], int]:
    """Convert a matrix to ``words.npy`` and ``counts.npy`` in ``folder``. Returns ([D] the number of distinct
    words of each document, V).

    transpose: its rows are words. The matrix has to fit into memory.
    """
    rows, columns, counts, shape = _coordinates(path)
    if transpose:
        rows, columns, shape = columns, rows, shape[::-1]
    order = np.argsort(rows, kind="stable")
    order = order[counts[order] != 0]  # a matrix may store zeros: they are no errors
    writer = CorpusWriter(folder, errors)
    header = Header(shape[0], shape[1], len(rows), 0)
    for first, last in blocks(np.arange(len(order) + 1)):
        block = order[first:last]
        writer.add(valid_entries(Parsed(rows[block], columns[block], counts[block]), header, 0, errors))
    return writer.finish(shape[0]), shape[1]


def _coordinates(path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], tuple[int, ...]]:
    """Rows, columns, counts [N], and the shape, of a csr, csc or coo matrix. Raises Refusal."""
    try:
        with refuse_unreadable(path):
            arrays = load_arrays(path)
        kind = np.asarray(arrays["format"], np.str_).item()
        shape, counts = (int(arrays["shape"][0]), int(arrays["shape"][1])), arrays["data"]
        if counts.dtype.kind not in "biuf":
            raise Refusal(f"{path} has counts of type {counts.dtype}. Save real numbers: m.astype('int32').")
        if kind == "coo":
            rows, columns = arrays["row"], arrays["col"]
        elif kind in ("csr", "csc"):
            starts = arrays["indptr"].astype(np.int64)
            lengths = starts[1:] - starts[:-1]
            if not (starts[0] == 0 and (lengths >= 0).all() and starts[-1] == len(arrays["indices"])):
                raise ValueError("indptr does not rise from 0 to the number of indices")
            rows, columns = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), arrays["indices"]
        else:
            raise Refusal(
                f"{path} is a sparse matrix of format {kind}. Save it as csr: save_npz(path, m.tocsr())."
            )
        if rows.dtype.kind not in "iu" or columns.dtype.kind not in "iu":
            raise ValueError(f"indices of types {rows.dtype} and {columns.dtype}")
        if min(shape) < 0:
            raise ValueError(f"a shape of {shape}")
        if max(shape) > LARGEST:
            raise Refusal(
                f"{path} has the shape {shape}, and at most {LARGEST:,} documents or words can be read. "
                "Split it."
            )
        if any(array.ndim != 1 for array in (rows, columns, counts)):
            raise ValueError("its arrays are not one-dimensional")
        if not len(rows) == len(columns) == len(counts):
            raise ValueError(f"{len(rows)} rows, {len(columns)} columns and {len(counts)} counts")
        if kind == "csc":
            rows, columns = columns, rows
        return rows, columns, counts.astype(np.int8) if counts.dtype.kind == "b" else counts, shape
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise Refusal(
            f"{path} is cut short, damaged, or no sparse matrix of scipy ({error}). Write it again with "
            "scipy.sparse.save_npz."
        ) from error
