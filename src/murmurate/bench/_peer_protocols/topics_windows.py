"""Fits topic models on request: one JSON request per line of stdin, one JSON answer per line of stdout, after
a first line that names the library and its version.

A request has four keys. corpus: a file of documents (see ``read``). options: options of the model. marks:
counts of documents; each time the library has seen so many, its lambda [V, K] float32 is saved. out: the
folder in which it is saved as ``.npy``. An answer has either ``curve`` (the number of documents, the CPU
seconds and the file of each lambda) or ``failed`` (the reason). The caller evaluates all libraries' lambdas
with the same code.

CPU seconds are those of the whole process (``time.process_time``) from when the documents are in the
library's own form: importing, reading and converting are not counted, nor is saving lambda.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class DocumentRows(NamedTuple):
    """D documents. starts: [D + 1] int64; words, counts: [N] int32. Document d has the words and counts from
    starts[d] to starts[d + 1]."""

    starts: np.ndarray
    words: np.ndarray
    counts: np.ndarray
    vocabulary_size: int

    def __len__(self) -> int:
        return len(self.starts) - 1


def write(path: Path, rows: Any) -> None:
    """Write ``rows``, any object with the fields of ``DocumentRows``."""
    arrays = {name: getattr(rows, name) for name in ("starts", "words", "counts")}
    np.savez(path, **arrays, vocabulary_size=rows.vocabulary_size)


def read(path: str) -> DocumentRows:
    with np.load(path) as arrays:
        size = int(arrays["vocabulary_size"])
        return DocumentRows(arrays["starts"], arrays["words"], arrays["counts"], size)


class Enough(Exception):
    """The last mark has been reached."""


class Snapshots:
    """Saves lambda at each mark (a number of documents). Call it after each step with the number of documents
    seen so far and a function that returns lambda."""

    def __init__(self, marks: list[int], out: Path) -> None:
        self.curve: list[dict[str, Any]] = []
        self._marks, self._out = sorted(marks), out
        self._began = time.process_time()

    def __call__(self, documents: int, topics: Callable[[], np.ndarray]) -> None:
        """Raises Enough at the last mark, which stops libraries that would go on."""
        if documents < self._marks[0]:
            return
        now = time.process_time()
        while self._marks and self._marks[0] <= documents:
            self._marks.pop(0)
        path = self._out / f"{len(self.curve)}.npy"
        np.save(path, np.ascontiguousarray(topics(), dtype=np.float32))
        self.curve.append({"documents": documents, "cpu_seconds": now - self._began, "topics": str(path)})
        if not self._marks:
            raise Enough
        self._began += time.process_time() - now  # saving lambda is not counted


# fits a model; this part is timed
Fit = Callable[[Snapshots], None]


def serve(name: str, version: str, prepare: Callable[[DocumentRows, dict[str, Any]], Fit]) -> None:
    """Answer until stdin ends. ``prepare(documents, options)`` converts the documents and returns the fit."""
    print(json.dumps({"peer": name, "version": version}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        out = Path(request["out"])
        out.mkdir(parents=True, exist_ok=True)
        try:
            fit = prepare(read(request["corpus"]), request["options"])
            snapshots = Snapshots(request["marks"], out)
            with contextlib.suppress(Enough):
                fit(snapshots)
            answer: dict[str, Any] = {"curve": snapshots.curve}
        except Exception as problem:  # reported, so that the benchmark goes on without it
            answer = {"failed": f"{name}: {type(problem).__name__}: {problem}"}
        print(json.dumps(answer), flush=True)
