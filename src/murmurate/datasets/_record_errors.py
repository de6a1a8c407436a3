"""Errors in the records of a file: refused with their place, or skipped and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal


@dataclass
class Skipped:
    """What of a source is not in its corpus.

    ``causes`` counts by cause: lines, or entries where a format has no lines. ``documents`` are the numbers,
    from 0, of the source's documents that the corpus lacks, so that results can be put beside its rows.
    """

    causes: Counter[str] = field(default_factory=Counter)
    documents: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __str__(self) -> str:
        causes = ", ".join(f"{n:,} x {cause}" for cause, n in sorted(self.causes.items()))
        return f"skipped: {causes or 'nothing'}; {len(self.documents):,} documents are not in the corpus"


class RecordErrors:
    """Refuses the first fault of a file, or counts them all."""

    def __init__(self, path: Path, skip: bool) -> None:
        self.path = path
        self.skip = skip
        self.skipped = Skipped()

    def bad(self, where: int | str, cause: str, detail: str, *, count: int = 1) -> None:
        """A fault at a line (its number) or another place. Raises Refusal unless errors are skipped."""
        if self.skip:
            self.skipped.causes[cause] += count
        else:
            raise self.refusal(where, detail, "Mend the file, or leave out what is wrong with skip_bad.")

    def refusal(self, where: int | str, detail: str, remedy: str) -> Refusal:
        """For what cannot be skipped."""
        # 0: before any line was whole
        place = f"line {max(where, 1)}" if isinstance(where, int) else where
        return Refusal(f"{self.path}, {place}: {detail}. {remedy}")


class RecordError(Exception):
    """One line's fault: its cause, in the words by which it is counted, and the detail."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
