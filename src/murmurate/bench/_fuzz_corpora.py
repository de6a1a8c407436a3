"""Damaged corpora and tables of every format, given to the functions that read them."""

from __future__ import annotations

import gzip
import io
import random
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from murmurate.bench._fuzz_process import attack as _attack
from murmurate.bench._fuzz_process import run_command
from murmurate.datasets.corpus import LARGEST_COUNT
from murmurate.datasets.generated import generate
from murmurate.datasets.reading import read
from murmurate.datasets.table import read_table
from murmurate.datasets.writing import write

_CORPORA = {
    "docword.a.txt": "uci",
    "docword.b.txt.gz": "uci",
    "c.mtx": "matrix-market",
    "d.ldac": "lda-c",
    "e.svm": "svmlight",
    "f.npz": "npz",
    "g.txt": "text",
    "h.txt.gz": "text",
}
_TABLES = ("i.npy", "j.npz", "k.csv", "l.csv.gz")
_NUMBERS = (
    b"0", b"-1", b"1e999", b"nan", b"inf", b"1000000000000000", b"99999999999999999999999999", b"2147483648",
    b"4294967295", b"1.5", b"0x10", b"1_0", "\u0663".encode(), b"", b"--", b"9" * 5_000,
)  # fmt: skip


def attack(count: int, seed: int) -> dict[str, int]:
    """Try ``count`` damaged files drawn from ``seed``; returns the number of each outcome."""
    return _attack(_attempt, cases((*_CORPORA, *_TABLES), count, random.Random(seed)))


def cases(names: Sequence[str], count: int, draw: random.Random) -> Iterator[tuple[str, int]]:
    """(name of a file, seed of its content and its damage)."""
    for _ in range(count):
        yield draw.choice(names), draw.randrange(2**32)


def _attempt(case: tuple[str, int], folder: Path) -> str:
    name, seed = case
    draw, path = random.Random(seed), folder / name
    _write(name, path, draw)
    if draw.random() < 0.05:
        _write_expensive(name, path, draw)
    else:
        damage(path, draw)
    if name in _TABLES:
        table = read_table(path)
        return "accepted" if np.isfinite(table.values).all() and len(table) else "silent"
    if draw.random() < 0.05:
        limits = ["--updates", "1", "--minutes", "0.05", "--launcher", "inline", "--topics", "2"]
        return run_command(["topics", "fit", str(path), *limits, "--out", str(folder / "run")])
    return _read(name, path, draw)


def _read(name: str, path: Path, draw: random.Random) -> str:
    kind = draw.choice((_CORPORA[name], _CORPORA[name], None, draw.choice(list(_CORPORA.values()))))
    one_based = draw.choice((True, False)) if kind in ("svmlight", "lda-c") else None
    corpus = read(path, kind=kind, skip_bad=draw.random() < 0.5, one_based=one_based)
    words, counts = np.asarray(corpus.words), np.asarray(corpus.counts)
    sound = (
        len(words)
        and 0 <= words.min() <= words.max() < corpus.vocabulary_size
        and 1 <= counts.min() <= counts.max() <= LARGEST_COUNT
        and (corpus.lengths > 0).all()
    )
    return "accepted" if sound else "silent"


def _write(name: str, path: Path, draw: random.Random) -> None:
    generator = np.random.default_rng(draw.randrange(2**32))
    if name in _TABLES:
        table = generator.normal(size=(40, 3))
        if name.endswith(".npy"):
            np.save(path, table)
        elif name.endswith(".npz"):
            np.savez_compressed(path, table=table)
        else:
            np.savetxt(path, table, delimiter=",")
        return
    generated = generate(documents=40, vocabulary=30, topics=2, mean_length=9, seed=draw.randrange(2**32))
    if _CORPORA[name] == "text":
        lines = [" ".join(f"w{chr(97 + w % 26)}" for w in words) for words in _documents(generated.corpus)]
        text = "\n".join(lines).encode() + b"\n"
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    else:
        write(generated.corpus, path, _CORPORA[name], one_based=True)


def _documents(corpus: Any) -> list[list[int]]:
    pairs = zip(corpus.starts[:-1], corpus.starts[1:], strict=True)
    return [corpus.words[a:b].tolist() for a, b in pairs]


def damage(path: Path, draw: random.Random) -> None:
    """Damage a file one to four times: flip a bit, cut off the end, remove, repeat or insert bytes, replace a
    number, or shuffle the lines."""
    # mostly damage the text inside, not the compressed bytes
    inside_gzip = path.suffix == ".gz" and draw.random() < 0.7
    data = bytearray(gzip.decompress(path.read_bytes()) if inside_gzip else path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        if draw.random() < 0.5:
            end = min(end, at + 8)
        kind = draw.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end] * draw.choice((1, 3))
        elif kind == 4:
            data[at:at] = draw.randbytes(draw.choice((1, 8, 200)))
        elif kind == 5:
            number_spans = [match.span() for match in re.finditer(rb"\d+", data[:4_000])]
            if number_spans:
                a, b = draw.choice(number_spans[:4] if draw.random() < 0.5 else number_spans)
                data[a:b] = draw.choice(_NUMBERS)
        elif kind == 6:
            lines = bytes(data).split(b"\n")
            draw.shuffle(lines)
            data = bytearray(b"\n".join(lines))
        else:
            data[at:at] = draw.choice((b"\n" * 1_000, b"\0" * 100, b" " * 1_000, "\u2028\u0301".encode()))
    path.write_bytes(gzip.compress(data) if inside_gzip else data)


def _write_expensive(name: str, path: Path, draw: random.Random) -> None:
    """Write a file that would take a careless reader far too much memory: it declares huge sizes, or unpacks
    to many equal bytes."""
    if name.endswith(".npz"):
        huge = draw.choice((10**15, 2**31, 10**9))
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<i8", "fortran_order": False, "shape": (huge,)}
        )
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member in ("data", "indices", "indptr", "shape", "format"):
                with archive.open(f"{member}.npy", "w", force_zip64=True) as file:
                    file.write(header.getvalue())
                    for _ in range(draw.choice((0, 200))):
                        file.write(bytes(1 << 20))
    elif name.endswith(".gz"):
        with gzip.open(path, "wb") as file:
            for _ in range(400):
                file.write(draw.choice((b"\n", b" ", b"0")) * (1 << 20))
    elif name.endswith((".txt", ".mtx", ".ldac", ".svm", ".csv")):
        with open(path, "wb") as file:
            first_lines = draw.choice(
                (b"", b"10\n10\n100\n", b"1000000000000000\n1000000000000000\n5\n1 1 1\n")
            )
            file.write(first_lines + b"\n" * draw.choice((10, 20_000_000)))
    else:
        with open(path, "wb") as file:
            shape = (draw.choice((10**15, 10**30)), 3)
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f8", "fortran_order": False, "shape": shape}
            )
