"""The Gaussian likelihood: a table, slow oracles, closed-form against autograd gradients; entropy's gain."""

import math

import pytest
import torch
from torch.distributions import Normal

from murmurate.losses.gaussian_nll import (
    bounded_nll_gradient,
    entropy_priority,
    gaussian_nll,
    soft_bounds,
)


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(
    ("mean", "log_variance", "target", "loss"),
    [
        ([[1.0]], [[0.0]], [[1.0]], 0.0),
        ([[3.0]], [[0.0]], [[1.0]], 4.0),
        ([[3.0]], [[math.log(4.0)]], [[1.0]], 1.0 + math.log(4.0)),
        ([[1.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [3.0, 0.0]], (1 + 0 + 9 + 0) / 4),
    ],
)
def test_table(mean, log_variance, target, loss):
    found = gaussian_nll(torch.tensor(mean), torch.tensor(log_variance), torch.tensor(target))
    assert found.item() == pytest.approx(loss)


def test_it_is_the_likelihood_of_the_distribution():
    mean, log_variance, target = (drawn(3, 5, 2, seed=s) for s in range(3))
    likelihood = Normal(mean, (log_variance / 2).exp()).log_prob(target).mean((1, 2))
    expected = -2 * likelihood - math.log(2 * math.pi)
    torch.testing.assert_close(gaussian_nll(mean, log_variance, target), expected, rtol=1e-12, atol=1e-12)


def test_soft_bounds():
    low, high = torch.tensor([-10.0, -3.0]).double(), torch.tensor([0.5, 2.0]).double()
    x = torch.tensor([[-1e3, 0.0], [1e3, -1e3], [-4.0, 1e3]]).double()
    y = soft_bounds(x, low, high)
    assert (y >= low).all()
    assert (y <= high + torch.nn.functional.softplus(low - high) + 1e-12).all()
    torch.testing.assert_close(y[0, 0], low[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(y[2, 0], x[2, 0], rtol=0, atol=0.02)  # far from both bounds
    slopes = soft_bounds(drawn(50, 2).sort(0).values * 3, low, high).diff(dim=0)
    assert (slopes > 0).all()


@pytest.mark.parametrize("scale", [1.0, 30.0])  # the second far beyond the bounds
def test_the_closed_form_is_autograds_gradient(scale):
    output, target = drawn(3, 6, 4, scale=scale).requires_grad_(), drawn(3, 6, 2, seed=1)
    low, high = torch.full((2,), -4.0).double(), torch.tensor([0.5, 1.5]).double()
    low.requires_grad_()
    high.requires_grad_()
    loss = gaussian_nll(output[..., :2], soft_bounds(output[..., 2:], low, high), target)
    oracle = torch.autograd.grad(loss.sum(), (output, low, high))
    with torch.no_grad():
        found = bounded_nll_gradient(output, target, low, high)
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(found[1:], oracle, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_nothing_is_broadcast():
    with pytest.raises(ValueError, match="target"):
        gaussian_nll(torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="output"):
        bounded_nll_gradient(torch.zeros(2, 4, 3), torch.zeros(2, 4, 2), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="high"):
        soft_bounds(torch.zeros(4, 2), torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="log_std"):
        entropy_priority(torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(2))


# -- entropy (Zhang 2022, section 3.2.1) -------------------------------------------------------------------


def gaussian_entropy(x: torch.Tensor) -> torch.Tensor:
    """Differential entropy of the Gaussian fitted to ``x`` [N] by maximum likelihood."""
    return 0.5 * torch.log(2 * math.pi * math.e * x.var(correction=0))


@pytest.mark.parametrize("t", [-4.0, -0.5, 0.0, 1.0, 3.0])
def test_lemma_3_2_2_the_gain_of_entropy_by_one_more_observation(t):
    """Exactly, g(t) = 1/2 log(N/(N+1) (1 + z^2/(N+1))), z = (t - mu)/sigma. The lemma's limit, N g ->
    -log(sqrt(2 pi) f(t) sigma), leaves out the factor N/(N+1), which adds -1/2 to N g for every t."""
    for number in (1_000, 100_000):
        x = drawn(number, seed=3) * 2 + 5
        mean, std = x.mean(), x.std(correction=0)
        new = mean + t * std
        gain = gaussian_entropy(torch.cat((x, new[None]))) - gaussian_entropy(x)
        exact = 0.5 * math.log(number / (number + 1) * (1 + t * t / (number + 1)))
        assert gain.item() == pytest.approx(exact, abs=1e-12)
        lemma = -torch.log(math.sqrt(2 * math.pi) * Normal(mean, std).log_prob(new).exp() * std)
        assert number * gain.item() == pytest.approx(lemma.item() - 0.5, abs=(1 + t**4) / number)


def test_theorem_3_2_1_the_greatest_priority_adds_most_entropy():
    """Among candidate actions at states with equally many earlier actions, the one with the greatest
    priority increases the sum of the conditional entropies most."""
    earlier = drawn(6, 400, seed=4) * torch.linspace(0.3, 3.0, 6)[:, None].double() + drawn(6, 1, seed=5)
    candidates = earlier.mean(1) + drawn(6, seed=6) * 2 * earlier.std(1, correction=0)
    priority = entropy_priority(
        candidates[:, None], earlier.mean(1)[:, None], earlier.std(1, correction=0).log()[:, None]
    )
    gains = torch.stack(
        [
            gaussian_entropy(torch.cat((x, a[None]))) - gaussian_entropy(x)
            for x, a in zip(earlier, candidates, strict=True)
        ]
    )
    assert priority.argmax() == gains.argmax()
    assert torch.equal(priority.argsort(), gains.argsort())


def test_the_priority_against_densities():
    action, mean, log_std = (drawn(7, 3, seed=s) for s in range(3))
    for b in range(7):
        slow = 0.0
        for d in range(3):
            density = Normal(mean[b, d], log_std[b, d].exp()).log_prob(action[b, d]).exp()
            slow -= math.log(math.sqrt(2 * math.pi) * density * log_std[b, d].exp()) / 3
        assert entropy_priority(action, mean, log_std)[b].item() == pytest.approx(slow, rel=1e-10)
    assert entropy_priority(mean, mean, log_std).abs().max() == 0
