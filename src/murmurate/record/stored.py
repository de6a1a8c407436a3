"""The JSON files of a run folder: written with a checksum, and checked when they are read.

A run folder may be damaged, changed by hand, or somebody else's. So a file is read only if it is a regular
file, not very large and not deeply nested, and if its checksum matches. Files older than the checksums
(with ``format`` 1, or without ``format``) are read without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, cause_of

# The format of run.json and state.json. Since 2 they have a checksum; since 3 a world may hide a rectangle of
# its images; since 4 a replica may be split into parts, and a Gymnasium environment may have a process of its
# own; since 5 a replay may be in hardware; for 6 see docs/decisions/0036; since 7 a run may start from the
# parameters of another, and since 8 from some of them; since 9 td3, sac and ddpg take nets of the user's own,
# and a table may be read in part; since 10 image classifiers may weight their classes.
FORMAT = 10
_CHECKSUMS_SINCE = 2
CHECKSUM = "checksum"
# exceptions that code raises when given values of other types or sizes than it expects
UNSOUND = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
_MOST_BYTES = 256 * 2**20
_DEEPEST = 100  # levels of nesting


@contextlib.contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[Path]:
    """A file beside ``path`` that takes its place at the end: a reader sees the old content or the new one.

    synced: it is on the disk before. If anything is raised, ``path`` stays, and the file is removed; an
    OSError that names no file (writing to a full disk raises one) then names ``path``.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        yield fresh
        if synced:
            sync(fresh)
        os.replace(fresh, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        with contextlib.suppress(OSError):  # on a read-only disk it would hide what was raised
            fresh.unlink()
        raise


@contextlib.contextmanager
def in_usual_mode(path: Path) -> Iterator[None]:
    """For a library that makes ``path`` anew and lets only its owner read it (safetensors does): at the end
    the file has the mode of any other new file, so that those who share the folder can read it too."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    yield
    if path.stat().st_mode != mode:
        path.chmod(mode)


def output(path: Path) -> contextlib.AbstractContextManager[Path]:
    """As ``replacing``, for a path that the user named: a link stays, and the file that it leads to is
    replaced; a pipe or a device is written to itself."""
    if path.exists() and not path.is_file():
        return contextlib.nullcontext(path)
    return replacing(Path(os.path.realpath(path)))


def sync(path: Path) -> None:
    """Return once the file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(value: dict[str, Any], name: str) -> dict[str, Any]:
    """``value`` as it is after a round trip through JSON, with its checksum for a file called ``name``."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    plain.pop(CHECKSUM, None)
    return {**plain, CHECKSUM: _checksum(plain, name)}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value``, with its checksum, atomically: a reader sees the old file or the new one."""
    with replacing(path, synced=True) as fresh:
        fresh.write_text(json.dumps(seal(value, path.name), indent=1) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, without its checksum. Raises OSError, and ValueError with the cause for a
    file that is not as this package wrote it."""
    value = parse(_content(path))
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    written = value.pop(CHECKSUM, None)
    if written is None:
        file_format = value.get("format")
        if isinstance(file_format, int) and file_format >= _CHECKSUMS_SINCE:
            raise ValueError(f"it has no {CHECKSUM}")
    elif written != _checksum(value, path.name):
        raise Changed("it was changed after it was written: its checksum does not match")
    return value


class Changed(ValueError):
    """Valid JSON, but not what was written."""


def parse(text: bytes | str) -> Any:
    """JSON from a run folder. Raises ValueError for other content, and for JSON that is nested too deeply."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text or "\\uD" in text:  # there may be half of a surrogate pair, which cannot be printed
        json.dumps(value, ensure_ascii=False).encode()
    layer = [value]  # the values at one depth
    for _ in range(_DEEPEST):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return value
    raise ValueError("it is nested too deeply")


def refuse_foreign(folder: Path) -> None:
    """Raise Refusal for a run folder with a link out of it, or anything but files and folders.

    Reading a pipe or a device may never end, and writing through a link changes a file outside the folder.
    A folder without a ``run.json`` is refused as such, and not searched: its links and pipes are not ours.
    Nor is its folder ``wandb``, where Weights & Biases makes links to its logs, and murmurate reads nothing.
    """
    try:
        holds_run = (folder / "run.json").is_file()
    except OSError as error:
        raise Refusal(
            f"{folder} holds no run that can be read ({cause_of(error)}). Check the path."
        ) from None
    if not holds_run and (folder / "sweep.json").is_file():
        raise Refusal(
            f"{folder} is a sweep over seeds, and this needs one run: give a folder in it, such as "
            f"{folder / 'seed-0'}. To go on with the sweep, give the command that began it again."
        )
    if not holds_run and (folder / "study.json").is_file():
        raise Refusal(
            f"{folder} is a study of murmurate tune, and this needs runs: give its trials, such as "
            f"{folder / 'trial-0000'}."
        )
    if not holds_run and not folder.is_dir():
        raise Refusal(f"There is no folder {folder}; give the folder that murmurate train wrote (its --out).")
    if not holds_run:
        inside = next(iter(sorted(folder.glob("*/run.json"))), None)
        such_as = f", such as {inside.parent}" if inside is not None else ""
        raise Refusal(
            f"{folder} holds no run: it has no run.json; give a folder that murmurate train wrote{such_as}."
        )
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:  # a run in progress removed it
                continue
            if stat.S_ISLNK(mode):
                if not os.path.realpath(path).startswith(root + os.sep):
                    raise Refusal(
                        f"{path} is a link out of the run folder. Put what it leads to in its place, if you "
                        "trust it."
                    )
            elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise Refusal(
                    f"{path} is neither a file nor a folder, so murmurate has not made it. Remove it."
                )
        if parent == root and "wandb" in folders:
            folders.remove("wandb")


def _content(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"it has {status.st_size:,} bytes")
        return file.read()


def _checksum(plain: dict[str, Any], name: str) -> str:
    text = name + json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
