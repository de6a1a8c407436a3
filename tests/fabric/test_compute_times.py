"""Models of compute times: what they draw, and what makes no sense of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from murmurate.fabric.simulated.latency import LogNormal, Straggler, Trace, compute_model


def take(model, count, rank=1, seed=3):
    return list(itertools.islice(model.steps(rank, np.random.default_rng(seed)), count))


def test_compute_times_are_what_they_say():
    assert take(LogNormal(0.25), 3) == [(0.25, 0.0)] * 3
    assert take(Straggler(0.25, 4), 2, rank=0) == [(1.0, 0.0)] * 2
    assert take(Straggler(0.25, 4), 2, rank=7) == [(0.25, 0.0)] * 2
    assert take(Straggler(0.25, 3, sleeps=True), 2, rank=0) == [(0.25, 0.75)] * 2
    drawn = np.log([busy for busy, _ in take(LogNormal(0.01, 0.5), 20_000)])
    # standard errors at 20,000 draws: 0.5/sqrt(n) = 0.0035 of the mean, 0.5/sqrt(2n) = 0.0025 of the spread
    assert np.mean(drawn) == pytest.approx(math.log(0.01), abs=4 * 0.0035)
    assert np.std(drawn) == pytest.approx(0.5, abs=4 * 0.0025)


def test_a_trace_goes_round_from_a_drawn_start():
    trace = Trace((1.0, 2.0, 3.0))
    starts = set()
    for seed in range(20):
        seconds = [busy for busy, _ in take(trace, 7, seed=seed)]
        starts.add(seconds[0])
        assert [b % 3 for b in seconds[:-1]] == [(a - 1) % 3 for a in seconds[1:]]
    assert starts == {1.0, 2.0, 3.0}


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("constant", [], "takes 1"),
        ("constant", [0.0], "above 0"),
        ("constant", [math.inf], "above 0 and at most 1e\\+09, not inf"),
        ("trace", [1.0, math.inf], "above 0 and at most 1e\\+09, not inf"),
        ("lognormal", [1.0, math.inf], "from 0 to 50, not inf"),
        ("lognormal", [1.0], "takes 2"),
        ("lognormal", [1.0, -1.0], "from 0 to 50, not -1"),
        ("straggler", [1.0, 0.5], "from 1 to 1e\\+09, not 0.5"),
        ("straggler", [1.0], "takes 2 or 3 number"),
        ("straggler", [1.0, 4.0, 0.0], "slow replicas must be a whole number of at least 1, not 0"),
        ("sleeper", [1.0, 4.0, 2.5], "whole number of at least 1, not 2.5"),
        ("straggler", [1.0, 4.0, math.inf], "whole number of at least 1, not inf"),
        ("trace", [], "at least one"),
        ("gamma", [1.0], "no model 'gamma'"),
    ],
)
def test_models_that_make_no_sense_are_refused(name, numbers, words):
    with pytest.raises(ValueError, match=words):
        compute_model(name, numbers)


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("straggler", [0.5, 4.0], [(2.0, 0.0), (0.5, 0.0), (0.5, 0.0)]),
        ("straggler", [0.5, 4.0, 2.0], [(2.0, 0.0), (2.0, 0.0), (0.5, 0.0)]),
        ("sleeper", [0.5, 3.0, 2.0], [(0.5, 1.5), (0.5, 1.5), (0.5, 0.0)]),
    ],
)
def test_the_lowest_ranks_are_slow(name, numbers, expected):
    model = compute_model(name, numbers)
    assert [next(model.steps(rank, np.random.default_rng(0))) for rank in range(3)] == expected
