"""Damaged CSV, JSON lines and folders of Markdown, given to the readers of ``topics fit``."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path

import numpy as np

from murmurate.bench._fuzz_corpora import cases, damage
from murmurate.bench._fuzz_process import attack as _attack
from murmurate.bench._fuzz_process import run_command
from murmurate.datasets.reading import read

NAMES = ("a.csv", "b.csv.gz", "c.tsv", "d.jsonl", "e.ndjson.gz", "pages")
_WORDS = ("river", "bank", "café", "naïve", "straße", "Ωμέγα", "don't", "x_y", "e\u0301t\u0301e", "日本語")
_SYNTAX = (
    b'"', b'""', b"'", b",", b";", b"\t", b"|", b"\r", b"\r\n", b"\\", b"{", b"}", b"[", b"\\ud800", b"null",
    b"true", b'{"text": 3}', b'{"text": "a b", "text": []}', b"\xef\xbb\xbf", b"\xff\xfe", b"`", b"```\n",
    b"~~~\n", b"---\n", b"<!--", b"<", b"](", b"![", b"> ", b"|---|\n", b"&#0;", b"&#xD800;", b"\n\n    ",
    b"* ", b"***",
)  # fmt: skip


def attack(count: int, seed: int) -> dict[str, int]:
    """Try ``count`` damaged texts drawn from ``seed``; returns the number of each outcome."""
    return _attack(_attempt, cases(NAMES, count, random.Random(seed)))


def _attempt(case: tuple[str, int], folder: Path) -> str:
    name, seed = case
    draw, path = random.Random(seed), folder / name
    _write(path, draw)
    target = draw.choice(sorted(path.rglob("*.md"))) if path.is_dir() else path
    if draw.random() < 0.1:
        _overwrite_with_syntax(target, draw)
    else:
        _insert_syntax(target, draw)
        if draw.random() < 0.7:
            damage(target, draw)
    columns = {
        "column": draw.choice(("text", "text", None, "nothing")),
        "name_column": draw.choice((None, "id", "id", "text")),
    }
    if path.is_dir():
        columns = {}
    if draw.random() < 0.2:
        return _fit_transform_show(path, folder, columns)
    corpus = read(path, skip_bad=draw.random() < 0.5, bigrams=draw.random() < 0.2, **columns)  # type: ignore[arg-type]
    words, counts = np.asarray(corpus.words), np.asarray(corpus.counts)
    sound = len(words) and 0 <= words.min() <= words.max() < corpus.vocabulary_size and counts.min() >= 1
    return "accepted" if sound else "silent"  # wrong contents without an error


def _fit_transform_show(path: Path, folder: Path, columns: dict[str, str | None]) -> str:
    """Run ``topics fit``, then ``transform`` and ``show`` on its run; returns the outcome's name."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in columns.items() if value is not None]
    run = str(folder / "run")
    limits = ["--updates", "1", "--minutes", "0.1", "--launcher", "inline", "--topics", "2", "--skip-bad"]
    outcome = run_command(["topics", "fit", str(path), *options, *limits, "--out", run])
    for words in (["transform", run, str(path), "--out", str(folder / "t.csv")], ["show", run]):
        if outcome == "accepted":
            outcome = run_command(["topics", *words])
    return outcome


def _write(path: Path, draw: random.Random) -> None:
    documents = [" ".join(draw.choices(_WORDS, k=draw.randint(3, 12))) for _ in range(30)]
    if path.name == "pages":
        for number, document in enumerate(documents):
            page = path / f"part{number % 3}" / f"{number}.md"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(
                f"---\ntitle: {number}\n---\n# {document}\n\n- *{document}* [a](b) `c`\n\n```\nx\n```\n"
            )
        return
    text = io.StringIO()
    if ".csv" in path.name or ".tsv" in path.name:
        rows = csv.writer(text, delimiter="\t" if ".tsv" in path.name else draw.choice(",;|"))
        rows.writerows(  # fields with a comma, quotes and a line break are quoted
            [("id", "text"), *((str(n), f'{document}, "so"\nit') for n, document in enumerate(documents))]
        )
    else:
        text.writelines(
            json.dumps({"id": n, "text": document}) + "\n" for n, document in enumerate(documents)
        )
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _insert_syntax(path: Path, draw: random.Random) -> None:
    """Insert syntax of one of the formats at one to four places."""
    compressed = path.suffix == ".gz"
    data = bytearray(gzip.decompress(path.read_bytes()) if compressed else path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        data[at:at] = draw.choice(_SYNTAX) * draw.choice((1, 1, 3, 200))
    path.write_bytes(gzip.compress(data) if compressed else data)


def _overwrite_with_syntax(path: Path, draw: random.Random) -> None:
    """Overwrite a file with one piece of syntax, repeated very often."""
    syntax = draw.choice(
        (*_SYNTAX, b"a,", b"[a](", b"*a ", b"[" * 10, b'{"a":', b"_", b"\n> ", b"a|b\n", b"- ")
    )
    data = b"id,text\n" * draw.choice((0, 1)) + syntax * draw.choice((1_000, 100_000))
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
