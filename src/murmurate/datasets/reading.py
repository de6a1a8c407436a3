"""Reads corpora from files of the kinds people have; what is wrong in them is refused with file and line.

``docs/corpora.md`` has the formats, their options and their traps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from murmurate.datasets import _cache, _headers, _matrices, _pairs, _texts, _triples
from murmurate.datasets._headers import vocabulary_beside
from murmurate.datasets._kinds import KINDS, kind_of
from murmurate.datasets._record_errors import RecordErrors, Skipped
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.tokens import VERSION, Tokens
from murmurate.datasets.writing import write
from murmurate.errors import Refusal

__all__ = ["KINDS", "Skipped", "kind_of", "read", "vocabulary_beside", "write"]

_BELONGS_TO = {
    "transpose": ("matrix-market", "npz"),
    "one_based": ("svmlight", "lda-c"),
    "vocabulary_size": ("svmlight", "lda-c"),
    "tokens": ("text",),
}
_TOKENS = "tokens (--min-letters, --stop-words, --min-df, --max-df or --max-vocabulary, on the command line)"


@dataclass(frozen=True)
class _Source:
    """One file and how to read it; ``vocabulary`` are words, whatever they came from."""

    path: Path
    kind: str
    vocabulary: tuple[str, ...] | None
    vocabulary_from: str
    transpose: bool
    one_based: bool
    vocabulary_size: int | None
    tokens: Tokens


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
    skipped: Skipped | None = None,
) -> Corpus:
    """The corpus of a file, or of a folder of text; its documents are those that have a word.

    It is converted once to a folder of arrays, beside the file or below ``cache``, and mapped from then on:
    so processes share one copy, and only what is used takes memory. A source or options that changed are
    noticed.

    ``kind``: one of ``KINDS``; told from name and content where it is None. ``vocabulary``: a file with a
    word a line, or the words; by default the file beside it, if there is one. Text is counted over these
    words alone. ``skip_bad``: leave out what is wrong. What was left out, and which documents, is put into
    ``skipped``. ``transpose``: the matrix is [words, documents]. ``one_based``: whether word ids begin at 1;
    SVMlight has to be told. ``vocabulary_size``: V, where the format does not say. ``tokens``: how text
    becomes words, which is not said beside a vocabulary.

    Raises Refusal, with file and line, for anything wrong, and for options that the kind does not have.
    """
    source = Path(path)
    if source.name in ("", ".."):
        source = source.resolve()  # a cache beside it needs a name
    if not source.exists():
        raise Refusal(f"There is no {source}. Check the path; a corpus is fetched by yourself.")
    chosen = kind or kind_of(source)
    given = {
        "transpose": transpose or None,
        "one_based": one_based,
        "vocabulary_size": vocabulary_size,
        "tokens": tokens,
    }
    _check(source, chosen, given)
    if tokens is not None and vocabulary is not None:
        raise Refusal(
            f"Text is counted over exactly the words of a given vocabulary. Leave it out, or {_TOKENS}."
        )
    words, words_from = _vocabulary(source, chosen, vocabulary)
    what = _Source(
        source, chosen, words, words_from, transpose, bool(one_based), vocabulary_size, tokens or Tokens()
    )
    key = {
        "source": _cache.fingerprint(source),
        "kind": chosen,
        "vocabulary": None if words is None else _cache.digest(words),
        "skip_bad": skip_bad,
        **given,
        "tokens": {**asdict(what.tokens), "stop_words": sorted(what.tokens.stop_words)},
    }
    if chosen == "text":
        key["tokeniser"] = VERSION
    place = _cache.place(source, cache)
    corpus, left_out = _cache.fetch(source, place, key, lambda folder: _convert(what, skip_bad, folder))
    if skipped is not None:
        skipped.causes, skipped.documents = left_out.causes, left_out.documents
    return corpus


def _check(path: Path, kind: str, given: dict[str, Any]) -> None:
    if kind not in KINDS:
        raise Refusal(f"There is no kind of corpus called '{kind}'. The kinds: {', '.join(KINDS)}.")
    if path.is_dir() and kind != "text":
        raise Refusal(f"{path} is a folder, and a corpus of kind {kind} is a file. Name the file.")
    for option, kinds in _BELONGS_TO.items():
        if given[option] is not None and kind not in kinds:
            name = _TOKENS if option == "tokens" else option
            raise Refusal(
                f"{name} is an option of {' and '.join(kinds)}, and {path} is read as {kind}. "
                "Leave it out, or say the kind."
            )
    if kind == "svmlight" and given["one_based"] is None:
        raise Refusal(
            f"{path} does not say whether its word ids begin at 0 or at 1. Say so: one_based=True or "
            "one_based=False (--one-based true, on the command line)."
        )


def _vocabulary(
    source: Path, kind: str, given: Path | Sequence[str] | None
) -> tuple[tuple[str, ...] | None, str]:
    """The words, and where they are from. Text takes none by itself: it has its own."""
    if given is None:
        beside = vocabulary_beside(source)
        if kind == "text" or not beside.exists():
            return None, ""
        given = beside
    if isinstance(given, (str, Path)):
        return _headers.read_vocabulary(Path(given)), str(given)
    twice = [word for word, times in Counter(given).items() if times > 1]
    if twice:
        raise Refusal(f"The given vocabulary has {twice[0]!r} twice. Each word has one id.")
    return tuple(given), "the given vocabulary"


def _convert(source: _Source, skip_bad: bool, folder: Path) -> _cache.Converted:
    """Fill a folder with ``words.npy`` and ``counts.npy``."""
    errors = RecordErrors(source.path, skip_bad)
    path, words = source.path, source.vocabulary
    if source.kind in ("uci", "matrix-market"):
        uci = source.kind == "uci"
        header, lines = (
            _headers.uci(path, errors) if uci else _headers.matrix_market(path, source.transpose, errors)
        )
        _agree(source, header.vocabulary_size, header.documents)
        lengths, size = _triples.convert(path, header, lines, errors, folder), header.vocabulary_size
    elif source.kind in ("lda-c", "svmlight"):
        if words is not None:
            _agree(source, source.vocabulary_size or len(words), None)
        lengths, size = _pairs.convert(
            path,
            labels=source.kind == "svmlight",
            one_based=source.one_based,
            vocabulary_size=source.vocabulary_size if words is None else len(words),
            errors=errors,
            folder=folder,
        )
    elif source.kind == "npz":
        lengths, size = _matrices.convert(path, source.transpose, errors, folder)
        _agree(source, size, len(lengths))
    else:
        made = _texts.corpus(path, source.tokens, words, errors)
        np.save(folder / "words.npy", made.words)
        np.save(folder / "counts.npy", made.counts)
        lengths, size, words = made.lengths, made.vocabulary_size, made.vocabulary
    if not lengths.any():
        raise Refusal(f"{path} holds no document with a {'sound ' if skip_bad else ''}word. Check the file.")
    return _cache.Converted(lengths, words, size, errors.skipped.causes)


def _agree(source: _Source, vocabulary_size: int, documents: int | None) -> None:
    """Raises Refusal where the vocabulary is that of another corpus."""
    if source.vocabulary is None or len(source.vocabulary) == vocabulary_size:
        return
    hint = ""
    if documents == len(source.vocabulary) and source.kind in _BELONGS_TO["transpose"]:
        hint = " Its other side fits: is it the other way round? Then say transpose."
    raise Refusal(
        f"{source.path} has {vocabulary_size:,} words, and {source.vocabulary_from} has "
        f"{len(source.vocabulary):,}. Name the vocabulary that belongs to it.{hint}"
    )
