"""``murmurate topics transform`` and ``evaluate``: topics of documents as a table, and figures of quality."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from murmurate.cli.topics import READING_OPTIONS, OtherCorpus, load, other_corpus, writing
from murmurate.cli.topics_figures import explained
from murmurate.datasets.corpus import Corpus, RemappedCorpus
from murmurate.datasets.reading import Skipped
from murmurate.errors import MissingExtra, Refusal
from murmurate.evaluation.held_out import perplexities

_SUFFIXES = (".csv", ".npz", ".parquet")
_MOST_NAMED = 3  # documents without a row that are named


def transform_command(options: argparse.Namespace, rest: list[str]) -> int:
    out: Path | None = options.out
    if out is None and not options.csv:
        raise Refusal("Say where to write, as in --out topics.csv; --csv alone prints the table.")
    suffix = ".csv" if options.csv or out is None else out.suffix
    if suffix not in _SUFFIXES:
        raise Refusal(f"--out {out} ends in none of {', '.join(_SUFFIXES)}. Use one of them, or add --csv.")
    if out is not None and not out.resolve().parent.is_dir():  # checked before the work is done
        raise Refusal(f"There is no folder {out.resolve().parent} to write to. Make it first.")
    fitted = load(options.folder)
    corpus = other_corpus(fitted, options)
    weights = fitted.topics.transform(corpus.documents)
    if out is None:
        _write_csv(sys.stdout, corpus, weights)
    else:
        _write_file(out, suffix, corpus, weights)
        print(f"{len(weights):,} documents x {weights.shape[1]} topics in {out}")
    if corpus.skipped.causes or len(corpus.skipped.documents):
        column = _key(corpus) if suffix == ".csv" else f"{_key(corpus)}s"  # as in ``_columns``
        remark = f"{corpus.skipped}; the column {column} says which row is which{_missing_remark(corpus)}"
        print(remark, file=sys.stderr if out is None else sys.stdout)  # the table has standard output
    return 0


def _write_file(out: Path, suffix: str, corpus: OtherCorpus, weights: NDArray[np.float32]) -> None:
    with writing(out) as fresh:
        if suffix == ".csv":
            with open(fresh, "w", encoding="utf-8", newline="") as file:
                _write_csv(file, corpus, weights)
        elif suffix == ".npz":
            with open(fresh, "wb") as arrays:  # to a path without .npz numpy would add it
                np.savez_compressed(arrays, topics=weights, **_columns(corpus))
        else:
            _write_parquet(fresh, weights, _columns(corpus))


def _key(corpus: OtherCorpus) -> str:
    """The column that says which document a row is about."""
    return "name" if corpus.texts is not None and corpus.texts.has_names else "document"


def _names(corpus: OtherCorpus, numbers: NDArray[np.int64]) -> Iterator[str]:
    """The names of the documents with these numbers, in ascending order."""
    wanted = set(numbers.tolist())
    names = enumerate(corpus.texts.names() if corpus.texts is not None else ())
    named = (name for number, name in names if number in wanted)
    return itertools.islice(named, len(wanted))  # reads no further than the last one


def _missing_remark(corpus: OtherCorpus) -> str:
    """The first documents that have no row, as a remark."""
    if _key(corpus) != "name" or not len(corpus.skipped.documents):
        return ""
    names = list(_names(corpus, np.sort(corpus.skipped.documents)[:_MOST_NAMED]))
    more = "" if len(corpus.skipped.documents) <= _MOST_NAMED else ", ..."
    return f" (without a row: {', '.join(names)}{more})"


def _write_csv(file: TextIO, corpus: OtherCorpus, weights: NDArray[np.float32]) -> None:
    """A row for each document: its name where it has one, its number in the source from 0, and its topics."""
    rows = csv.writer(file, lineterminator="\n")
    has_names = _key(corpus) == "name"
    topics = [f"topic_{k}" for k in range(weights.shape[1])]
    rows.writerow([*["name"] * has_names, "document", *topics])
    names = _names(corpus, corpus.numbers) if has_names else iter(())
    for number, shares in zip(corpus.numbers.tolist(), weights, strict=True):
        name = [next(names)] if has_names else []
        rows.writerow([*name, number, *(f"{share:.6g}" for share in shares.tolist())])


def _columns(corpus: OtherCorpus) -> dict[str, Any]:
    """The columns that identify rows."""
    columns: dict[str, Any] = {"documents": corpus.numbers}
    if _key(corpus) == "name":
        columns["names"] = np.array(list(_names(corpus, corpus.numbers)), np.str_)
    return columns


def _write_parquet(path: Path, weights: NDArray[np.float32], columns: dict[str, Any]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "topics", "A parquet file") from error
    columns = columns | {f"topic_{k}": weights[:, k] for k in range(weights.shape[1])}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def evaluate_command(options: argparse.Namespace, rest: list[str]) -> int:
    given = next((name for name in READING_OPTIONS if getattr(options, name) is not None), None)
    if options.corpus is None and given is not None:
        raise Refusal(
            f"--{given.replace('_', '-')} says how a corpus is read, and the run's test documents are read "
            "as in training. Name a corpus, or leave it out."
        )
    fitted, skipped = load(options.folder), Skipped()
    documents: Corpus | RemappedCorpus
    if options.corpus is None:
        _, _, test = fitted.divided()
        documents = test.select(range(len(test)))
        if not len(documents):
            raise Refusal("The run has no test documents. Name a corpus to evaluate on.")
    else:
        other = other_corpus(fitted, options)
        documents, skipped = other.documents, other.skipped
    result = perplexities(fitted.topics, fitted.prior, documents, options.seed)
    if options.json:
        print(json.dumps(result | {"skipped": dict(skipped.causes)}))
        return 0
    if skipped.causes:
        print(skipped)
    for figure in explained(result, fitted.vocabulary_size):
        print(f"{figure.name:<24}{figure.value:<12}{figure.meaning}".rstrip())
    return 0
