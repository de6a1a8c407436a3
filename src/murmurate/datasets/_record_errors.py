"""Errors in the records of a file: refused with file and line, or skipped and counted."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal, cause_of

_MOST_SKIPPED = 1_000_000


def option_of(argument: str, value: str = "") -> str:
    """How an error message names an argument of ``read``: as a command-line option, and in Python."""
    return f"--{argument.replace('_', '-')} ({argument}={value} in Python)"


SKIP_BAD = option_of("skip_bad", "True")


@dataclass
class Skipped:
    """What was left out when a source was converted to a corpus.

    causes: how many lines were skipped (or entries, where a format has no lines), by cause.
    documents: which of the source's documents, numbered from 0, are not in the corpus.
    """

    causes: Counter[str] = field(default_factory=Counter)
    documents: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __str__(self) -> str:
        causes = ", ".join(f"{n:,} x {cause}" for cause, n in sorted(self.causes.items()))
        number = len(self.documents)
        documents = f"{number:,} document{' is' if number == 1 else 's are'} not in the corpus"
        # if they only have no known word, no line was skipped
        return documents if number and not causes else f"skipped: {causes or 'nothing'}; {documents}"


class RecordErrors:
    """Refuses the first error in a file's records, or counts all of them (``skip``)."""

    def __init__(self, path: Path, skip: bool) -> None:
        self.path = path
        self.skip = skip
        self.causes: Counter[str] = Counter()

    def add(self, where: int | str, cause: str, detail: str, *, count: int = 1) -> None:
        """Count an error at ``where``, a line number or another place. Raises Refusal unless errors are
        skipped, and for more than a million."""
        if not self.skip:
            raise self.refusal(
                where, detail, f"Correct the file, or use {SKIP_BAD} to leave out such records."
            )
        self.causes[cause] += count
        if self.causes.total() > _MOST_SKIPPED:
            raise self.refusal(
                where,
                f"more than {_MOST_SKIPPED:,} errors, the last one: {detail}",
                "Is the file of the kind it was read as?",
            )

    def refusal(self, where: int | str, detail: str, remedy: str) -> Refusal:
        """The exception for an error that cannot be skipped."""
        # ``where`` is 0 if not even the first line was complete
        place = f"line {max(where, 1)}" if isinstance(where, int) else where
        return Refusal(f"{self.path}, {place}: {detail}. {remedy}")


class RecordError(Exception):
    """An error in one line. Arguments: the cause under which it is counted, and the detail for a message."""


@contextmanager
def refuse_unreadable(path: Path | str) -> Iterator[None]:
    """Turn an OSError into a Refusal that names the file."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {cause_of(error)}. Check the path.") from error


def not_utf8(text: bytes, position: int) -> str:
    """What is wrong with ``text``, whose byte at ``position`` is not UTF-8, and how to convert the file."""
    encoding, name = "latin1", "Latin-1"
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding, name = "utf-16", "UTF-16"
    convert = f"iconv -f {encoding} -t utf-8 converts it, if it is {name}"
    return f"byte {text[position]:#04x} is not UTF-8; {convert}"


def quoted(text: bytes) -> str:
    """Text of a file for an error message, shortened."""
    line = text.decode("utf-8", "backslashreplace").strip()
    return repr(line if len(line) <= 60 else line[:57] + "...")
