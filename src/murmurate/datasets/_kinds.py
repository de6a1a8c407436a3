"""The format of a file, by its name and its first lines."""

from __future__ import annotations

import re
from pathlib import Path

from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors
from murmurate.errors import Refusal

KINDS = ("uci", "matrix-market", "lda-c", "svmlight", "npz", "text")
_BY_NAME = {
    ".mtx": "matrix-market",
    ".mm": "matrix-market",
    ".npz": "npz",
    ".ldac": "lda-c",
    ".svm": "svmlight",
    ".svmlight": "svmlight",
    ".libsvm": "svmlight",
}
_PAIRS = re.compile(rb"[^\s:#]+( +[0-9]+:[0-9.eE+-]+)* *")
_LOOKED_AT = 20  # lines


def kind_of(path: Path) -> str:
    """One of ``KINDS``. Raises Refusal, with the kinds, where neither name nor content tells."""
    if (path / "corpus.json").exists():
        raise Refusal(f"{path} is what a corpus was converted to. Name the corpus itself.")
    if path.is_dir():
        if any(path.rglob("*.txt")):
            return "text"
        raise Refusal(f"{path} is a folder without .txt files, and a folder of text has some.")
    name = path.name.removesuffix(".gz")
    if name.startswith("docword."):
        return "uci"
    found = _BY_NAME.get(Path(name).suffix) or _by_content(path, name)
    if found is None:
        raise Refusal(f"Of what kind {path} is cannot be told. Say so with kind: {', '.join(KINDS)}.")
    return found


def _by_content(path: Path, name: str) -> str | None:
    if _starts_with_zip(path):
        return "npz"
    first = _first_lines(path)
    if first and first[0].lower().startswith(b"%%matrixmarket"):
        return "matrix-market"
    if len(first) >= 3 and all(line.strip().isdigit() for line in first[:3]):
        return "uci"
    if (
        first
        and all(_PAIRS.fullmatch(line.rstrip()) for line in first)
        and any(b":" in line for line in first)
    ):
        counted = [line.split(None, 1)[0] == str(line.count(b":")).encode() for line in first]
        if all(counted) and len(counted) > 1:
            return "lda-c"
        return None if any(counted) else "svmlight"
    return "text" if name.endswith((".txt", ".text")) else None


def _starts_with_zip(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror}. Check the path.") from error


def _first_lines(path: Path) -> list[bytes]:
    lines = Lines(path, RecordErrors(path, skip=False))
    found = []
    for _ in range(_LOOKED_AT):
        line = lines.line()
        if line is None:
            break
        found.append(line)
    return found
