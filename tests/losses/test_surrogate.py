"""TRPO's and PPO's objectives: tables, the papers' sums, and numerical gradients at the clip's kink."""

import math

import pytest
import torch

from murmurate.losses.surrogate import clipped_surrogate, clipped_value_loss, surrogate
from oracles import trust_region as oracle


def draw(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_ratio(ratio):
    """log pi with which the ratio to an old log pi of -1 is this."""
    return torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)


OLD = torch.tensor([[-1.0]], dtype=torch.float64)

# ratio, advantage, loss with epsilon = 0.2, d loss / d log pi; by hand, all cases of the paper's Fig. 1
TABLE = [
    (1.0, 2.0, -2.0, -2.0),
    (1.1, 2.0, -2.2, -2.2),  # inside the interval
    (1.5, 2.0, -2.4, 0.0),  # beyond it, where the advantage wants to go: no gradient
    (0.5, 2.0, -1.0, -1.0),  # beyond it on the other side: the way back is open
    (1.5, -2.0, 3.0, 3.0),
    (0.5, -2.0, 1.6, 0.0),
    (0.9, -2.0, 1.8, 1.8),
    (3.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), TABLE)
def test_clipped_surrogate_table(ratio, advantage, loss, slope):
    log_prob = of_ratio(ratio)
    found = clipped_surrogate(log_prob, OLD, torch.tensor([[advantage]], dtype=torch.float64), clip=0.2)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-12)
    assert log_prob.grad.item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(1.0, 2.0, -2.0), (1.5, 2.0, -3.0), (0.5, -2.0, 1.0)]
)
def test_surrogate_table(ratio, advantage, loss):
    found = surrogate(of_ratio(ratio), OLD, torch.tensor([[advantage]], dtype=torch.float64))
    assert found.item() == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.3])
def test_both_equal_the_papers_sums(seed, epsilon):
    log_prob, old, advantage = (
        0.3 * draw(seed, 6, 5) - 1,
        0.3 * draw(seed + 10, 6, 5) - 1,
        draw(seed + 20, 6, 5),
    )
    lists = [x.flatten().tolist() for x in (log_prob.exp(), old.exp(), advantage)]
    clipped = clipped_surrogate(log_prob, old, advantage, clip=epsilon)
    assert clipped.item() == pytest.approx(-oracle.l_clip(*lists, epsilon), rel=1e-12)
    assert surrogate(log_prob, old, advantage).item() == pytest.approx(-oracle.l_cpi(*lists), rel=1e-12)


def test_at_the_old_policy_both_have_the_policy_gradient():
    log_prob, advantage = draw(0, 3, 4).requires_grad_(), draw(1, 3, 4)
    for loss in (surrogate, lambda *x: clipped_surrogate(*x, clip=0.2)):
        (gradient,) = torch.autograd.grad(loss(log_prob, log_prob.detach(), advantage), log_prob)
        torch.testing.assert_close(gradient, -advantage / 12, rtol=1e-12, atol=0)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("kink", [0.8, 1.2])
def test_the_gradient_at_the_kink_is_one_of_its_two_sides(kink, advantage):
    """The loss is continuous there; its slope changes between 0 and -rho A."""
    a = torch.tensor([[advantage]], dtype=torch.float64)

    def loss(x):
        return clipped_surrogate(x, OLD, a, clip=0.2)

    at, below, above = of_ratio(kink), of_ratio(kink * (1 - 1e-6)), of_ratio(kink * (1 + 1e-6))
    slopes = [torch.autograd.grad(loss(x), x)[0].item() for x in (below, at, above)]
    assert loss(below).item() == pytest.approx(loss(above).item(), abs=1e-4)
    assert min(slopes[0], slopes[2]) - 1e-4 <= slopes[1] <= max(slopes[0], slopes[2]) + 1e-4
    closed = (kink == 1.2) == (advantage > 0)
    assert (0.0 in (slopes[0], slopes[2])) == closed
    for x in (below, above):
        assert torch.autograd.gradcheck(loss, x, eps=1e-8, atol=1e-5)


def test_gradients():
    log_prob, old, advantage = 0.3 * draw(3, 3, 4), 0.3 * draw(4, 3, 4), draw(5, 3, 4)
    log_prob.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: surrogate(x, old, advantage), log_prob)
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, old, advantage, clip=0.2), log_prob)
    value, before, target = draw(6, 3, 4).requires_grad_(), draw(7, 3, 4), draw(8, 3, 4)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, before, target, clip=0.5), value)


# value, value before, target, loss with epsilon = 0.5, d loss / d value
VALUES = [
    (1.2, 1.0, 3.0, 3.24, -3.6),  # inside the interval: the squared error
    (2.0, 1.0, 3.0, 2.25, 0.0),  # moved too far towards the target: the error at 1.5, without a gradient
    (2.0, 1.0, 0.0, 4.0, 4.0),  # moved away from it: the larger error is its own
    (0.0, 1.0, 0.8, 0.64, -1.6),  # passed it: the larger error is its own
]


@pytest.mark.parametrize(("value", "before", "target", "loss", "slope"), VALUES)
def test_clipped_value_loss_table(value, before, target, loss, slope):
    v, old, g = (torch.tensor([[x]], dtype=torch.float64) for x in (value, before, target))
    v.requires_grad_()
    found = clipped_value_loss(v, old, g, clip=0.5)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-12)
    assert v.grad.item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda z, o: surrogate(z[0], z[0], z[0]), "log_prob_t must have 2"),
        (lambda z, o: surrogate(z, o, z), "old_log_prob_t"),
        (lambda z, o: clipped_surrogate(z, z, o, clip=0.2), "advantage_t"),
        (lambda z, o: clipped_surrogate(z, z, z, clip=-0.1), "clip"),
        (lambda z, o: clipped_value_loss(z[0], z[0], z[0], clip=0.2), "v_t must have 2"),
        (lambda z, o: clipped_value_loss(z, z, o, clip=0.2), "target_t"),
        (lambda z, o: clipped_value_loss(z, z, z, clip=math.nan), "clip"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call(torch.zeros(3, 2), torch.zeros(3, 1))
