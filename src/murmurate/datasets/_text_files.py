"""Which files of a folder are documents."""

from __future__ import annotations

from pathlib import Path

from murmurate.datasets._files import is_clutter

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
    their paths. Hidden files and folders, and links to nothing, are passed over."""
    suffixes = SUFFIXES.get(kind, ())
    files = (path for path in folder.rglob("*") if path.name.lower().endswith(suffixes))
    shown = (path for path in files if not any(map(is_clutter, path.relative_to(folder).parts)))
    return sorted(path for path in shown if path.is_file())
