"""The fixed-point learner computes the gradient of its loss, splits batches exactly, and learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.fpga.fixed_point import Lfsr, Saturations, limits, longest_sum, matmul, narrow, quantise, value
from murmurate.fpga.learner import EmulatedLearner, FixedPointFormats


def learner(seed: int = 0, **options: Any) -> EmulatedLearner:
    settings = {"rate_shift": 4, "generator": torch.Generator().manual_seed(seed), **options}
    return EmulatedLearner((4, 8, 8, 2), **settings)


def batch(size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(size, 4, generator=generator)
    return (
        observation,
        torch.randint(2, (size,), generator=generator),
        torch.randn(size, generator=generator),
    )


def test_narrowing_rounds_halves_upwards_and_saturates() -> None:
    count = Saturations()
    wide = torch.tensor([6, 5, -6, -7, 1 << 40, -(1 << 40)])
    assert narrow(wide, 2, count=count).tolist() == [2, 1, -1, -2, 32767, -32768]
    assert (count.numbers, count.saturated) == (6, 2)
    assert narrow(torch.tensor([3]), -2).tolist() == [12]


@pytest.mark.parametrize("shift", [3, 16, 20])
def test_stochastic_rounding_has_the_number_as_its_mean(shift: int) -> None:
    lfsr, wide = Lfsr(), 11 * 2**shift // 8
    noise = lfsr.draw((1 << 16) - 1)
    assert len(noise.unique()) == len(noise)  # all states but 0
    assert lfsr.draw(1).item() == noise[0]
    mean = narrow(torch.full_like(noise, wide), shift, noise=noise).double().mean()
    assert mean == pytest.approx(11 / 8, abs=1e-4)


def test_sums_that_may_overflow_are_refused() -> None:
    low, _ = limits(16)
    longest = longest_sum(40)
    full = torch.full((1, longest), low)
    assert matmul(full, full.T).item() <= limits(40)[1]
    more = torch.full((1, longest + 1), low)
    assert (more @ more.T).item() > limits(40)[1]
    with pytest.raises(Refusal, match="may overflow"):
        matmul(more, more.T)


def test_a_layer_with_too_many_inputs_is_refused() -> None:
    inputs = longest_sum(40)  # and the constant 1, whose weight is the bias
    wide = EmulatedLearner((inputs, 2), rate_shift=4, generator=torch.Generator())
    with pytest.raises(Refusal, match=f"a sum of {inputs + 1} products .* Use narrower layers"):
        wide.values(torch.zeros(1, inputs))


def test_quantising_keeps_what_fits() -> None:
    numbers = torch.arange(-32768, 32768, 7)
    assert torch.equal(quantise(value(numbers, 11), 11), numbers)
    count = Saturations()
    assert quantise(torch.tensor([1e9, -1e9, 1.0]), 11, count=count).tolist() == [32767, -32768, 2048]
    assert (count.numbers, count.saturated) == (3, 2)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(Refusal, match="not finite"):
            quantise(torch.tensor([wrong]), 11)


def test_gradients_are_those_of_the_huber_loss() -> None:
    fixed = learner()
    n = fixed.numbers
    weights = [value(w, n.weight).requires_grad_() for w in fixed.weights]
    observation, action, target = batch(32)
    x = observation
    for layer, weight in enumerate(weights):
        x = torch.cat((x, torch.ones(len(x), 1)), 1) @ weight
        x = x if layer == 2 else x.relu()
    loss = torch.nn.functional.huber_loss(x.gather(1, action[:, None])[:, 0], target, reduction="sum")
    expected = torch.autograd.grad(loss, weights)
    step = fixed.step(observation, action, target)
    for mine, theirs in zip(step.gradients, expected, strict=True):
        scale = theirs.abs().max()
        assert (value(mine, n.activation + n.error) - theirs).abs().max() < 0.01 * scale


@pytest.mark.parametrize("pipelines", [2, 8])
def test_pipelines_give_the_very_weights_of_one(pipelines: int) -> None:
    one, many = learner(), learner(pipelines=pipelines)
    for seed in range(3):
        for each in (one, many):
            each.step(*batch(32, seed))
    assert all(torch.equal(a, b) for a, b in zip(one.masters, many.masters, strict=True))


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_loss_falls(stochastic: bool) -> None:
    fixed = learner(stochastic=stochastic)
    observation, action, _ = batch(256)
    target = (observation[:, 0] - observation[:, 1] * action).clamp(-2, 2)
    errors = [fixed.step(observation, action, target).td_error.abs().mean().item() for _ in range(400)]
    assert errors[-1] < 0.3 * errors[0]
    assert fixed.saturations["weights"].saturated == 0


def test_weights_of_each_layer_are_rounded_by_a_shift_register_of_their_own() -> None:
    fixed = learner(stochastic=True)
    before = [master.clone() for master in fixed.masters]
    gradients = fixed.step(*batch(32)).gradients
    for old, new, gradient in zip(before, fixed.masters, gradients, strict=True):
        noise = Lfsr().draw(gradient.numel()).view_as(gradient)
        assert torch.equal(new, old - narrow(gradient, fixed.update_shift(32), 56, noise=noise))


def test_saturations_are_those_of_gradient_steps() -> None:
    fixed = learner()
    observation, action, target = batch(32)
    observation[3], target[:2] = 1e3, -1e3
    fixed.values(observation)
    assert all(count.numbers == 0 for count in fixed.saturations.values())
    fixed.step(observation, action, target)
    numbers = {stage: (count.numbers, count.saturated) for stage, count in fixed.saturations.items()}
    assert numbers["inputs"] == (32 * 4 + 32, 4 + 2)
    assert numbers["forward"][0] == 32 * (8 + 8 + 2)
    assert numbers["backward"][0] == 32 * (8 + 8)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (33, {}, "power of two"),
        (0, {}, "power of two from 1 to 256"),
        (512, {"pipelines": 2}, "power of two from 2 to 256"),  # each pipeline's sum fits, and all do not
        (2, {"pipelines": 4}, "power of two from 4"),
        (4, {"rate_shift": 0}, "rate_shift of 2, or a larger batch"),
        (64, {"rate_shift": 31, "numbers": FixedPointFormats(master=20)}, "rate_shift of 29, or a smaller"),
    ],
)
def test_batches_that_hardware_cannot_take_are_refused(
    size: int, options: dict[str, Any], message: str
) -> None:
    fixed = learner(**options)
    before = [master.clone() for master in fixed.masters]
    with pytest.raises(Refusal, match=message):
        fixed.step(*batch(size))
    assert all(torch.equal(a, b) for a, b in zip(before, fixed.masters, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (4,)}, "widths"),
        *(({"pipelines": wrong}, "power of two up to 256") for wrong in (0, -1, 3, 512)),
        *(({"rate_shift": wrong}, "0 to 31") for wrong in (-1, 32, 70)),
    ],
)
def test_learners_that_cannot_be_built_are_refused(options: dict[str, Any], message: str) -> None:
    settings = {"layers": (4, 2), "rate_shift": 4, "generator": torch.Generator(), **options}
    with pytest.raises(Refusal, match=message):
        EmulatedLearner(**settings)


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"activation": 15, "error": 15}, "fractional bits and errors"),
        ({"activation": 12, "error": 11}, "fractional bits and errors"),
        ({"activation": -1}, "fractional bits and errors"),
        ({"weight": 28}, "more for master"),
        ({"master": 32}, "more for master"),
        ({"accumulator_bits": 31}, "32 to 56"),
        ({"accumulator_bits": 57}, "32 to 56"),
    ],
)
def test_formats_that_do_not_fit_one_another_are_refused(formats: dict[str, int], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        FixedPointFormats(**formats)
