"""Which files of a folder are documents."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from murmurate.datasets._files import is_clutter
from murmurate.errors import cause_of

# kind of text corpus -> suffixes of the documents in a folder of that kind; none: it is a file, not a folder
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (".txt",),
    "markdown": (".md", ".markdown", ".txt"),
    "csv": (),
    "jsonl": (),
}
TEXT_KINDS = tuple(SUFFIXES)


def files_of(folder: Path, kind: str) -> list[Path]:
    """The files of a folder that are documents of a kind, whatever the case of their suffix, in the order of
    their paths. Hidden files and folders, and links to nothing, are passed over; a folder that may not be
    listed is left out with a warning."""
    suffixes = SUFFIXES.get(kind, ())
    found: list[Path] = []

    def left_out(error: OSError) -> None:
        warnings.warn(f"{error.filename} is left out: {cause_of(error)}", stacklevel=3)

    for parent, folders, files in os.walk(folder, onerror=left_out):
        folders[:] = [name for name in folders if not is_clutter(name)]
        shown = (name for name in files if not is_clutter(name))
        found += [Path(parent, name) for name in shown if name.lower().endswith(suffixes)]
    return sorted(path for path in found if path.is_file())
