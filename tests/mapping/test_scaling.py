"""Zhang's model of several learners: its closed forms against its sums, and its limits."""

from __future__ import annotations

import pytest

from murmurate.mapping.scaling import BatchCosts, parallel_apex_seconds, scaling_factor, spo_seconds

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


@pytest.mark.parametrize("learners", [1, 2, 4, 8])
def test_closed_form_of_data_parallel_apex(learners: int) -> None:
    """Eq. 5.3 is eq. 5.2 over L times eq. 5.1, but for the replay's time, which it leaves out of eq. 5.2."""
    part, replay = shared(learners), WHOLE.sample + WHOLE.priority
    seconds = parallel_apex_seconds(WHOLE, part, AVERAGE_SECONDS)
    closed = 1 - 1 / (1 + 2 * part.forward / (replay + AVERAGE_SECONDS))
    assert scaling_factor(WHOLE.total - replay, seconds, learners) == pytest.approx(closed)
    assert seconds >= spo_seconds(part, AVERAGE_SECONDS, 1)  # one replay for all takes longer than banks


@pytest.mark.parametrize(("learners", "speed_up", "printed"), [(2, 1.25, 0.63), (4, 1.34, 0.34)])
def test_printed_scaling_factors_are_speed_ups_per_learner(
    learners: int, speed_up: float, printed: float
) -> None:
    """Zhang, section 5.1.4: data-parallel Ape-X with an MLP and batches of 4096."""
    assert scaling_factor(speed_up, 1.0, learners) == pytest.approx(printed, abs=0.0051)


def test_rarer_means_and_free_exchanges_scale_better() -> None:
    part = shared(4)
    seconds = [spo_seconds(part, AVERAGE_SECONDS, period) for period in (1, 5, 10, 25)]
    assert seconds == sorted(seconds, reverse=True)
    assert spo_seconds(part, 0.0, 1) == part.total
    assert scaling_factor(WHOLE.total, part.total, 4) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="period"):
        spo_seconds(part, AVERAGE_SECONDS, 0)
