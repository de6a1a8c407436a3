"""The problems of the conformance tests, on which the laws are tried too."""

from __future__ import annotations

from murmurate.conformance.problems import (
    LINEAR,
    OPTIMIZERS,
    SIX,
    Point,
    Problem,
    Result,
    halving,
    head_apart,
    same,
    slope,
)

__all__ = [
    "LINEAR", "OPTIMIZERS", "SIX", "Point", "Problem", "Result", "halving", "head_apart", "same", "slope",
]  # fmt: skip
