"""Detects the format of a corpus file by its name and its first lines."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors, refuse_unreadable
from murmurate.datasets._text_files import TEXT_KINDS, files_of
from murmurate.errors import Refusal

KINDS = ("uci", "matrix-market", "lda-c", "svmlight", "npz", *TEXT_KINDS)
_BY_NAME = {
    ".mtx": "matrix-market",
    ".mm": "matrix-market",
    ".npz": "npz",
    ".ldac": "lda-c",
    ".svm": "svmlight",
    ".svmlight": "svmlight",
    ".libsvm": "svmlight",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
_PAIRS = re.compile(rb"[^\s:#]+( +[0-9]+:[0-9.eE+-]+)* *")
_FIRST_LINES = 20


def detect_kind(path: Path) -> str:
    """One of ``KINDS``. Raises Refusal, with the kinds, where neither name nor content decides."""
    if (path / "corpus.json").exists():
        raise Refusal(f"{path} is the cache of a corpus. Name the corpus itself.")
    if path.is_dir():
        for kind_of_folder in ("text", "markdown"):
            if files_of(path, kind_of_folder):
                return kind_of_folder
        raise Refusal(f"{path} is a folder without .txt or .md files. Name a folder of documents, or a file.")
    name = path.name.lower().removesuffix(".gz")
    if name.startswith("docword."):
        return "uci"
    kind = _BY_NAME.get(Path(name).suffix) or _by_content(path, name)
    if kind is None:
        raise Refusal(
            f"The kind of {path} is not recognised. Name it with --kind (in Python kind=): "
            + ", ".join(KINDS)
            + "."
        )
    return kind


def _by_content(path: Path, name: str) -> str | None:
    with refuse_unreadable(path), open(path, "rb") as file:
        if file.read(4) == b"PK\x03\x04":
            return "npz"
    with Lines(path, RecordErrors(path, skip=False)) as lines:
        top = list(islice(iter(lines.line, None), _FIRST_LINES))
    if top and top[0].lower().startswith(b"%%matrixmarket"):
        return "matrix-market"
    if len(top) >= 3 and all(line.strip().isdigit() for line in top[:3]):
        return "uci"
    if all(_PAIRS.fullmatch(line.rstrip()) for line in top) and any(b":" in line for line in top):
        # for each line, whether it begins with the number of its pairs, as in lda-c; an SVMlight label may
        # equal that number by chance, so neither a single line nor some of several decide
        begins_with_count = [line.split(None, 1)[0] == str(line.count(b":")).encode() for line in top]
        if all(begins_with_count) and len(begins_with_count) > 1:
            return "lda-c"
        return None if any(begins_with_count) else "svmlight"
    return "text" if name.endswith((".txt", ".text")) else None
