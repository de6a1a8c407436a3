"""The learner's pipelines, simulated, compute what the emulation computes, in the model's cycles."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("amaranth", reason="needs murmurate[fpga]")

from murmurate.errors import Refusal
from murmurate.fpga.fixed_point import limits
from murmurate.fpga.learner import MASTER_BITS, EmulatedLearner, FixedPointFormats
from murmurate.fpga.learner_model import LearnerModel, Unit, choose, stages
from murmurate.fpga.pipeline import LearnerPipeline
from murmurate.fpga.pipeline_simulation import SimulatedPipeline

CARTPOLE = (4, 8, 8, 2)


def emulated(layers: tuple[int, ...], seed: int = 0, rate_shift: int = 8, **options: Any) -> EmulatedLearner:
    generator = torch.Generator().manual_seed(seed)
    return EmulatedLearner(layers, generator=generator, rate_shift=rate_shift, **options)


def transitions(layers: tuple[int, ...], batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Observations, actions and targets, of which some do not fit the format of activations."""
    generator = torch.Generator().manual_seed(seed)
    observation = 6 * torch.randn(batch, layers[0], generator=generator)
    action = torch.randint(layers[-1], (batch,), generator=generator)
    return observation, action, 8 * torch.randn(batch, generator=generator)


def check_steps(learner: EmulatedLearner, units: tuple[Unit, ...], batch: int, steps: int) -> None:
    """``steps`` gradient steps change all weights alike, to the bit, and each takes the model's cycles."""
    simulated = SimulatedPipeline(learner, units, batch)
    model = LearnerModel(learner.layers, units, learner.pipelines, 1e8)
    for seed in range(steps):
        before = [master.clone() for master in learner.masters]
        found = simulated.step(*transitions(learner.layers, batch, seed))
        expected = learner.step(*transitions(learner.layers, batch, seed))
        assert found.td_error.tolist() == expected.td_error.tolist()
        assert [w.tolist() for w in simulated.masters] == [w.tolist() for w in learner.masters]
        assert [w.tolist() for w in simulated.operands] == [w.tolist() for w in learner.weights]
        assert not all(map(torch.equal, before, learner.masters))
        assert found.cycles == model.gradient_step_cycles(batch)


@pytest.mark.parametrize("seed", range(8))
def test_drawn_pipelines(seed: int) -> None:
    draws = random.Random(seed)
    layers = tuple(draws.randint(1, 5) for _ in range(draws.randint(2, 4)))
    units = tuple(Unit(draws.randint(1, k), draws.randint(1, n)) for _, k, n in stages(layers))
    pipelines = 1 << draws.randrange(3)
    learner = emulated(layers, seed, pipelines=pipelines, stochastic=bool(seed % 2))
    check_steps(learner, units, pipelines << draws.randrange(3), steps=2)


def test_cartpole_as_chosen_for_a_device() -> None:
    model = choose(CARTPOLE, 16, clock_hz=1e8)
    learner = emulated(CARTPOLE, pipelines=model.dp, rate_shift=4, stochastic=True)
    check_steps(learner, model.units, 16, steps=2)


def test_other_formats() -> None:
    numbers = FixedPointFormats(activation=0, weight=0, error=14, master=16, accumulator_bits=36)
    learner = emulated((2, 3, 2), numbers=numbers, rate_shift=2)
    check_steps(learner, (Unit(2, 3), Unit(1, 2), Unit(2, 1), Unit(4, 2), Unit(1, 1)), 2, steps=2)


def test_numbers_saturate_as_in_the_emulation() -> None:
    """Hidden unit 0 saturates, and the outputs ignore it. Unit 1 lowers the outputs, so its bias is to
    fall below the least number."""
    learner = emulated((2, 4, 2), rate_shift=1)
    low, high = limits(MASTER_BITS)
    hidden, last = learner.masters
    hidden[:, 0], hidden[0, 1], hidden[-1, 1], last[:], last[1] = high, high >> 1, low, 0, low
    check_steps(learner, tuple(Unit(k, n) for _, k, n in stages((2, 4, 2))), 8, steps=3)
    assert all(learner.saturations[stage].saturated for stage in ("forward", "backward", "weights"))


class Hesitant(SimulatedPipeline):
    """Which offers something to a port in one of four cycles, each port by itself."""

    def __init__(self, *arguments: Any) -> None:
        self.chance = random.Random(0)
        super().__init__(*arguments)

    def _offers(self) -> bool:
        return self.chance.random() < 0.25


def small_units(layers: tuple[int, ...]) -> tuple[Unit, ...]:
    return tuple(Unit(-(-k // 2), -(-n // 2)) for _, k, n in stages(layers))


def test_whoever_is_late_is_waited_for() -> None:
    layers = (3, 4, 2)
    learner = emulated(layers, pipelines=4)
    hesitant = Hesitant(learner, small_units(layers), 16)
    prompt = LearnerModel(layers, small_units(layers), 4, 1e8).gradient_step_cycles(16)
    for seed in range(3):
        found = hesitant.step(*transitions(layers, 16, seed))
        expected = learner.step(*transitions(layers, 16, seed))
        assert found.td_error.tolist() == expected.td_error.tolist()
        assert [w.tolist() for w in hesitant.masters] == [w.tolist() for w in learner.masters]
        assert found.cycles > prompt


@pytest.mark.parametrize("kind", [SimulatedPipeline, Hesitant])
def test_a_layer_is_loaded_between_steps_as_a_whole(kind: type[SimulatedPipeline]) -> None:
    """What is to be loaded during a step waits for its end, and a step for the end of a load, also in its
    pauses."""
    layers = (3, 4, 2)
    other = emulated(layers, seed=1)
    simulated = kind(emulated(layers), small_units(layers), 8)
    sizes = [master.numel() for master in other.masters]
    simulated._queue_samples(*transitions(layers, 8, 0))
    simulated._run(20)
    assert len(simulated._samples[0]) < 8, "the step has begun"
    simulated._queue_weights(other.masters)
    while [len(weights) for weights in simulated._updated] != sizes:
        assert len(simulated._loads) == sum(sizes)
        simulated._run(1)
    while len(simulated._loads) >= sizes[-1]:
        simulated._run(1)
    simulated._queue_samples(
        *transitions(layers, 8, 1)
    )  # when the first weight of the last layer is accepted
    while [len(weights) for weights in simulated._updated] != [3 * size for size in sizes]:
        simulated._run(1)
    other.step(*transitions(layers, 8, 1))
    for given, master in zip(simulated._updated, other.masters, strict=True):
        assert [weight for weight, _ in given[-master.numel() :]] == master.flatten().tolist()


def test_what_cannot_be_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    units = tuple(Unit(1, 1) for _ in stages((2, 2)))
    monkeypatch.setattr(
        LearnerPipeline, "_MustUse__silence", True
    )  # no warning that these were not elaborated
    with pytest.raises(Refusal, match="power of two"):
        LearnerPipeline(emulated((2, 2)), units, 12)
    with pytest.raises(Refusal, match="one each"):
        LearnerPipeline(emulated((2, 2)), units[:1], 8)
    with pytest.raises(Refusal, match="a sum of 512 products may overflow an accumulator of 40 bits"):
        LearnerPipeline(emulated((511, 2)), units, 8)
    simulated = SimulatedPipeline(emulated((2, 2)), units, 8)
    with pytest.raises(ValueError, match="batches of 8"):
        simulated.step(*transitions((2, 2), 4, 0))
    observation, action, target = transitions((2, 2), 8, 0)
    with pytest.raises(ValueError, match="not among the 2 outputs"):
        simulated.step(observation, action + 1, target)
    gc.collect()
