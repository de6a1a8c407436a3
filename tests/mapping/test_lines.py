"""t = a + b n is found again from its values, and its intervals hold it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmurate.mapping.lines import fit, relative_width

SIZES = (1, 4, 16, 64)


@settings(max_examples=30)
@given(a=st.floats(1e-6, 1e-2), b=st.floats(1e-8, 1e-3))
def test_exact_times_give_the_line(a: float, b: float) -> None:
    line = fit([(n, a + b * n) for n in SIZES])
    assert line.a == pytest.approx(a, rel=1e-4, abs=1e-9 + 1e-4 * b)
    assert line.b == pytest.approx(b, rel=1e-4, abs=1e-9 + 1e-4 * a)
    assert line.sizes == (1, 64)


def test_one_size_gives_a_constant() -> None:
    line = fit([(8, 2e-3), (8, 2e-3)])
    assert (line.a, line.b) == (pytest.approx(2e-3), 0.0)


def test_no_part_is_negative() -> None:
    falling = fit([(1, 3e-3), (64, 1e-3)])
    assert falling.b == 0.0
    assert falling.a > 0
    convex = fit([(1, 1e-6), (64, 1e-2)])
    assert convex.a >= 0


def test_the_interval_of_noisy_times_holds_the_truth() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(40):
        noise = generator.lognormal(0, 0.05, size=(len(SIZES), 8))
        line = fit([(n, (1e-4 + 1e-5 * n) * x) for n, row in zip(SIZES, noise, strict=True) for x in row])
        held += line.low[1] <= 1e-5 <= line.high[1]
        assert 0 < relative_width(line) < 0.1
    assert held >= 30


def test_nothing_gives_no_line() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit([])


def test_the_width_at_the_largest_size_is_the_bootstraps_own() -> None:
    """a and b are anti-correlated: with the sum of their intervals the width would be much too large."""
    generator = np.random.default_rng(2)
    sizes = (8, 16, 32)
    widths, ends = [], []
    for _ in range(30):
        noise = generator.lognormal(0, 0.1, size=(len(sizes), 8))
        line = fit([(n, (1e-4 + 1e-5 * n) * x) for n, row in zip(sizes, noise, strict=True) for x in row])
        widths.append(relative_width(line))
        ends.append(line.seconds(32))
        assert widths[-1] < 0.8 * relative_width(dataclasses.replace(line, width=None))
    assert np.mean(widths) == pytest.approx(1.96 * np.std(ends) / np.mean(ends), rel=0.4)
