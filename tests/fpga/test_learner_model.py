"""Sizes fit the device, no neighbour is better by much, and more of anything is never slower."""

from __future__ import annotations

import pytest

from murmurate.errors import Refusal
from murmurate.fpga.learner_model import LearnerModel, Unit, choose, outer_cycles, product_cycles, stages

CARTPOLE = (4, 8, 8, 2)


def test_stages_and_multiplications_of_the_thesis() -> None:
    assert len(stages(CARTPOLE)) + 1 == 3 * 3  # with LOSS: 3 (L - 1) of L = 4 layers of neurons
    critic = [k * n for kind, k, n in stages((6, 8, 8, 1)) if kind == "FW"]
    assert sum(critic) == 137  # Table 4.2: of state and two actions, with biases


def test_tiles_multiply_cycles() -> None:
    assert product_cycles(Unit(4, 4), 10, 8, 9) == 6 * product_cycles(Unit(4, 4), 10, 4, 4)
    assert outer_cycles(Unit(4, 4), 10, 8, 9) == 6 * outer_cycles(Unit(4, 4), 10, 3, 1)


@pytest.mark.parametrize("batch", [32, 256, 4096])
def test_chosen_sizes_fit_and_use_what_they_are_given(batch: int) -> None:
    steps = []
    for dsps in (8, 40, 156, 2000):
        model = choose(CARTPOLE, batch, clock_hz=1e8, dsps=dsps)
        assert model.dsps <= dsps
        steps.append(model.gradient_step_seconds(batch))
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 4


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(Refusal, match="multipliers"):
        choose(CARTPOLE, 32, clock_hz=1e8, dsps=7)
    with pytest.raises(Refusal, match="one each"):
        LearnerModel(CARTPOLE, (Unit(1, 1),), 1, 1e8)
    with pytest.raises(Refusal, match="measured-pnr"):
        LearnerModel(CARTPOLE, (Unit(1, 1),) * 8, 1, 1e8, "guessed")
