"""Caches a converted corpus on disk: a folder of arrays, which is written once and memory-mapped."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._record_errors import Skipped, refuse_unreadable
from murmurate.datasets._text_files import files_of
from murmurate.datasets.corpus import Corpus
from murmurate.errors import Refusal, cause_of

_VERSION = 2
_FILES = {"corpus.json", "starts.npy", "words.npy", "counts.npy", "missing.npy", "vocabulary.json"}


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, except for ``words.npy`` and ``counts.npy``, which are in its folder."""

    lengths: NDArray[np.int64]  # [documents of the source]: distinct words; 0: not in the corpus
    vocabulary: tuple[str, ...] | None
    vocabulary_size: int
    causes: Counter[str]  # numbers of errors by cause


def folder_of(source: Path, parent: Path | None) -> Path:
    """The cache of a source: beside it, or in ``parent`` (with a hash of the source's path)."""
    if parent is None:
        return source.with_name(source.name + ".corpus")
    path_hash = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:8]
    return parent / f"{source.name}-{path_hash}.corpus"


def fingerprint(path: Path, kind: str = "text") -> list[Any]:
    """Name, size and time of a file; or the name of a folder, with a hash of the names, sizes and times of
    its files of that kind."""
    if not path.is_dir():
        status = path.stat()
        return [path.name, status.st_size, status.st_mtime_ns]
    files = hashlib.sha256()
    for file in files_of(path, kind):
        status = file.stat()
        files.update(os.fsencode(file.relative_to(path)))
        files.update(f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return [path.name, files.hexdigest()]


def digest(words: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def fetch(
    source: Path, cache: Path, key: dict[str, Any], convert: Callable[[Path], Converted]
) -> tuple[Corpus, Skipped]:
    """The memory-mapped corpus in ``cache``, which is converted first if it is missing, stale or damaged.

    key: identifies the source and the options; a cache with another key is stale. ``convert`` fills an empty
    folder, which replaces the cache atomically. Of several processes, one converts and the others wait.
    Raises Refusal if the source cannot be read, or the cache cannot be written.
    """
    key = {"version": _VERSION, **key}
    loaded = _load(cache, key)
    if loaded is None:
        with _locked(source) as locked:
            loaded = _load(cache, key)  # another process may have converted it meanwhile
            if loaded is None:
                _replace(cache, key, convert, locked)
                loaded = _load(cache, key)
    if loaded is None:
        raise Refusal(f"{cache} was removed or changed while it was written. Read the corpus again.")
    return loaded


def _replace(cache: Path, key: dict[str, Any], convert: Callable[[Path], Converted], locked: bool) -> None:
    # unlike process ids, these names differ between the hosts that share a folder
    fresh = cache.with_name(f".{cache.name}.{uuid.uuid4().hex[:12]}.tmp")
    old = fresh.with_suffix(".old.tmp")
    try:
        if cache.exists() and not (cache.is_dir() and {p.name for p in cache.iterdir()} <= _FILES):
            raise Refusal(
                f"{cache} is in the way, and no corpus. Move it, or give another folder with --cache."
            )
        cache.parent.mkdir(parents=True, exist_ok=True)
        for left_over in cache.parent.glob(f".{glob.escape(cache.name)}.*.tmp") if locked else ():
            shutil.rmtree(left_over)  # from a process that was killed
        fresh.mkdir()
        _store(fresh, key, convert(fresh))
        if _load(cache, key) is None:  # without locks, another process may have completed it meanwhile
            if cache.exists():
                cache.rename(old)
            fresh.rename(cache)
    except OSError as error:
        if _load(cache, key) is None:
            raise Refusal(
                f"{cache} cannot be written: {cause_of(error)}. A corpus is converted once to a "
                "folder of arrays; give it another folder with --cache."
            ) from error
    finally:
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)


def _store(folder: Path, key: dict[str, Any], converted: Converted) -> None:
    lengths, vocabulary = converted.lengths, converted.vocabulary
    starts = np.concatenate([[0], np.cumsum(lengths[lengths > 0])])
    np.save(folder / "starts.npy", starts)
    np.save(folder / "missing.npy", np.flatnonzero(lengths == 0))
    if vocabulary is not None:
        (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    hasher = hashlib.blake2b(json.dumps([converted.vocabulary_size, vocabulary]).encode(), digest_size=16)
    for name in ("starts", "words", "counts"):
        with open(folder / f"{name}.npy", "rb") as file:  # read from disk in pieces, to bound memory
            hasher.update(hashlib.file_digest(file, "blake2b").digest())
    description = {
        "key": key,
        "entries": int(starts[-1]),
        "vocabulary_size": converted.vocabulary_size,
        "has_vocabulary": vocabulary is not None,
        "digest": hasher.hexdigest(),
        "causes": dict(converted.causes),
    }
    (folder / "corpus.json").write_text(json.dumps(description, indent=1))


def _load(cache: Path, key: dict[str, Any]) -> tuple[Corpus, Skipped] | None:
    """(the mapped corpus, what was skipped), or None if there is no complete cache with this key."""
    try:
        stored = (cache / "corpus.json").read_text()
        description = json.loads(stored)
        if json.dumps(description["key"]) != json.dumps(key):  # as text, where 1 and 1.0 (of max_df) differ
            return None
        words = np.load(cache / "words.npy", mmap_mode="r")
        counts = np.load(cache / "counts.npy", mmap_mode="r")
        starts, missing = np.load(cache / "starts.npy"), np.load(cache / "missing.npy")
        vocabulary = None
        if description["has_vocabulary"]:
            vocabulary = tuple(json.loads((cache / "vocabulary.json").read_text()))
        size, content_digest = int(description["vocabulary_size"]), str(description["digest"])
        corpus = Corpus(starts, words, counts, vocabulary, size, content_digest)
        # another process may have replaced the cache meanwhile
        complete = len(words) == int(description["entries"]) and (cache / "corpus.json").read_text() == stored
        return (corpus, Skipped(Counter(description["causes"]), missing)) if complete else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, Refusal):
        return None


@contextmanager
def _locked(source: Path) -> Iterator[bool]:
    """Lock a source, so that one process at a time converts it. The kernel releases the lock of a process
    that dies. Yields whether the lock was taken: some file systems have no locks."""
    with refuse_unreadable(source):
        descriptor = os.open(source, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)
