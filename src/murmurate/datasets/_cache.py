"""A converted corpus on disk: a folder of arrays that processes map, made once."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._record_errors import Skipped
from murmurate.datasets.corpus import Corpus
from murmurate.errors import Refusal

_VERSION = 2
_FILES = {"corpus.json", "starts.npy", "words.npy", "counts.npy", "missing.npy", "vocabulary.json"}


@dataclass(frozen=True)
class Converted:
    """What a conversion leaves beside ``words.npy`` and ``counts.npy`` in its folder."""

    lengths: NDArray[np.int64]  # [documents of the source]: 0 where the corpus has none
    vocabulary: tuple[str, ...] | None
    vocabulary_size: int
    causes: Counter[str]


def place(source: Path, folder: Path | None) -> Path:
    """The cache of a source: beside it, or below ``folder`` (told apart from that of a namesake)."""
    if folder is None:
        return source.with_name(source.name + ".corpus")
    mark = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    return folder / f"{source.name}-{mark}.corpus"


def fingerprint(path: Path) -> list[Any]:
    """What changes with a file, or with the ``.txt`` files below a folder: names, sizes and times."""
    if not path.is_dir():
        status = path.stat()
        return [path.name, status.st_size, status.st_mtime_ns]
    found = hashlib.sha256()
    for file in sorted(path.rglob("*.txt")):
        status = file.stat()
        found.update(f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return [path.name, found.hexdigest()]


def digest(words: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def fetch(
    source: Path, cache: Path, key: dict[str, Any], convert: Callable[[Path], Converted]
) -> tuple[Corpus, Skipped]:
    """The corpus in ``cache``, mapped; converted first where it is missing, stale or damaged.

    ``convert`` fills an empty folder, which takes its place in one step. Of several processes one converts
    and the others wait. Raises Refusal where nothing can be written.
    """
    key = {"version": _VERSION, **key}
    found = _load(cache, key)
    if found is not None:
        return found
    with _locked(source) as alone:
        found = _load(cache, key)  # another process may have been faster
        if found is None:
            _make(cache, key, convert, alone)
            found = _load(cache, key)
    if found is None:
        raise Refusal(f"{cache} was removed or changed as it was made. Read the corpus again.")
    return found


def _make(cache: Path, key: dict[str, Any], convert: Callable[[Path], Converted], alone: bool) -> None:
    _refuse_a_stranger(cache)
    fresh = cache.with_name(f".{cache.name}.{os.getpid()}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        for left in cache.parent.glob(f".{glob.escape(cache.name)}.*.tmp") if alone else ():
            shutil.rmtree(left)  # by one that was killed
        fresh.mkdir()
        _store(fresh, key, convert(fresh))
        if cache.exists():
            old = cache.with_name(f".{cache.name}.{os.getpid()}.old.tmp")
            cache.rename(old)
            fresh.rename(cache)
            shutil.rmtree(old)
        else:
            fresh.rename(cache)
    except OSError as error:
        raise Refusal(
            f"{cache} cannot be written: {error.strerror}. A corpus is converted once to a folder of arrays; "
            "give it another place with cache."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _refuse_a_stranger(cache: Path) -> None:
    """What is no cache is not deleted."""
    if cache.exists() and not (cache.is_dir() and {p.name for p in cache.iterdir()} <= _FILES):
        raise Refusal(f"{cache} is in the way, and no corpus. Move it, or give another place with cache.")


def _store(folder: Path, key: dict[str, Any], made: Converted) -> None:
    kept = np.flatnonzero(made.lengths)
    starts = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(made.lengths[kept], out=starts[1:])
    np.save(folder / "starts.npy", starts)
    np.save(folder / "missing.npy", np.flatnonzero(made.lengths == 0))
    if made.vocabulary is not None:
        (folder / "vocabulary.json").write_text(json.dumps(made.vocabulary))
    about = {
        "key": key,
        "entries": int(starts[-1]),
        "vocabulary_size": made.vocabulary_size,
        "has_vocabulary": made.vocabulary is not None,
        "digest": _digest_of(folder, made),
        "causes": dict(made.causes),
    }
    (folder / "corpus.json").write_text(json.dumps(about, indent=1))


def _digest_of(folder: Path, made: Converted) -> str:
    """Of what documents there are, over which words; read from the files, so that memory stays bounded."""
    found = hashlib.blake2b(json.dumps([made.vocabulary_size, made.vocabulary]).encode(), digest_size=16)
    for name in ("starts", "words", "counts"):
        with open(folder / f"{name}.npy", "rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def _load(cache: Path, key: dict[str, Any]) -> tuple[Corpus, Skipped] | None:
    """Mapped, or None where there is no whole cache of this key."""
    try:
        stored = (cache / "corpus.json").read_text()
        about = json.loads(stored)
        if json.dumps(about["key"]) != json.dumps(key):  # as text: 1 of 1 document is not 1.0 of all
            return None
        words = np.load(cache / "words.npy", mmap_mode="r")
        counts = np.load(cache / "counts.npy", mmap_mode="r")
        starts, missing = np.load(cache / "starts.npy"), np.load(cache / "missing.npy")
        vocabulary = None
        if about["has_vocabulary"]:
            vocabulary = tuple(json.loads((cache / "vocabulary.json").read_text()))
        size, mark = int(about["vocabulary_size"]), str(about["digest"])
        corpus = Corpus(starts, words, counts, vocabulary, size, mark)
        # not so if another process puts a new one in its place meanwhile
        whole = len(words) == int(about["entries"]) and (cache / "corpus.json").read_text() == stored
        return (corpus, Skipped(Counter(about["causes"]), missing)) if whole else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, Refusal):
        return None


@contextmanager
def _locked(source: Path) -> Iterator[bool]:
    """One process converts a source at a time; the kernel lets go with the one that holds it. Yields
    whether that is so: some file systems know no locks."""
    descriptor = os.open(source, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(descriptor)
