"""Losses for vector actions: tables by hand, slow oracles, and gradients against autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from murmurate.losses.continuous import (
    clipped_target,
    soft_policy_slope,
    soft_target,
    squared_error,
    squashed_gaussian,
    temperature_slope,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_target_takes_the_smaller_critic_of_each_row() -> None:
    q = torch.tensor([[1.0, 5.0, 7.0], [2.0, 3.0, 9.0]])
    target = clipped_target(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 0.0]), q)
    assert target.tolist() == [1.5, 5.0, 3.0]
    single = clipped_target(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([[4.0]]))
    assert single.tolist() == [3.0]
    three = clipped_target(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([[4.0], [2.0], [3.0]]))
    assert three.tolist() == [2.0]


def test_the_soft_target_adds_the_weighted_entropy() -> None:
    target = soft_target(
        torch.tensor([1.0, 1.0]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([[4.0, 4.0], [3.0, 5.0]]),
        torch.tensor([-2.0, -2.0]),
        torch.tensor(0.25),
    )
    assert target.tolist() == [1.0 + 0.5 * (3.0 + 0.5), 1.0]


def test_the_squared_error_and_its_slope() -> None:
    q, target, weight = drawn(2, 6).requires_grad_(), drawn(6, seed=1), drawn(6, seed=2).abs()
    step = squared_error(q.detach(), target, weight)
    each = [torch.nn.functional.mse_loss(row, target, reduction="none") for row in q]
    loss = sum((weight * row).mean() for row in each)
    loss.backward()
    torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.slope, q.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.error, (target - q).detach())


def test_squashed_gaussians_are_torch_s() -> None:
    mean, log_std, noise = drawn(40, 3), 0.5 * drawn(40, 3, seed=1), drawn(40, 3, seed=2)
    found = squashed_gaussian(mean, log_std, noise)
    base = Normal(mean, log_std.exp())
    squashed = TransformedDistribution(base, [TanhTransform(cache_size=1)])
    torch.testing.assert_close(found.action, torch.tanh(mean + log_std.exp() * noise))
    u = mean + log_std.exp() * noise
    by_hand = base.log_prob(u).sum(1) - torch.log1p(-found.action.square()).sum(1)
    torch.testing.assert_close(found.log_probability, by_hand, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        found.log_probability, squashed.log_prob(found.action).sum(1), rtol=1e-6, atol=1e-6
    )


def test_far_out_the_log_probability_stays_exact() -> None:
    """tanh(30) is 1 in float32; log(1 - tanh(u)**2) is log 4 - 2 |u| there."""
    for u in (30.0, -30.0):
        found = squashed_gaussian(torch.tensor([[u]]), torch.zeros(1, 1), torch.zeros(1, 1))
        expected = -0.5 * math.log(2 * math.pi) - (math.log(4) - 60.0)
        assert found.log_probability.item() == pytest.approx(expected, rel=1e-6)


def test_the_policy_s_slope_is_autograd_s() -> None:
    """With values Q(s, a) = sum_i c_i sin(a_i), for which dQ/da is c cos(a)."""
    mean, log_std = drawn(9, 3).requires_grad_(), (0.5 * drawn(9, 3, seed=1)).requires_grad_()
    noise, c, alpha = drawn(9, 3, seed=2), drawn(9, 3, seed=3), torch.tensor(0.3, dtype=torch.float64)
    found = squashed_gaussian(mean, log_std, noise)
    (alpha * found.log_probability - (c * found.action.sin()).sum(1)).mean().backward()
    action = found.action.detach()
    slope = soft_policy_slope(action, log_std.detach(), noise, c * action.cos(), alpha)
    torch.testing.assert_close(slope.mean, mean.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope.log_std, log_std.grad, rtol=1e-9, atol=1e-12)


def test_the_temperature_rises_while_the_entropy_is_too_low() -> None:
    log_alpha, log_probability = torch.zeros((), requires_grad=True), torch.tensor([3.0, 5.0])
    (-log_alpha * (log_probability + -2.0).mean()).backward()
    slope = temperature_slope(log_probability, -2.0)
    assert slope == log_alpha.grad
    assert slope == -2.0  # an entropy of -4 is below -2, and the step is against the slope


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: clipped_target(torch.zeros(3), torch.zeros(2), torch.zeros(2, 3)),
        lambda: clipped_target(torch.zeros(3), torch.zeros(3), torch.zeros(2, 4)),
        lambda: soft_target(
            torch.zeros(3), torch.zeros(3), torch.zeros(2, 3), torch.zeros(1), torch.tensor(1.0)
        ),
        lambda: squared_error(torch.zeros(2, 3), torch.zeros(2), torch.zeros(3)),
        lambda: squared_error(torch.zeros(2, 3), torch.zeros(3), torch.zeros(3, 1)),
        lambda: squashed_gaussian(torch.zeros(3, 2), torch.zeros(2), torch.zeros(3, 2)),
        lambda: soft_policy_slope(*[torch.zeros(3, 2)] * 3, torch.zeros(3), torch.tensor(1.0)),
        lambda: temperature_slope(torch.zeros(3, 1), -1.0),
    ],
)
def test_wrong_shapes_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="must"):
        wrong()
