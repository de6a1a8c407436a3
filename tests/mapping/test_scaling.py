"""Zhang's model of several learners: its closed forms against its sums, and its limits."""

from __future__ import annotations

import pytest

from murmurate.mapping.scaling import (
    BatchCosts,
    ExchangeCosts,
    apex_seconds,
    parallel_apex_scaling_factor,
    parallel_apex_seconds,
    scaling_factor,
    spo_scaling_factor,
    spo_seconds,
)

WHOLE = BatchCosts(sample=4e-3, forward=16e-3, backward=16e-3, update=0.0, priority=2e-3)
EXCHANGE = ExchangeCosts(average=3e-3, weights=1e-3, sub_batch=2e-3)


@pytest.mark.parametrize("learners", [1, 2, 4, 8])
@pytest.mark.parametrize("period", [1, 5, 25])
def test_closed_form_of_spo(learners: int, period: int) -> None:
    """Eq. 5.6 is eq. 5.2 over L times eq. 5.5, where a part of a batch takes a part of the time."""
    seconds = spo_seconds(WHOLE.times(1 / learners), EXCHANGE, period)
    factor = scaling_factor(apex_seconds(WHOLE), seconds, learners)
    assert factor == pytest.approx(spo_scaling_factor(apex_seconds(WHOLE), EXCHANGE, learners, period))


@pytest.mark.parametrize("learners", [2, 4, 8])
def test_closed_form_of_parallel_apex(learners: int) -> None:
    """Eq. 5.3 leaves a 1/L of the replay's time out of the numerator."""
    part = WHOLE.times(1 / learners)
    seconds = parallel_apex_seconds(WHOLE, part, EXCHANGE)
    factor = scaling_factor(apex_seconds(WHOLE), seconds, learners)
    closed = parallel_apex_scaling_factor(WHOLE, part.forward, EXCHANGE)
    assert factor - closed == pytest.approx(WHOLE.replay / (learners * seconds))


def test_rarer_means_and_free_exchanges_scale_better() -> None:
    part = WHOLE.times(0.25)
    seconds = [spo_seconds(part, EXCHANGE, period) for period in (1, 5, 10, 25)]
    assert seconds == sorted(seconds, reverse=True)
    assert spo_seconds(part, ExchangeCosts(average=0.0), 1) == part.total
    assert scaling_factor(WHOLE.total, part.total, 4) == pytest.approx(1.0)
    assert spo_seconds(part, EXCHANGE, 1) < parallel_apex_seconds(WHOLE, part, EXCHANGE)
    with pytest.raises(ValueError, match="period"):
        spo_seconds(part, EXCHANGE, 0)
