"""Which files of a folder are its documents."""

from __future__ import annotations

from pathlib import Path

# kinds of corpus whose words are found by the tokeniser, and the files that a folder of the kind consists of
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (".txt",),
    "markdown": (".md", ".markdown", ".txt"),
    "csv": (),
    "jsonl": (),
}
TEXT_KINDS = tuple(SUFFIXES)


def files_of(folder: Path, kind: str) -> list[Path]:
    """The files of a folder that are documents of a kind, in the order of their paths."""
    found = {path for suffix in SUFFIXES.get(kind, ()) for path in folder.rglob(f"*{suffix}")}
    return sorted(found)
