"""Policy losses against tables, enumerated or integrated distributions, and numerical gradients."""

import math

import pytest
import torch

from murmurate.losses.policy import (
    categorical_log_prob_and_entropy,
    gaussian_entropy,
    gaussian_log_prob,
    policy_gradient,
)
from oracles import policy as oracle


def draw(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("log_prob", "advantage", "loss"),
    [
        ([[-1.0]], [[2.0]], 2.0),
        ([[-1.0]], [[-2.0]], -2.0),
        ([[-1.0, -2.0], [-3.0, -4.0]], [[1.0, 0.0], [-1.0, 2.0]], (1 + 0 - 3 + 8) / 4),
    ],
)
def test_policy_gradient_table(log_prob, advantage, loss):
    assert policy_gradient(torch.tensor(log_prob), torch.tensor(advantage)).item() == loss


def test_policy_gradient_ascends_the_advantage_and_only_through_the_log_prob():
    log_prob = draw(0, 3, 4).requires_grad_()
    advantage = draw(1, 3, 4).requires_grad_()
    policy_gradient(log_prob, advantage).backward()
    torch.testing.assert_close(log_prob.grad, -advantage.detach() / 12)
    assert advantage.grad is None


@pytest.mark.parametrize(
    ("logits", "action", "log_prob", "h"),
    [
        ([0.0, 0.0], 1, math.log(1 / 2), math.log(2)),
        ([0.0, math.log(3)], 0, math.log(1 / 4), math.log(4) - 3 / 4 * math.log(3)),
        ([5.0], 0, 0.0, 0.0),
        # A forbidden action: probability 0, and 0 log 0 = 0.
        ([0.0, -math.inf, 0.0], 2, math.log(1 / 2), math.log(2)),
        # Large logits: no overflow.
        ([1e4, 0.0], 1, -1e4, 0.0),
    ],
)
def test_categorical_table(logits, action, log_prob, h):
    z, a = torch.tensor(logits, dtype=torch.float64), torch.tensor(action)
    expected = torch.tensor([log_prob, h], dtype=torch.float64).unbind()
    both = categorical_log_prob_and_entropy(z, a)
    torch.testing.assert_close(both, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_categorical_equals_the_oracle(seed):
    logits = 3 * draw(seed, 4, 3, 5)
    action = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(seed))
    log_prob, h = categorical_log_prob_and_entropy(logits, action)
    for t in range(4):
        for b in range(3):
            pi = oracle.categorical(logits[t, b].tolist())
            assert log_prob[t, b].item() == pytest.approx(math.log(pi[action[t, b]]), rel=1e-12)
            assert h[t, b].item() == pytest.approx(oracle.entropy(pi), rel=1e-12)


def test_categorical_gradients():
    logits = draw(0, 2, 3, 4).requires_grad_()
    action = torch.tensor([[0, 3, 1], [2, 2, 0]])
    assert torch.autograd.gradcheck(lambda z: categorical_log_prob_and_entropy(z, action), logits)


def test_a_forbidden_action_gets_no_gradient_and_spoils_no_other():
    logits = torch.tensor([0.3, -math.inf, -0.2], requires_grad=True)
    log_prob, h = categorical_log_prob_and_entropy(logits, torch.tensor(0))
    (log_prob + h).backward()
    allowed = torch.tensor([0.3, -0.2], requires_grad=True)
    log_prob, h = categorical_log_prob_and_entropy(allowed, torch.tensor(0))
    (log_prob + h).backward()
    torch.testing.assert_close(logits.grad[[0, 2]], allowed.grad)
    assert logits.grad[1] == 0


@pytest.mark.parametrize("per_state", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gaussian_equals_the_oracle(seed, per_state):
    mean, action = draw(seed, 4, 3, 2), draw(seed + 10, 4, 3, 2)
    log_std = draw(seed + 20, 4, 3, 2) if per_state else draw(seed + 20, 2)
    log_prob, h = gaussian_log_prob(mean, log_std, action), gaussian_entropy(mean, log_std)
    assert log_prob.shape == h.shape == (4, 3)
    std = log_std.exp().expand(4, 3, 2)
    for t in range(4):
        for b in range(3):
            p = oracle.gaussian_density(action[t, b].tolist(), mean[t, b].tolist(), std[t, b].tolist())
            assert log_prob[t, b].item() == pytest.approx(math.log(p), rel=1e-10)
    assert h[1, 2].item() == pytest.approx(oracle.gaussian_entropy(std[1, 2].tolist()), rel=1e-8)


def test_gaussian_entropy_belongs_to_each_state_of_its_own():
    log_std = torch.tensor([[0.0, 0.0], [1.0, -3.0]])
    h = gaussian_entropy(torch.zeros(2, 2), log_std)
    unit = 1.0 + math.log(2 * math.pi)
    torch.testing.assert_close(h, torch.tensor([unit, unit - 2.0]))


def test_gaussian_gradients():
    mean, log_std, action = (draw(i, 2, 3, 2).requires_grad_() for i in range(3))
    shared = draw(4, 2).requires_grad_()
    assert torch.autograd.gradcheck(gaussian_log_prob, (mean, log_std, action))
    assert torch.autograd.gradcheck(gaussian_log_prob, (mean, shared, action))
    assert torch.autograd.gradcheck(gaussian_entropy, (mean, shared))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: policy_gradient(torch.zeros(3), torch.zeros(3)), "log_prob"),
        (lambda: policy_gradient(torch.zeros(3, 2), torch.zeros(3, 1)), "advantage"),
        (lambda: categorical_log_prob_and_entropy(torch.zeros(3, 6), torch.zeros(3, 6).long()), "action"),
        (lambda: gaussian_log_prob(torch.zeros(3, 2), torch.zeros(2), torch.zeros(3, 1)), "action"),
        (lambda: gaussian_log_prob(torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3, 2)), "log_std"),
        (lambda: gaussian_entropy(torch.zeros(3, 2), torch.zeros(3)), "log_std"),
        (lambda: gaussian_entropy(torch.zeros(()), torch.zeros(())), "mean"),
    ],
)
def test_wrong_shapes_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
