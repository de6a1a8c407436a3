"""Deadlines while this process is stopped."""

from __future__ import annotations

import pytest

from murmurate.fabric.awake import ASLEEP_SECONDS, AwakeClock


def test_it_goes_like_the_clock_and_skips_most_of_a_long_gap() -> None:
    times = iter([1000.0, 1000.0, 1000.25, 1001.25, 4601.25, 4601.75])
    clock = AwakeClock(lambda: next(times))
    began = clock.now()
    assert [clock.now() - began for _ in range(4)] == pytest.approx(
        [0.25, 1.25, 1.25 + ASLEEP_SECONDS, 1.75 + ASLEEP_SECONDS]
    )
