"""Whether files of the user's own, of which run.json stores digests, are as they were when a run began."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from murmurate import plugins
from murmurate.record.stored import UNSOUND, read_object
from murmurate.training.run import Run
from murmurate.worlds.modules import folder_of

# settings that may name a class or function of the user's own, as ``FILE.py:NAME`` or ``module:NAME``
_NAMES = frozenset({"target", "id", "torso", "network", "termination"})

# packages whose classes are not the user's own; a script is changed for its settings too
_NOT_OWN = frozenset({"murmurate", "__main__", *sys.stdlib_module_names})


def digests(run: Run) -> dict[str, str]:
    """The SHA-256 of each file of the user's own that a run needs, by its path.

    These are the files of its parts' classes (strategy, learner, source, world, evaluation) that are not
    murmurate's, those of what it names (environment, torso, network, termination), and those of
    MURMURATE_IMPORT. Left out are modules that are named and installed, files that all these import, and the
    script that this process runs, for the classes that it defines.
    """
    parts = list(_parts(run))
    named = [name.rpartition(":")[0] for part in parts for name in _names(part)]
    paths = {path for source in [*named, *plugins.imports()] if (path := _path(source))}
    paths |= {path for part in parts for path in _class_files(type(part))}
    return {path: digest for path in sorted(paths) if (digest := _digest(path))}


def stored_digests(folder: Path) -> dict[str, str]:
    """What ``digests`` returned when the run in ``folder`` was written; empty if that cannot be read."""
    try:
        return {str(path): str(digest) for path, digest in read_object(folder / "run.json")["files"].items()}
    except (OSError, AttributeError, *UNSOUND):
        return {}


def changed(folders: Iterable[Path], run: Run) -> list[str]:
    """The files of ``run`` that are not as they were when one of the runs in ``folders`` was written."""
    now = digests(run)
    earlier = [stored_digests(folder) for folder in folders] if now else []
    return [path for path, digest in now.items() if any(each.get(path, digest) != digest for each in earlier)]


def differing(folders: Iterable[Path]) -> list[str]:
    """The files that were not the same when the runs in ``folders`` were written."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path, digest in stored_digests(folder).items():
            found.setdefault(path, set()).add(digest)
    return sorted(path for path, digests in found.items() if len(digests) > 1)


def warn_of_changes(folder: Path, run: Run) -> None:
    """Warn of files that are ``changed``."""
    if paths := changed([folder], run):
        has = "has" if len(paths) == 1 else "have"
        warnings.warn(
            f"{' and '.join(paths)} {has} changed since the run in {folder} began. The present content is "
            "used: unless the change has no effect on the run, restore the former one.",
            stacklevel=3,
        )


def _parts(value: Any) -> Iterator[Any]:
    """``value``, if it is a dataclass, and the dataclasses in it."""
    if isinstance(value, (list, tuple)):
        for element in value:
            yield from _parts(element)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        for name in _settings(value):
            yield from _parts(getattr(value, name))


def _settings(part: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(part) if field.init]  # others are set as it is used


def _names(part: Any) -> Iterator[str]:
    for name in _NAMES.intersection(_settings(part)):
        if isinstance(value := getattr(part, name), str):
            yield value


def _class_files(part: type) -> Iterator[str]:
    """The files of a class and its bases, without those of murmurate and of Python."""
    for each in part.__mro__:
        file = getattr(sys.modules.get(each.__module__), "__file__", None)
        if file and each.__module__.partition(".")[0] not in _NOT_OWN:
            yield os.path.abspath(file)


def _path(source: str) -> str:
    """The file of ``FILE.py`` or of an imported module that is not installed; else an empty text."""
    if source.endswith(".py"):
        return os.path.abspath(source)
    module = sys.modules.get(source)
    file = getattr(module, "__file__", None)
    return os.path.abspath(file) if module is not None and file and folder_of(source, module) else ""


def _digest(path: str) -> str:
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""
