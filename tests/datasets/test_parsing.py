"""Parsing a file in chunks finds what parsing it line by line finds, whatever is in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from murmurate.datasets import _entries, _headers
from murmurate.datasets._record_errors import RecordErrors

PIECES = {
    "triples": ["1 2 3", "2 3 1", "3 1 12", "1 2 3", "2 2 2.0", "1 1 1e1"],
    "pairs": ["1 2:3", "2 1:1 3:1", "3 0:1 1:2 2:3", "1 3:12.0"],
}
NOISE = [
    *" 0123456789.-+eE:#\n",
    "\t",
    "\r",
    " \n",
    "  ",
    "_",
    "x",
    "\x0b",
    "1e1",
    "nan",
    "999999999",
    "9999999999",
]


def mutated(pieces, random):
    lines = "\n".join(random.choice(pieces, random.integers(1, 6))) + "\n"
    for _ in range(random.integers(0, 4)):
        at = random.integers(0, len(lines))
        lines = lines[:at] + random.choice(NOISE) + lines[at + random.integers(0, 2) :]
    return (lines if lines.endswith("\n") else lines + "\n").encode()


def formats(kind, labels):
    """Two alike, each with errors of its own."""
    made = []
    for _ in range(2):
        if kind == "triples":
            form = _entries.Triples(_headers.Header(3, 3, 0, 0))
        else:
            form = _entries.Pairs(labels, one_based=False, vocabulary_size=4)
        made.append((form, RecordErrors(Path("x"), skip=True)))
    return made


def by_line(form, chunk, errors):
    """As ``_entries.parse`` does it where nothing else works."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form, "parse_chunk", lambda first, chunk: None)
        patch.setattr(_entries, "_FEW_LINES", 99)
        return list(_entries.parse(form, 1, chunk, errors, plain=True))


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "labels"), [("triples", False), ("pairs", False), ("pairs", True)])
def test_chunks_and_lines_give_the_same_entries(kind, labels, count, monkeypatch):
    monkeypatch.setattr(_entries, "_FEW_LINES", 1)  # halves down to the line
    random = np.random.default_rng(0)
    taken = 0
    for _ in range(count):
        chunk = mutated(PIECES[kind], random)
        (ours, errors), (oracle, expected) = formats(kind, labels)
        wanted = sound(by_line(oracle, chunk, expected), oracle, expected)
        found = sound(list(_entries.parse(ours, 1, chunk, errors)), ours, errors)
        assert np.array_equal(found, wanted), chunk
        assert ours.seen == oracle.seen
        assert errors.causes == expected.causes, chunk
        taken += ours.parse_chunk(1, chunk) is not None
    assert 0.1 < taken / count < 0.9  # both ways are taken often


def sound(parts, form, errors):
    return np.concatenate(
        [_entries.valid_entries(part, form.header, form.base, errors) for part in parts], axis=1
    )
