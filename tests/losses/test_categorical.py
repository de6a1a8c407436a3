"""Projected distributions of returns by hand, against the papers' sums, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from murmurate.losses.categorical import (
    categorical_cross_entropy,
    expectation,
    projected_target,
    support,
)


@pytest.mark.parametrize(
    ("reward", "discount", "p", "projected"),
    [
        (0.0, 1.0, [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),  # nothing moves
        (1.0, 1.0, [0.2, 0.3, 0.5], [0.0, 0.2, 0.8]),  # by one atom; what would leave the support stays
        (0.5, 1.0, [0.2, 0.3, 0.5], [0.1, 0.25, 0.65]),  # between two: half to each
        (0.25, 1.0, [1.0, 0.0, 0.0], [0.75, 0.25, 0.0]),  # the nearer takes more
        (0.25, 0.0, [0.2, 0.3, 0.5], [0.0, 0.75, 0.25]),  # terminated: all at the reward
        (0.0, 0.5, [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]),  # shrunk towards 0
        (-9.0, 0.9, [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]),  # below the support
        (9.0, 0.9, [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]),  # above it
        (1.0, 0.0, [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]),  # exactly at its end
    ],
)
def test_targets_by_hand(reward: float, discount: float, p: list[float], projected: list[float]) -> None:
    """On the support (-1, 0, 1)."""
    target = projected_target(
        torch.tensor([reward]), torch.tensor([discount]), torch.tensor([p]), support(-1, 1, 3)
    )
    torch.testing.assert_close(target, torch.tensor([projected]), rtol=0, atol=1e-6)


def in_the_papers_notation(r: Tensor, d: Tensor, p: Tensor, z: Tensor) -> Tensor:
    """Bellemare et al. 2017, eq. 7, one sum after the other."""
    v_min, v_max, dz = float(z[0]), float(z[-1]), float(z[1] - z[0])
    found = torch.zeros(p.shape, dtype=torch.float64)
    for b in range(len(p)):
        for i in range(len(z)):
            for j in range(len(z)):
                moved = min(max(float(r[b]) + float(d[b]) * float(z[j]), v_min), v_max)
                share = min(max(1 - abs(moved - float(z[i])) / dz, 0.0), 1.0)
                found[b, i] += share * float(p[b, j])
    return found


def test_targets_are_the_papers_sums() -> None:
    g = torch.Generator().manual_seed(0)
    z = support(-3.0, 7.0, 21).double()
    p = torch.rand(40, 21, generator=g, dtype=torch.float64)
    p /= p.sum(1, keepdim=True)
    r = 6 * torch.randn(40, generator=g, dtype=torch.float64)
    d = torch.rand(40, generator=g, dtype=torch.float64) * (torch.rand(40, generator=g) < 0.8)
    target = projected_target(r, d, p, z)
    torch.testing.assert_close(target, in_the_papers_notation(r, d, p, z), rtol=0, atol=1e-12)
    torch.testing.assert_close(target.sum(1), torch.ones(40).double())


def test_the_projection_keeps_the_mean_of_what_stays_inside() -> None:
    g = torch.Generator().manual_seed(1)
    z = support(-10.0, 10.0, 51).double()
    p = torch.rand(30, 51, generator=g, dtype=torch.float64).softmax(1)
    r, d = torch.randn(30, generator=g, dtype=torch.float64), torch.full((30,), 0.5).double()
    target = projected_target(r, d, p, z)
    torch.testing.assert_close(expectation(target, z), r + d * expectation(p, z))


def test_a_return_at_an_atom_goes_to_it_whatever_its_rounding() -> None:
    """Floor and ceiling of such a place are the same, where a formula with both would lose its share."""
    z = support(-150.0, 150.0, 51)
    target = projected_target(z, torch.zeros(51), torch.full((51, 51), 1 / 51), z)
    torch.testing.assert_close(target, torch.eye(51), rtol=0, atol=1e-4)


def test_the_loss_is_the_weighted_cross_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    target = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    step = categorical_cross_entropy(logits, target, torch.tensor([1.0, 0.5]))
    each = torch.tensor([0.693147, 0.126928])
    torch.testing.assert_close(step.each, each, rtol=0, atol=1e-5)
    torch.testing.assert_close(step.loss, (each * torch.tensor([1.0, 0.5])).mean(), rtol=0, atol=1e-5)


def test_its_gradient_is_the_difference_of_the_distributions() -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 7, generator=g, dtype=torch.float64, requires_grad=True)
    target = torch.rand(5, 7, generator=g, dtype=torch.float64).softmax(1).requires_grad_()
    weight = torch.rand(5, generator=g, dtype=torch.float64).requires_grad_()
    categorical_cross_entropy(logits, target, weight).loss.backward()
    by_hand = weight[:, None] * (logits.softmax(1) - target) / 5
    torch.testing.assert_close(logits.grad, by_hand.detach())
    assert target.grad is None
    assert weight.grad is None, "importance weights and targets are constants"
    torch.autograd.gradcheck(
        lambda x: categorical_cross_entropy(x, target.detach(), weight.detach()).loss, (logits,)
    )


@pytest.mark.parametrize("v_min", [1.0, 2.0])
def test_a_support_must_have_a_width(v_min: float) -> None:
    with pytest.raises(ValueError, match="the first must be the smaller"):
        support(v_min, 1.0, 5)
    with pytest.raises(ValueError, match="at least two"):
        support(0.0, 1.0, 1)


def test_wrong_shapes_are_refused() -> None:
    z, r, p = support(-1, 1, 3), torch.zeros(2), torch.full((2, 3), 1 / 3)
    for wrong in ((r[:1], r, p, z), (r, r, p[:1], z), (r, r, p, z[:2]), (r, r, p[0], z), (r, r[:1], p, z)):
        with pytest.raises(ValueError, match=r"shape|rank|dimension"):
            projected_target(*wrong)
    for wrong in ((p, p[:1], r), (p, p, r[:1]), (p[0], p[0], r)):
        with pytest.raises(ValueError, match=r"shape|rank|dimension"):
            categorical_cross_entropy(*wrong)
