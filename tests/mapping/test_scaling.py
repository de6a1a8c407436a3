"""Zhang's model of several learners: its closed form against its sum, and its limits."""

from __future__ import annotations

import pytest

from murmurate.mapping.scaling import BatchCosts, scaling_factor, spo_seconds

WHOLE = BatchCosts(sample=4e-3, forward=16e-3, backward=16e-3, update=0.0, priority=2e-3)
AVERAGE_SECONDS = 5e-3


def shared(learners: int) -> BatchCosts:
    """The costs of a learner's part of the batch."""
    return BatchCosts(*(x / learners for x in vars(WHOLE).values()))


@pytest.mark.parametrize("learners", [1, 2, 4, 8])
@pytest.mark.parametrize("period", [1, 5, 25])
def test_closed_form_of_spo(learners: int, period: int) -> None:
    """Eq. 5.6 is eq. 5.2 over L times eq. 5.5, where a part of a batch takes a part of the time."""
    seconds = spo_seconds(shared(learners), AVERAGE_SECONDS, period)
    closed = 1 / (1 + AVERAGE_SECONDS * learners / (WHOLE.total * period))
    assert scaling_factor(WHOLE.total, seconds, learners) == pytest.approx(closed)


def test_rarer_means_and_free_exchanges_scale_better() -> None:
    part = shared(4)
    seconds = [spo_seconds(part, AVERAGE_SECONDS, period) for period in (1, 5, 10, 25)]
    assert seconds == sorted(seconds, reverse=True)
    assert spo_seconds(part, 0.0, 1) == part.total
    assert scaling_factor(WHOLE.total, part.total, 4) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="period"):
        spo_seconds(part, AVERAGE_SECONDS, 0)
