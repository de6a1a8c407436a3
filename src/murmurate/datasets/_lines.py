"""Whole lines of a file, plain or gzip, some at a time, with their numbers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

from murmurate.datasets._record_errors import RecordErrors
from murmurate.errors import Refusal

CHUNK_BYTES = 1 << 18  # what is made of a chunk fits a core's cache
_LONGEST_BYTES = 1 << 26
Found = TypeVar("Found")
_GZIP = b"\x1f\x8b"
_BY_HAND = 64  # lines in which a fault is looked for one by one
_PADDING = re.compile(rb"[ \t]*\r?\n[ \t]*")
_SPACES = re.compile(rb"[ \t]+")


class Lines:
    """The lines of a file: first a header, line by line, then the rest in chunks."""

    def __init__(self, path: Path, errors: RecordErrors) -> None:
        self.number = 0  # of lines handed out
        self._errors = errors
        self._read_bytes = 0
        self._cut = ""
        self._rest = b""
        self._blocks = self._open(path)

    def _open(self, path: Path) -> Iterator[bytes]:
        try:
            with open(path, "rb") as file:
                head = file.read(2)
                file.seek(0)
                yield from (
                    self._inflated(file) if head == _GZIP else iter(lambda: file.read(CHUNK_BYTES), b"")
                )
        except OSError as error:
            raise Refusal(f"{path} cannot be read: {error.strerror}. Check the path.") from error

    def _inflated(self, file: BinaryIO) -> Iterator[bytes]:
        """The text of all members; notes in ``_cut`` where it ends too early."""
        member, packed = zlib.decompressobj(31), b""
        while True:
            packed = packed or file.read(CHUNK_BYTES)
            if not packed:
                self._cut = "the gzip is cut short"
                return
            try:
                text = member.decompress(packed, CHUNK_BYTES)
            except zlib.error as error:
                self._cut = f"the gzip is corrupt ({error})"
                return
            packed = member.unconsumed_tail
            if text:
                yield text
            if member.eof:
                packed = (member.unused_data or file.read(CHUNK_BYTES)).lstrip(b"\0")
                if not packed:
                    return
                member = zlib.decompressobj(31)

    def line(self) -> bytes | None:
        """The next line without its end, or None after the last."""
        while b"\n" not in self._rest:
            block = next(self._blocks, None)
            if block is None:
                if self._cut:
                    raise self._ended()
                last, self._rest = self._rest, b""
                self.number += bool(last)
                return last or None
            self._rest += block
            self._limit(len(self._rest))
        text, self._rest = self._rest.split(b"\n", 1)
        self.number += 1
        self._read_bytes += len(text) + 1
        return text.rstrip(b"\r")

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """(number of the first line, whole lines, each with its end), of the rest of the file.

        A file that ends too early is a fault after its last whole line.
        """
        parts: list[bytes] = []
        for block in chain([self._rest], self._blocks):
            end = block.rfind(b"\n") + 1
            if end:
                yield self._counted(b"".join([*parts, block[:end]]))
                parts = []
            parts.append(block[end:])
            self._limit(sum(map(len, parts)))
        last = b"".join(parts)
        if last and not self._cut:
            yield self._counted(last + b"\n")
        if self._cut and not self._errors.skip:
            raise self._ended()
        self._errors.skipped.causes.update(["gzip cut short"] if self._cut else [])

    def _counted(self, chunk: bytes) -> tuple[int, bytes]:
        first = self.number + 1
        self.number += chunk.count(b"\n")
        self._read_bytes += len(chunk)
        return first, chunk

    def _limit(self, size_bytes: int) -> None:
        if size_bytes > _LONGEST_BYTES:
            raise self._errors.refusal(
                self.number + 1, "the line has more than 64 MB", "Is the file of the kind it was read as?"
            )

    def _ended(self) -> Refusal:
        return self._errors.refusal(
            self.number,
            f"{self._cut} after {self.number:,} whole lines ({self._read_bytes:,} bytes of text)",
            "Fetch it again, or keep what is there with skip_bad.",
        )


def single_spaced(chunk: bytes) -> bytes:
    """The same lines with one space between fields and none around them."""
    if b"\t" in chunk or b"  " in chunk or b" \n" in chunk or b"\n " in chunk or b"\r" in chunk:
        chunk = _SPACES.sub(b" ", _PADDING.sub(lambda match: b"\n", chunk))
    return chunk.lstrip(b" ")


def found_in(
    first: int,
    chunk: bytes,
    fast: Callable[[bytes], Found | None],
    slow: Callable[[int, bytes], Found],
) -> Iterator[Found]:
    """What ``fast`` finds in a chunk, as it is or with single spaces; where that is None, in its halves;
    and in the smallest of them what ``slow`` finds line by line (it takes the number of the first one)."""
    found = fast(chunk)
    if found is not None:
        yield found
    else:
        yield from _in_halves(first, single_spaced(chunk), fast, slow)


def _in_halves(
    first: int,
    chunk: bytes,
    fast: Callable[[bytes], Found | None],
    slow: Callable[[int, bytes], Found],
) -> Iterator[Found]:
    found = fast(chunk)
    middle = chunk.find(b"\n", len(chunk) // 2) + 1
    if found is not None:
        yield found
    elif chunk.count(b"\n") <= _BY_HAND or middle == len(chunk):
        yield slow(first, chunk)
    else:
        yield from _in_halves(first, chunk[:middle], fast, slow)
        yield from _in_halves(first + chunk[:middle].count(b"\n"), chunk[middle:], fast, slow)
