"""The members of an uncompressed tar file: their names and where their bytes are. Nothing is unpacked.

Python's ``tarfile`` keeps an object of several hundred bytes for each member, and takes three times as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK = 512
_AHEAD = 4096  # bytes read at each header, so that small members are read with it
_LONGEST_EXTENSION = 1 << 16  # most bytes of a long name, or of an extended header
_FILES = b"0\0"  # type flags of ordinary files
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class TarError(ValueError):
    """A damaged tar file. The message says what is wrong, and at which byte."""


class CompressedTar(TarError):
    """A compressed tar file. The message names the program that unpacks it."""


class TarMember(NamedTuple):
    """A file in a tar file. name: includes its folder. offset, size: where its bytes are in the tar file.
    content: its bytes, if they are few; else None."""

    name: bytes
    offset: int
    size: int
    content: bytes | None


def members(path: Path) -> Iterator[TarMember]:
    """The ordinary files in a tar file, in order. Raises CompressedTar for a compressed one, OSError if it
    cannot be read, and TarError if it is damaged or truncated, after it has yielded the members before the
    damage. A tar file that was cut between two members counts as whole."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from _members(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def name_at(path: Path, offset: int) -> bytes | None:
    """The name of the member whose bytes begin at ``offset``; None if there is none, or the tar file cannot
    be read. Reads one header; those before it only where that one may not have the whole name."""
    try:
        with open(path, "rb") as file:
            file.seek(offset - _BLOCK)
            head = file.read(_BLOCK)
        if head[99:100] == b"\0" and b"?" not in head[:100]:  # tarfile writes ? for other letters than ASCII
            return _name(head)
        return next((member.name for member in members(path) if member.offset == offset), None)
    except (TarError, OSError):
        return None


def _members(descriptor: int, length: int) -> Iterator[TarMember]:
    place = 0
    long_name: bytes | None = None
    long_size: int | None = None
    while place < length:
        block = os.pread(descriptor, _AHEAD, place)
        head = block[:_BLOCK]
        is_sound = _has_its_checksum(head)
        if not place and not is_sound:
            _refuse_compressed(head)
        if len(head) < _BLOCK:
            raise TarError(f"it ends within a header, at byte {place:,}")
        if head.count(0) == _BLOCK:  # zeros: the end, or padding
            place += _BLOCK
            continue
        size, first, kind = _number(head[124:136]), place + _BLOCK, head[156:157]
        if size < 0 or not is_sound:
            raise TarError(f"the header at byte {place:,} is damaged")
        if long_size is not None and kind not in b"xgLK":
            size, long_size = long_size, None
        if first + size > length:
            raise TarError(f"it ends within the member at byte {place:,}")
        if kind in b"xL":
            if size > _LONGEST_EXTENSION:
                raise TarError(f"the long name or extended header at byte {place:,} has {size:,} bytes")
            extra = os.pread(descriptor, size, first)
            if kind == b"L":
                long_name = extra.rstrip(b"\0")
            else:
                values = _extended(extra, place)
                long_name = values.get(b"path", long_name)
                long_size = int(values[b"size"]) if b"size" in values else None
        else:
            name = long_name or _name(head)
            if kind in _FILES and not name.endswith(b"/"):  # old formats mark folders by a slash alone
                content = block[_BLOCK : _BLOCK + size]
                is_complete = len(content) == size
                yield TarMember(name, first, size, content if is_complete else None)
            long_name = None
        place = first + -(-size // _BLOCK) * _BLOCK


def _has_its_checksum(head: bytes) -> bool:
    return _number(head[148:156]) == sum(head) - sum(head[148:156]) + 8 * 32


def _refuse_compressed(beginning: bytes) -> None:
    """Raise CompressedTar for the beginning of a compressed file. Not for tar headers: the name in one may
    begin with the same letters."""
    for magic, program in _COMPRESSED.items():
        if beginning.startswith(magic):
            raise CompressedTar(
                f"it is compressed ({program}), and single images cannot be read from it. Unpack it into "
                f"another file: {program} -dc COMPRESSED > UNPACKED"
            )


def _name(head: bytes) -> bytes:
    name, prefix = head[:100].partition(b"\0")[0], b""
    if head[257:263] == b"ustar\0":  # GNU's own format has no prefix there
        prefix = head[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name


def _number(digits: bytes) -> int:
    """The value of a field of a header: binary if its first bit is set, else octal; -1 if it is neither."""
    if digits[:1] and digits[0] & 0x80:
        return int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    text = digits.strip(b" \0")
    try:
        return int(text or b"0", 8)
    except ValueError:
        return -1  # no header's checksum and no size, so that the header counts as damaged


def _is_number(digits: bytes) -> bool:
    return digits.isdigit() and len(digits) <= 20  # int() refuses more than 4300 digits


def _extended(text: bytes, place: int) -> dict[bytes, bytes]:
    """The values by key of the records ``length key=value`` of an extended header (POSIX.1-2001)."""
    values = {}
    while text:
        digits, _, _ = text.partition(b" ")
        if not _is_number(digits) or not len(digits) < int(digits) <= len(text):
            raise TarError(f"the extended header at byte {place:,} is damaged")
        key, _, value = text[len(digits) + 1 : int(digits) - 1].partition(b"=")
        values[key], text = value, text[int(digits) :]
    if not _is_number(values.get(b"size", b"0")):
        raise TarError(f"the extended header at byte {place:,} is damaged")
    return values
