"""Reading ``metrics.jsonl``, following it while it grows, and removing the records after a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murmurate.record.kinds import is_sound
from murmurate.record.recorder import LINE_START
from murmurate.record.stored import parse

Record = dict[str, Any]


def parse_line(line: bytes) -> Record | None:
    """The record in one line, or None if the line is damaged.

    If another process appended its line to the incomplete line of a killed process, the appended line is
    read.
    """
    start = line.rfind(LINE_START)
    if start < 0:
        return None
    try:
        record = parse(line[start:])
    except ValueError:
        return None
    return record if is_sound(record) else None


def read_metrics(path: Path | str) -> list[Record]:
    """All records of the file in the order written, without an incomplete last line.

    Damaged lines are left out with a warning. Raises FileNotFoundError.
    """
    *lines, _incomplete = Path(path).read_bytes().split(b"\n")
    records = [parse_line(line) for line in lines]
    damaged = records.count(None)
    if damaged:
        warnings.warn(f"{path}: left out {damaged} damaged of {len(records)} lines", stacklevel=2)
    return [record for record in records if record is not None]


class Tail:
    """Follows a growing ``metrics.jsonl``; the file need not exist yet."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._offset = 0
        self._inode = -1
        self._incomplete = b""

    def poll(self) -> list[Record]:
        """The records completed since the last call (at the first call all of them).

        Starts again from the beginning when the file was replaced or became shorter.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._incomplete = status.st_ino, 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        return [record for line in lines if (record := parse_line(line)) is not None]


def truncate_after(
    path: Path | str,
    *,
    env_steps: int | Mapping[int, int] | None = None,
    updates: Mapping[int, int] | None = None,
    time_seconds: float | None = None,
) -> int:
    """Remove the records later than a checkpoint; return how many.

    ``env_steps`` (one number, or by replica), ``updates`` (by replica) and ``time_seconds`` are the
    checkpoint's. A record is kept if it exceeds none of them; for a replica without an entry, and for the
    launcher's events, time alone decides. Damaged lines are removed too, but not counted. The file is
    replaced atomically. A missing file counts as empty. Raises ValueError if there is no limit.
    """
    if env_steps is None and time_seconds is None:
        raise ValueError("truncate_after needs env_steps, time_seconds or both")
    path = Path(path)
    if not path.exists():
        return 0
    *lines, incomplete = path.read_bytes().split(b"\n")
    kept: list[bytes] = []
    dropped = 0
    for line in lines:
        record = parse_line(line)
        if record is None:
            continue
        if _is_later(record, env_steps, updates or {}, time_seconds):
            dropped += 1
        else:
            kept.append(line[line.rfind(LINE_START) :] + b"\n")
    if dropped or incomplete or len(kept) < len(lines):
        _replace(path, b"".join(kept))
    return dropped


def _is_later(
    record: Record,
    env_steps: int | Mapping[int, int] | None,
    updates: Mapping[int, int],
    time_seconds: float | None,
) -> bool:
    if time_seconds is not None and record["time_seconds"] > time_seconds:
        return True
    replica = record["replica"]
    if replica in updates and (record.get("updates") or 0) > updates[replica]:
        return True
    if env_steps is None or replica is None:
        return False
    limit = env_steps.get(replica) if isinstance(env_steps, Mapping) else env_steps
    return limit is not None and (record.get("env_steps") or 0) > limit


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
