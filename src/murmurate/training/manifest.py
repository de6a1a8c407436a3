"""``state.json`` of a checkpoint: which files it has, their digests, and what the run had done by then."""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, cause_of
from murmurate.record.stored import FORMAT, read_object
from murmurate.training.run import Run

MANIFEST_NAME = "state.json"
# without path separators, so that a manifest names only files of its own folder
_PART = re.compile(r"(?P<kind>replica|replay(\.[^-/]+)?)-(?P<rank>\d{1,9})(-[^/]+)?\.safetensors")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a whole checkpoint's ``state.json`` holds. Raises Refusal with what is wrong with it."""
    try:
        manifest = read_object(checkpoint / MANIFEST_NAME)
    except FileNotFoundError:
        raise Refusal(f"{checkpoint} holds no checkpoint.") from None
    except OSError as error:
        raise Refusal(f"{checkpoint} cannot be read ({cause_of(error)}).") from None
    except ValueError as error:
        raise Refusal(f"{checkpoint}/{MANIFEST_NAME} is corrupt ({error}).") from None
    if manifest.get("package") != "murmurate":
        raise Refusal(f"{checkpoint} was not written by murmurate.")
    number = manifest.get("format")
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise Refusal(f"{checkpoint} has format {str(number)[:20]}, and this version reads up to {FORMAT}.")
    if wrong_fields := [name for name, is_valid in _FIELDS.items() if not is_valid(manifest.get(name))]:
        raise Refusal(f"{checkpoint}/{MANIFEST_NAME} is corrupt ({' and '.join(wrong_fields)}).")
    counts = manifest.get("replica_env_steps")
    if counts is not None and len(counts) != manifest["replicas"]:
        raise Refusal(f"{checkpoint}/{MANIFEST_NAME} is corrupt (replica_env_steps).")
    return {"best": None, **manifest}


def files(checkpoint: Path) -> dict[str, str]:
    """The files of a checkpoint, by name, with their digests: those that its manifest lists.

    A checkpoint that is being written has no manifest yet: its files are those that are there. Raises Refusal
    if there is a manifest that cannot be read.
    """
    if os.path.lexists(checkpoint / MANIFEST_NAME):
        listed: dict[str, str] = read_manifest(checkpoint)["parts"]
        return listed
    try:
        names = sorted(path.name for path in checkpoint.iterdir())
    except OSError:
        names = []
    return {name: "" for name in names if _PART.fullmatch(name)}


def is_part(name: str, kind: str, rank: int) -> bool:
    """Whether a file, not a chunk, is of ``kind`` (replica, replay, replay.<name>) and of ``rank``."""
    return name == f"{kind}-{rank}.safetensors"


def ranks(checkpoint: Path) -> list[int]:
    """Ranks of the members (replicas, and the centre) that have a part in a checkpoint. Raises Refusal, as
    ``files`` does."""
    matches = [match for name in files(checkpoint) if (match := _PART.fullmatch(name))]
    return sorted(int(match["rank"]) for match in matches if is_part(match[0], "replica", int(match["rank"])))


def lacks(checkpoint: Path, run: Run) -> str:
    """Whose part is missing, if the run cannot be resumed without it: "every replica" or "the centre"; ""
    if the run can be resumed."""
    present = ranks(checkpoint)
    if not any(rank < run.replicas for rank in present):
        return "every replica"
    return "the centre" if run.strategy.centre and run.replicas not in present else ""


def replay_files(checkpoint: Path, rank: int) -> dict[str, str]:
    """The files of one replica's replays, by the replay's name; without their chunks."""
    by_replay = {}
    for name in files(checkpoint):
        match = _PART.fullmatch(name)
        if match and match["kind"] != "replica" and is_part(name, match["kind"], rank):
            by_replay[match["kind"].partition(".")[2] or "replay"] = name
    return by_replay


def digest(path: Path) -> str:
    """Digest of a file's contents. Raises OSError, also for anything but a regular file."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(path)
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_counts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_count, value)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_parts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(_PART.fullmatch(name) and isinstance(digest_, str) for name, digest_ in value.items())
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "parts": _is_parts,
    "env_steps": _is_count,
    "seconds": lambda value: _is_number(value) and 0 <= value < 1e12,
    "replicas": lambda value: _is_count(value) and 0 < value < 2**31,
    "replica_env_steps": _is_counts,
    "living": _is_counts,
    "dead": _is_counts,
    "best": lambda value: value is None or _is_number(value),
    "evaluated_env_steps": lambda value: value is None or _is_count(value),
}
