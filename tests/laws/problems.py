"""The problems of the conformance tests, on which the laws are tried too."""

from __future__ import annotations

import pytest

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
    "HOW", "LINEAR", "OPTIMIZERS", "TYPICAL_OPTIMIZERS", "Point", "Problem", "Result", "halving", "same",
    "separate_last_layer", "slope",
]  # fmt: skip

HOW = pytest.mark.parametrize(
    "how",
    [{}, {"float32": True, "clip": 0.3, "scheduled": True, "grouped": True}, {"bfloat16": True, "clip": 0.3}],
    ids=["plain", "full", "bfloat16"],
)
