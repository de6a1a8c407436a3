"""Reads the lines of a plain or gzip file, a chunk at a time, with their numbers. A byte order mark at its
beginning, which editors on Windows write, is passed over."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from murmurate.datasets._archives import refuse_inflated
from murmurate.datasets._record_errors import SKIP_BAD, RecordErrors, refuse_unreadable
from murmurate.errors import Refusal

CHUNK_BYTES = 1 << 18  # the arrays made of a chunk fit into a core's cache
_LONGEST_BYTES = 1 << 26


class Lines:
    """The lines of a file: a header is read line by line with ``line``, then the rest in chunks. A context
    manager."""

    def __init__(self, path: Path, errors: RecordErrors) -> None:
        self.number = 0  # how many lines have been returned so far
        self._path = path
        self._errors = errors
        self._read_bytes = 0
        with refuse_unreadable(path):
            self._opened = open(path, "rb")  # noqa: SIM115
            compressed = self._opened.peek(2)[:2] == b"\x1f\x8b"
        self._gzip = TolerantGzip(self._opened, path) if compressed else None
        self._file = io.BufferedReader(self._gzip) if self._gzip else self._opened
        with refuse_unreadable(path):
            if self._file.peek(3).startswith(codecs.BOM_UTF8):
                self._file.read(3)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def line(self) -> bytes | None:
        """The next line without its end, or None after the last. Raises Refusal after the last complete line
        of a damaged gzip file."""
        line = self._read(0)
        if not line and self._damage:
            raise self._cut_short()
        return line.rstrip(b"\r\n") if line else None

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Chunks of the rest of the file: (number of the first line, bytes of complete lines).

        After the last complete line of a damaged gzip file: raises Refusal or, where errors are skipped,
        counts the damage as one.
        """
        first = self.number + 1
        while chunk := self._read(CHUNK_BYTES):
            yield first, chunk
            first = self.number + 1
        if self._damage and not self._errors.skip:
            raise self._cut_short()
        self._errors.causes.update(["gzip cut short"] if self._damage else [])

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """(number, line without its newline) of each line in the rest of the file."""
        for first, chunk in self.chunks():
            yield from enumerate(chunk.split(b"\n")[:-1], first)

    @property
    def _damage(self) -> str:
        return self._gzip.damage if self._gzip else ""

    def _read(self, size_bytes: int) -> bytes:
        """The next ``size_bytes`` bytes and the rest of the line in which they end; fewer at the end of the
        file, and none after its end. A newline is added to a last line that has none; where a gzip file is
        damaged, such a line is left out instead. Raises Refusal for too long a line."""
        with refuse_unreadable(self._path):
            text = self._file.read(size_bytes) + self._file.readline(_LONGEST_BYTES)
        if not text.endswith(b"\n"):
            if len(text) >= _LONGEST_BYTES:
                raise self._errors.refusal(
                    self.number + 1, "the line has more than 64 MB", "Is the file of the kind it was read as?"
                )
            text = text[: text.rfind(b"\n") + 1] if self._damage else text + b"\n" * bool(text)
        self.number += text.count(b"\n")
        self._read_bytes += len(text)
        return text

    def _cut_short(self) -> Refusal:
        return self._errors.refusal(
            self.number,
            f"{self._damage} after {self.number:,} complete lines ({self._read_bytes:,} bytes of text)",
            f"Fetch it again, or keep what can be read with {SKIP_BAD}.",
        )


class TolerantGzip(io.RawIOBase):
    """The unpacked bytes of a gzip file. If the file is damaged, they end early, without an exception, and
    ``damage`` describes the damage. Raises Refusal where few bytes unpack to far too many
    (``refuse_inflated``)."""

    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        self._unpacked, self._packed, self._path = gzip.GzipFile(fileobj=file), file, path
        self._unpacked_bytes = 0
        self.damage = ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._unpacked.read1(len(buffer))
        except EOFError:
            self.damage = "the gzip is cut short"
        except (zlib.error, gzip.BadGzipFile) as error:
            self.damage = f"the gzip is corrupt ({error})"
        else:
            self._unpacked_bytes += len(data)
            packed_bytes = self._packed.tell()
            refuse_inflated(self._path, packed_bytes, self._unpacked_bytes, "unpack it first (gunzip)")
            buffer[: len(data)] = data
            return len(data)
        return 0
