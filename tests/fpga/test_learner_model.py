"""Cycles are those of a schedule that is simulated row by row, no other sizes are faster than those that
are chosen and fit the device, and more of anything is never slower."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from murmurate.errors import Refusal
from murmurate.fpga.learner_model import (
    LearnerModel,
    Unit,
    choose,
    memory_bits,
    outer_cycles,
    product_cycles,
    stages,
)

CARTPOLE = (4, 8, 8, 2)


def test_stages_and_multiplications_of_the_thesis() -> None:
    assert len(stages(CARTPOLE)) + 1 == 3 * 3  # with LOSS: 3 (L - 1) of L = 4 layers of neurons
    critic = [k * n for kind, k, n in stages((6, 8, 8, 1)) if kind == "FW"]
    assert sum(critic) == 137  # Table 4.2: of state and two actions, with biases


def test_memory_is_that_of_weights_gradients_and_samples() -> None:
    """A net 2-3-1 has 3 x 3 + 4 weights with biases, of which 3 are transposed for BW, and for each
    sample 2 + 3 activations, an output, 3 + 1 errors, a target, and an action of one bit."""
    in_all = 13 * 32 + 10 * ((5 + 1 + 4 + 1) * 16 + 1)
    assert memory_bits((2, 3, 1), 10) == in_all + 13 * (40 + 16) + 3 * 16
    assert memory_bits((2, 3, 1), 10, pipelines=4) == in_all + 4 * (13 * (40 + 16) + 3 * 16)


def test_tiles_multiply_cycles() -> None:
    assert product_cycles(Unit(4, 4), 10, 8, 9) == 6 * product_cycles(Unit(4, 4), 10, 4, 4)
    assert outer_cycles(Unit(4, 4), 10, 8, 9) == 6 * outer_cycles(Unit(4, 4), 10, 3, 1)


def simulated_cycles(model: LearnerModel, batch: int) -> int:
    """Cycles of a gradient step, from the cycle in which each unit accepts each row of each tile. A row
    is read by the next stage four cycles after it has left the one before, errors four cycles after
    outputs."""
    shapes = zip(stages(model.layers), model.units, strict=True)
    units = [(math.ceil(k / u.rows) * math.ceil(n / u.columns), u) for (_, k, n), u in shapes]
    layers = len(model.layers) - 1

    def pass_rows(tiles: int, unit: Unit, arrivals: list[int]) -> list[int]:
        cycle = left = 0  # left: when the last row of a tile leaves
        for tile in range(tiles):
            cycle = left + 1 + unit.rows if tile else 0  # the array is empty while it is loaded
            leaving = []
            for arrival in arrivals:
                cycle = max(cycle, arrival)
                leaving.append(cycle + unit.rows + unit.columns - 1)
                cycle += 1
            left = leaving[-1]
        return leaving

    def add_pairs(tiles: int, unit: Unit, arrivals: list[int]) -> int:
        cycle = 0
        for _ in range(tiles):
            for arrival in arrivals:
                cycle = max(cycle, arrival) + 1
            cycle += unit.rows + unit.columns - 1 + unit.rows
        return cycle

    rows = [3 + units[0][1].rows] * math.ceil(batch / model.dp)
    for tiles, unit in units[:layers]:
        rows = [row + 4 for row in pass_rows(tiles, unit, rows)]
    errors, ends = [row + 4 for row in rows], []  # LOSS
    for layer in range(layers):
        ends.append(add_pairs(*units[2 * layers - 1 + layer], errors))
        if layer < layers - 1:
            errors = [row + 4 for row in pass_rows(*units[layers + layer], errors)]
    weights = max((k + 1) * n for k, n in itertools.pairwise(model.layers))
    return max(ends) + weights + 3 + math.ceil(math.log2(model.dp))


def test_cycles_are_those_of_the_schedule() -> None:
    generator = random.Random(0)
    for _ in range(200):
        layers = tuple(generator.randint(1, 9) for _ in range(generator.randint(2, 5)))
        units = tuple(Unit(generator.randint(1, k), generator.randint(1, n)) for _, k, n in stages(layers))
        model = LearnerModel(layers, units, 1 << generator.randrange(4), 1e8)
        batch = generator.randint(8, 100)
        assert model.gradient_step_cycles(batch) == simulated_cycles(model, batch)
    tiny = [(1, 2), (1, 4), (1, 1), (1, 1), (1, 4), (1, 1), (1, 4), (1, 2)]  # 16 to 20 tiles in each stage
    tiled = LearnerModel(CARTPOLE, tuple(Unit(*size) for size in tiny), 8, 1e8)
    assert tiled.gradient_step_cycles(64) == simulated_cycles(tiled, 64) == 1283


@pytest.mark.parametrize(
    ("layers", "batch", "dsps"), [((2, 2, 1), 8, 14), ((1, 2, 2), 4, 24), ((3, 2), 16, 9)]
)
def test_no_other_sizes_are_faster(layers: tuple[int, ...], batch: int, dsps: int) -> None:
    shapes, cycles = stages(layers), []
    sizes = [[Unit(r + 1, c + 1) for r in range(k) for c in range(n)] for _, k, n in shapes]
    for units in itertools.product(*sizes):
        for dp in (1, 2, 4):
            model = LearnerModel(layers, units, dp, 1e8)
            if dp <= batch and model.dsps <= dsps:
                cycles.append(model.gradient_step_cycles(batch))
    assert choose(layers, batch, clock_hz=1e8, dsps=dsps).gradient_step_cycles(batch) == min(cycles)


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
    with pytest.raises(Refusal, match="at least 1"):
        choose(CARTPOLE, 0, clock_hz=1e8)
    with pytest.raises(Refusal, match="at least two"):
        choose((4,), 32, clock_hz=1e8)
    with pytest.raises(Refusal, match="at least 1 x 1"):
        Unit(0, 1)
