"""Corpora that need no download: documents drawn from a topic model, and the docstrings and comments of
Python's library."""

from __future__ import annotations

import ast
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.tokens import FORMER_DEFAULTS, Tokens, WordCounter
from murmurate.errors import Refusal

_BLOCK = 8192  # documents drawn at a time, which bounds memory
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_NOT_ENGLISH = {"encodings", "pydoc_data"}  # tables of character names, and copies of the manual


class Generated(NamedTuple):
    """A corpus and the parameters of the topic model that it was drawn from."""

    corpus: Corpus
    phi: NDArray[np.float64]  # [K, V]: distribution of each topic over words; rows sum to 1
    alpha: NDArray[np.float64]  # [K]: parameter of the Dirichlet from which documents' topics are drawn


def generate(
    documents: int = 20_000,
    vocabulary: int = 10_000,
    topics: int = 50,
    mean_length: float = 229,
    seed: int = 0,
    *,
    topic_mass: float = 500.0,
    alpha_mass: float = 4.0,
    length_sigma: float = 0.5,
) -> Generated:
    """Draw documents from latent Dirichlet allocation (Blei et al. 2003) over words with a Zipf law.

    A word's base frequency is p(rank) ~ 1 / (rank + 9) (Zipf-Mandelbrot), with random ranks; topics are drawn
    from Dirichlet(``topic_mass`` p), and documents' topics from Dirichlet(alpha), where alpha_k ~ 1 / (k +
    sqrt K) and alpha has the sum ``alpha_mass``. Lengths are log-normal, with mean ``mean_length`` tokens and
    standard deviation ``length_sigma`` of their logarithm, and at least 1. Raises Refusal for a number of
    documents, words or topics below 1, and for a mean length or a mass that is not above 0.
    """
    for name, size in (("documents", documents), ("vocabulary", vocabulary), ("topics", topics)):
        if size < 1:
            raise Refusal(f"{name} is {size}. Give 1 or more.")
    for name, mass in (("mean_length", mean_length), ("topic_mass", topic_mass), ("alpha_mass", alpha_mass)):
        if not mass > 0:
            raise Refusal(f"{name} is {mass}. Give more than 0.")
    random = np.random.default_rng(seed)
    base = 1 / (np.arange(1, vocabulary + 1) + 9)
    phi = random.dirichlet(topic_mass * random.permutation(base / base.sum()), size=topics)
    alpha = 1 / (np.arange(topics) + 1 + np.sqrt(topics))
    alpha *= alpha_mass / alpha.sum()
    edges = np.cumsum(phi, axis=1)
    edges /= edges[:, -1:]
    parts = []
    for first in range(0, documents, _BLOCK):
        size = min(_BLOCK, documents - first)
        length = random.lognormal(np.log(mean_length) - length_sigma**2 / 2, length_sigma, size)
        theta = random.dirichlet(alpha, size=size)
        theta /= theta.sum(axis=1, keepdims=True)  # multinomial requires sums of at most 1
        tokens = random.multinomial(np.maximum(np.rint(length), 1).astype(np.int64), theta)
        parts.append(_draw_words(random, tokens, edges))
    lengths, words, counts = (np.concatenate([part[i] for part in parts]) for i in range(3))
    starts = np.zeros(documents + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return Generated(Corpus(starts, words, counts, None, vocabulary), phi, alpha)


def _draw_words(
    random: np.random.Generator, tokens: NDArray[np.int64], edges: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Draw the words of D documents: (numbers of distinct words [D], word ids [N], counts [N]).

    ``tokens`` [D, K]: numbers of tokens of each document and topic; ``edges`` [K, V]: cumulative sums of phi.
    """
    size, vocabulary = len(tokens), edges.shape[1]
    keys = []
    for topic in range(len(edges)):
        document = np.repeat(np.arange(size), tokens[:, topic])
        word = np.searchsorted(edges[topic], random.random(len(document)), side="right")
        keys.append(document * vocabulary + np.minimum(word, vocabulary - 1))
    key, counts = np.unique(np.concatenate(keys), return_counts=True)
    lengths = np.bincount(key // vocabulary, minlength=size)
    return lengths, (key % vocabulary).astype(np.int32), counts.astype(np.int32)


def library_text(*, tokens: Tokens | None = None, min_tokens: int = 10, folder: Path | None = None) -> Corpus:
    """A corpus of English: docstrings and comments of Python's standard library, or of another ``folder``.

    A document is the docstring of a function, class or module, and its comments outside inner functions and
    classes. Documents of fewer than ``min_tokens`` words are left out, and those of which no word is kept.
    Documents are in the order of paths and lines, and so the same for the same version of Python. By default
    words have 2 letters or more, and occur in 5 documents or more and 95% of them at most. Raises Refusal if
    there are no sources, or if no word is kept.
    """
    chosen = tokens or replace(FORMER_DEFAULTS, min_df=5)
    counter = WordCounter(chosen)
    for text in library_documents(folder):
        if len(chosen.words_of(text)) >= min_tokens:
            counter.add(text)
    corpus = counter.finish()
    return corpus if corpus.lengths.all() else corpus.select(np.flatnonzero(corpus.lengths))


def library_documents(folder: Path | None = None) -> Iterator[str]:
    """The documents of ``library_text``, short ones included. Raises Refusal if there are no sources."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        p for p in root.rglob("*.py") if not (_NOT_LIBRARY | _NOT_ENGLISH) & set(p.relative_to(root).parts)
    )
    if not paths:
        raise Refusal(
            f"{root} has no Python sources. Name a folder that has, or install the library's sources."
        )
    for path in paths:
        try:
            with tokenize.open(path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about old syntax in the sources
                source = file.read()
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # templates and deliberately broken files
        yield from _texts(tree, source)


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _texts(tree: ast.Module, source: str) -> Iterator[str]:
    """The text of each document (see ``library_text``) in a module, in the order of their first lines."""
    lines = source.split("\n")  # as ast counts lines; splitlines would also break at form feeds
    owners: list[_Documented] = [tree]
    owner_of = np.zeros(len(lines) + 2, np.int64)
    nodes = [
        n for n in ast.walk(tree) if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    for node in sorted(nodes, key=lambda n: (n.lineno, -(n.end_lineno or 0))):
        owner_of[node.lineno : (node.end_lineno or node.lineno) + 1] = len(owners)
        owners.append(node)
    texts = [[ast.get_docstring(owner) or ""] for owner in owners]
    for number, comment in _comments(lines):
        texts[owner_of[number]].append(comment)
    yield from ("\n".join(text) for text in texts)


def _comments(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment."""
    rest = iter([line + "\n" for line in lines])
    for token in tokenize.generate_tokens(lambda: next(rest, "")):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#!: ")
