"""Whether files of the user's own, of which run.json stores digests, are as they were when a run began."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from murmurate import plugins
from murmurate.record.stored import UNSOUND, read_object
from murmurate.worlds.modules import folder_of

# settings that may name a class or function of the user's own, as ``FILE.py:NAME`` or ``module:NAME``
_NAMES = frozenset({"target", "id", "torso", "network", "termination"})


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each file of the user's own that a run's ``settings`` (see ``run_folder.plain``) name,
    by its path: environment, torso, network, termination, and what ``--import`` names. Modules that are
    installed are left out, and so are files that these import.
    """
    sources = [name.rpartition(":")[0] for name in _names(settings)] + plugins.imports()
    paths = {path for source in sources if (path := _path(source))}
    return {path: digest for path in sorted(paths) if (digest := _digest(path))}


def stored_digests(folder: Path) -> dict[str, str]:
    """What ``digests`` returned when the run in ``folder`` was written; empty if that cannot be read."""
    try:
        return {str(path): str(digest) for path, digest in read_object(folder / "run.json")["files"].items()}
    except (OSError, AttributeError, *UNSOUND):
        return {}


def changed(folders: Iterable[Path], settings: Mapping[str, Any]) -> list[str]:
    """The files of ``settings`` that are not as they were when one of the runs in ``folders`` was written."""
    now = digests(settings)
    earlier = [stored_digests(folder) for folder in folders] if now else []
    return [path for path, digest in now.items() if any(each.get(path, digest) != digest for each in earlier)]


def differing(folders: Iterable[Path]) -> list[str]:
    """The files that were not the same when the runs in ``folders`` were written."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path, digest in stored_digests(folder).items():
            found.setdefault(path, set()).add(digest)
    return sorted(path for path, digests in found.items() if len(digests) > 1)


def warn_of_changes(folder: Path, settings: Mapping[str, Any]) -> None:
    """Warn of files that are ``changed``."""
    if paths := changed([folder], settings):
        has = "has" if len(paths) == 1 else "have"
        warnings.warn(
            f"{' and '.join(paths)} {has} changed since the run in {folder} began. The present content is "
            "used: unless the change affects neither the environment nor the net, restore the former one.",
            stacklevel=3,
        )


def _names(settings: Any) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if key in _NAMES and isinstance(value, str):
                yield value
            yield from _names(value)


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
