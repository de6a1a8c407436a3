"""Reading ``metrics.jsonl``, following it while it grows, and removing the records after a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurate.record.kinds import is_sound
from murmurate.record.recorder import LINE_START
from murmurate.record.stored import parse, replacing, sync

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
    _warn_of_damaged(path, records)
    return [record for record in records if record is not None]


def _warn_of_damaged(path: Path | str, records: Sequence[Record | None]) -> None:
    if damaged := records.count(None):
        message = f"{path}: left out {damaged} damaged of {len(records)} lines"
        warnings.warn(message, stacklevel=3)


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
    path: Path, *, env_steps: Mapping[int, int], updates: Mapping[int, int], time_seconds: float
) -> None:
    """Remove the records later than a checkpoint, and damaged lines, with a warning.

    ``env_steps`` and ``updates`` (by replica) and ``time_seconds`` are the checkpoint's. Updates decide only
    between records of equal env steps: a replica that died and joined again goes on with a peer's number of
    updates, which may be lower than its own before. For a replica without an entry, and for the launcher's
    events, time alone decides. The file is replaced atomically. A missing file counts as empty.
    """
    if not path.exists():
        return
    *lines, incomplete = path.read_bytes().split(b"\n")
    records = [parse_line(line) for line in lines]
    _warn_of_damaged(path, records)
    kept = [
        line[line.rfind(LINE_START) :] + b"\n"
        for line, record in zip(lines, records, strict=True)
        if record is not None and not _is_later(record, env_steps, updates, time_seconds)
    ]
    if incomplete or len(kept) < len(lines):
        with replacing(path, synced=True) as fresh:
            fresh.write_bytes(b"".join(kept))
        sync(path.parent)


def _is_later(
    record: Record, env_steps: Mapping[int, int], updates: Mapping[int, int], time_seconds: float
) -> bool:
    replica = record["replica"]
    if record["time_seconds"] > time_seconds:
        return True
    if replica not in env_steps:
        return False
    made = (record.get("env_steps") or 0, record.get("updates") or 0)
    return bool(made > (env_steps[replica], updates.get(replica, made[1])))
