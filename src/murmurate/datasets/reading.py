"""Reads corpora from files of several formats. An error in a file is refused with its file and line.

``docs/corpora.md`` describes the formats, their options and their traps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from murmurate.datasets import _cache, _entries, _headers, _matrices, _texts
from murmurate.datasets._archives import refuse_special
from murmurate.datasets._format_detection import KINDS, detect_kind
from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors, Skipped, option_of, refuse_unreadable
from murmurate.datasets._text_files import SUFFIXES, TEXT_KINDS
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.tokens import VERSION, Tokens
from murmurate.datasets.vocabulary import read_vocabulary, vocabulary_beside
from murmurate.errors import Refusal
from murmurate.ranges import plain_value

__all__ = ["KINDS", "Skipped", "detect_kind", "read"]

_KINDS_WITH_OPTION = {
    "transpose": ("matrix-market", "npz"),
    "one_based": ("svmlight", "lda-c"),
    "vocabulary_size": ("svmlight", "lda-c"),
    "tokens": TEXT_KINDS,
    "bigrams": TEXT_KINDS,
    "column": ("csv", "jsonl"),
    "name_column": ("csv", "jsonl"),
}
_TOKENS = "--min-letters, --stop-words, --min-df, --max-df or --max-vocabulary (tokens= in Python)"


def read(
    path: str | Path,
    *,
    kind: str | None = None,
    vocabulary: Path | Sequence[str] | None = None,
    skip_bad: bool = False,
    cache: Path | None = None,
    transpose: bool = False,
    one_based: bool | None = None,
    vocabulary_size: int | None = None,
    tokens: Tokens | None = None,
    bigrams: bool = False,
    column: str | None = None,
    name_column: str | None = None,
    skipped: Skipped | None = None,
) -> Corpus:
    """Read the documents of a file, or of a folder of texts, that have at least one word.

    The source is converted once to a folder of arrays, the cache, which is memory-mapped from then on: so
    processes share one copy, and only the parts that are used take memory. It is converted again when the
    source or the options have changed.

    kind: one of ``KINDS``; None detects it by name and content. vocabulary: a file with one word on each
    line, or the words; by default the file beside the source, if there is one. In text, only words of a given
    vocabulary are counted. skip_bad: leave out records with errors, instead of refusing the file. skipped: is
    filled with what was left out, and which documents the corpus lacks. cache: a folder for the cache; by
    default it is beside the source. transpose: the matrix is [words, documents]. one_based: whether word ids
    begin at 1; required for SVMlight. vocabulary_size: V, where the format does not give it. tokens: how text
    is split into words; not with a vocabulary. bigrams: pairs of words that belong together count as one
    word; with a vocabulary, its pairs. column, name_column: which columns of a CSV or JSON-lines file hold
    the text and the name of a document.

    Raises Refusal: for errors in the file, with their line; for a path that cannot be read, or a cache that
    cannot be written; for a vocabulary of another size; for options that the kind does not have.
    """
    source = _existing(path)
    if vocabulary_size is not None and not 0 < vocabulary_size <= _headers.LARGEST:
        raise Refusal(f"--vocabulary-size is {vocabulary_size}; it must be from 1 to {_headers.LARGEST}.")
    kind = kind or detect_kind(source)
    options = {
        "transpose": bool(transpose) or None,
        "one_based": plain_value(one_based),
        "vocabulary_size": plain_value(vocabulary_size),
        "tokens": tokens,
    }
    columns = {"bigrams": bool(bigrams) or None, "column": column, "name_column": name_column}
    _check_options(source, kind, options | columns)
    if tokens is not None and vocabulary is not None:
        raise Refusal(
            f"Text is counted over exactly the words of a given --vocabulary. Leave it out, or {_TOKENS}."
        )
    words, words_from = _vocabulary(source, kind, vocabulary)
    options["tokens"] = tokens or Tokens()
    key = _cache_key(source, kind, words, skip_bad, options, columns)
    convert = partial(
        _convert, source, kind, words, words_from, options | columns, RecordErrors(source, skip_bad)
    )
    corpus, left_out = _cache.fetch(source, _cache.folder_of(source, cache), key, convert)
    if skipped is not None:
        skipped.causes, skipped.documents = left_out.causes, left_out.documents
    return corpus


def _existing(path: str | Path) -> Path:
    """``path``, by a name of its own. Raises Refusal if it is not there, or cannot be read."""
    source = Path(path)
    if source.name in ("", ".."):
        source = source.resolve()  # because the cache beside it is named after it
    with refuse_unreadable(source):
        is_there = source.exists()
    if not is_there:
        raise Refusal(f"There is no {source}. Check the path; corpora are not downloaded.")
    refuse_special(source)
    return source


def _cache_key(
    source: Path,
    kind: str,
    words: tuple[str, ...] | None,
    skip_bad: bool,
    options: dict[str, Any],
    columns: dict[str, Any],
) -> dict[str, Any]:
    """What the arrays in the cache depend on, as JSON values: another key, and they are made again."""
    tokens: Tokens = options["tokens"]
    key = {
        "source": _cache.fingerprint(source, kind),
        "kind": kind,
        "vocabulary": None if words is None else _cache.digest(words),
        "skip_bad": bool(skip_bad),
        **options,
        "tokens": {**asdict(tokens), "stop_words": sorted(tokens.stop_words)},
        **{option: value for option, value in columns.items() if value is not None},
    }
    return key | {"tokeniser": VERSION} if kind in TEXT_KINDS else key


def _check_options(path: Path, kind: str, options: dict[str, Any]) -> None:
    if kind not in KINDS:
        raise Refusal(f"There is no kind of corpus called '{kind}'. The kinds: {', '.join(KINDS)}.")
    if path.is_dir() and not SUFFIXES.get(kind):
        raise Refusal(f"{path} is a folder, and a corpus of kind {kind} is a file. Name the file.")
    for option, kinds in _KINDS_WITH_OPTION.items():
        if options[option] is not None and kind not in kinds:
            name = _TOKENS if option == "tokens" else option_of(option)
            raise Refusal(
                f"{name} is for corpora of kind {' or '.join(kinds)}, and {path} is read as {kind}. "
                "Leave it out, or name the kind with --kind."
            )
    if kind == "svmlight" and options["one_based"] is None:
        raise Refusal(
            f"{path} does not say whether its word ids begin at 0 or at 1. Add --one-based true or "
            "--one-based false (one_based=True or one_based=False in Python)."
        )


def _vocabulary(
    source: Path, kind: str, given: Path | Sequence[str] | None
) -> tuple[tuple[str, ...] | None, str]:
    """(the words, where they are from, for messages); (None, "") if there are none. Text does not use the
    file beside it."""
    if given is None:
        beside = vocabulary_beside(source)
        if kind in TEXT_KINDS or not beside.exists():
            return None, ""
        given = beside
    if isinstance(given, (str, Path)):
        return read_vocabulary(Path(given)), str(given)
    repeated = [word for word, times in Counter(given).items() if times > 1]
    if repeated:
        raise Refusal(f"The given vocabulary has {repeated[0]!r} twice. Each word has one id.")
    return tuple(given), "the given vocabulary"


def _convert(
    path: Path,
    kind: str,
    words: tuple[str, ...] | None,
    words_from: str,
    options: dict[str, Any],
    errors: RecordErrors,
    folder: Path,
) -> _cache.Converted:
    """Convert the source: writes ``words.npy`` and ``counts.npy`` to ``folder``, and returns the rest."""

    def check_vocabulary(size: int, documents: int) -> None:
        if words is None or len(words) == size:
            return
        hint = ""
        if documents == len(words) and options["transpose"]:
            hint = " It has as many documents: leave out --transpose (transpose=True)."
        elif documents == len(words) and kind in _KINDS_WITH_OPTION["transpose"]:
            hint = " It has as many documents: if its rows are words, add --transpose (transpose=True)."
        raise Refusal(
            f"{path} has {size:,} words, and {words_from} has {len(words):,}. Name the vocabulary that "
            f"belongs to it.{hint}"
        )

    if kind in ("uci", "matrix-market"):
        with Lines(path, errors) as lines:
            if kind == "uci":
                header = _headers.uci(lines, errors)
            else:
                header = _headers.matrix_market(lines, bool(options["transpose"]), errors)
        size = header.vocabulary_size
        check_vocabulary(size, header.documents)
        lengths, _ = _entries.convert(path, partial(_entries.Triples, header), errors, folder)
    elif kind in ("lda-c", "svmlight"):
        known_size = options["vocabulary_size"] or (None if words is None else len(words))
        if known_size is not None:
            check_vocabulary(known_size, 0)
        make_format = partial(_entries.Pairs, kind == "svmlight", bool(options["one_based"]), known_size)
        lengths, size = _entries.convert(path, make_format, errors, folder)
        size = size if known_size is None else known_size
    elif kind == "npz":
        lengths, size = _matrices.convert(path, bool(options["transpose"]), errors, folder)
        check_vocabulary(size, len(lengths))
    else:
        source = _texts.TextSource(path, kind, options["column"], options["name_column"])
        corpus = _texts.corpus(source, options["tokens"], words, bool(options["bigrams"]), errors)
        if words is not None and not corpus.lengths.any():
            raise Refusal(
                f"No text in {path} has one of the {len(words):,} words of the vocabulary. Check that the "
                "files are the right ones, and in its language."
            )
        np.save(folder / "words.npy", corpus.words)
        np.save(folder / "counts.npy", corpus.counts)
        lengths, size, words = corpus.lengths, corpus.vocabulary_size, corpus.vocabulary
    if not lengths.any():
        word = "sound word" if errors.skip else "word"
        if kind in TEXT_KINDS and words_from:
            raise Refusal(f"{path} has no document with a {word} of {words_from}. Check both.")
        raise Refusal(f"{path} has no document with a {word}. Check the file.")
    return _cache.Converted(lengths, words, size, errors.causes)
