"""The ratio of samples to inserts: a table, and laws under random schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest

from murmurate.replay.rate_limiter import RateLimiter, least_slack


@pytest.mark.parametrize(
    ("inserted", "drawn", "count", "may_draw", "may_insert"),
    # 4 samples per insert, the first after 10 inserts; 6 inserts ahead at most
    [
        (0, 0, 1, False, True),
        (10, 0, 1, False, True),
        (11, 0, 4, True, True),
        (11, 0, 5, False, True),
        (11, 4, 1, False, True),
        (14, 0, 2, True, True),  # up to 10 + 0 / 4 + 6
        (15, 0, 2, True, False),
        (15, 4, 2, True, True),
        (16, 0, 24, True, False),
        (16, 24, 1, False, True),
    ],
)
def test_who_waits(inserted: int, drawn: int, count: int, may_draw: bool, may_insert: bool) -> None:
    limiter = RateLimiter(4.0, starts=10, slack=6, inserted=inserted, drawn=drawn)
    assert limiter.may_draw(count) == may_draw
    assert limiter.may_insert(count) == may_insert


@pytest.mark.parametrize("seed", range(20))
def test_draws_and_inserts_of_any_sizes_keep_to_the_ratio_and_never_both_wait(seed: int) -> None:
    generator = np.random.default_rng(seed)
    ratio = float(generator.choice([0.25, 1.0, 3.7, 8.0, 100.0]))
    draw, insert = (int(generator.integers(1, most)) for most in (300, 40))
    slack = math.ceil(least_slack(ratio, draw, insert))
    limiter = RateLimiter(ratio, starts=int(generator.integers(0, 500)), slack=slack)
    for _ in range(3_000):
        count = int(generator.integers(1, insert + 1))
        assert limiter.may_draw(draw) or limiter.may_insert(count)
        if generator.random() < 0.5 and limiter.may_draw(draw):
            limiter.drawn += draw
        elif limiter.may_insert(count):
            limiter.inserted += count
        after = limiter.inserted - limiter.starts
        assert limiter.drawn <= ratio * max(0, after)
        assert after <= limiter.drawn / ratio + slack
    assert limiter.drawn > 0
