"""The fast ways through a file find what reading it line by line finds, whatever stands there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from murmurate.datasets import _lines, _pairs, _triples
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


def readers(kind, real):
    """Two alike, each with errors of its own."""
    made = []
    for _ in range(2):
        errors = RecordErrors(Path("x"), skip=True)
        if kind == "triples":
            made.append((_triples._TripleReader(_triples.Header(3, 3, 0, False, real), errors), errors))
        else:
            made.append((_pairs._PairReader(real, one_based=False, vocabulary_size=4, errors=errors), errors))
    return made


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("kind", ["triples", "pairs"])
def test_fast_is_slow(kind, real, monkeypatch):
    monkeypatch.setattr(_lines, "_BY_HAND", 1)  # halves down to the line
    random = np.random.default_rng(0)
    taken = 0
    for _ in range(4000):
        chunk = mutated(PIECES[kind], random)
        (ours, errors), (oracle, expected) = readers(kind, real)
        found = list(_lines.found_in(1, chunk, ours.fast, ours.slow))
        wanted = oracle.slow(1, chunk)
        if kind == "triples":
            assert np.array_equal(np.concatenate(found), wanted), chunk
            assert ours.seen == oracle.seen
        else:
            for part in range(3):
                assert np.array_equal(np.concatenate([f[part] for f in found]), wanted[part]), chunk
        assert errors.skipped.causes == expected.skipped.causes, chunk
        taken += ours.fast(chunk) is not None
    assert 400 < taken < 3600  # both ways are gone often
