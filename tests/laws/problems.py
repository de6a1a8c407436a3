"""The problems of the conformance tests, on which the laws are tried too."""

from __future__ import annotations

from murmurate.conformance.problems import (
    LINEAR,
    OPTIMIZERS,
    TYPICAL_OPTIMIZERS,
    Point,
    Problem,
    Result,
    halving,
    same,
    separate_last_layer,
    slope,
)

__all__ = [
    "LINEAR", "OPTIMIZERS", "TYPICAL_OPTIMIZERS", "Point", "Problem", "Result", "halving", "same",
    "separate_last_layer", "slope",
]  # fmt: skip
