"""Q-learning by hand: tables of two or three transitions."""

from __future__ import annotations

import pytest
import torch

from murmurate.losses.q_learning import q_loss, q_target, td_error

NEXT = torch.tensor([[1.0, 5.0, 2.0], [0.0, -1.0, -3.0]])


def test_the_target_takes_the_best_next_action():
    target = q_target(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.5]), NEXT)
    torch.testing.assert_close(target, torch.tensor([5.5, 2.0]))


def test_double_q_takes_the_action_that_the_other_net_likes():
    selector = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    target = q_target(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.5]), NEXT, selector)
    torch.testing.assert_close(target, torch.tensor([1.9, 0.5]))


def test_nothing_follows_a_termination():
    assert q_target(torch.tensor([3.0]), torch.tensor([0.0]), NEXT[:1] * 1e9).item() == 3.0


def test_no_gradient_flows_into_the_target():
    value = torch.tensor([[1.0, 2.0]], requires_grad=True)
    following = torch.tensor([[3.0, 4.0]], requires_grad=True)
    target = q_target(torch.tensor([0.0]), torch.tensor([1.0]), following, following)
    error = td_error(value, torch.tensor([0]), target)
    assert error.item() == 3.0
    q_loss(error, delta=None).backward()
    assert following.grad is None
    assert value.grad.tolist() == [[-3.0, 0.0]]


@pytest.mark.parametrize(
    ("error", "expected", "slope"), [(0.5, 0.125, 0.5), (3.0, 2.5, 1.0), (-3.0, 2.5, -1.0)]
)
def test_the_loss_is_hubers(error, expected, slope):
    x = torch.tensor([error], requires_grad=True)
    loss = q_loss(x)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert x.grad.item() == pytest.approx(slope)


def test_weights_weigh_and_the_mean_is_over_the_batch():
    error, weight = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, 0.5, 0.0])
    assert q_loss(error, weight, delta=None).item() == pytest.approx((0.5 + 1.0 + 0.0) / 3)


def test_shapes_are_not_broadcast():
    with pytest.raises(ValueError, match="discount must be shaped"):
        q_target(torch.zeros(2), torch.zeros(1), NEXT)
    with pytest.raises(ValueError, match="next_value"):
        q_target(torch.zeros(3), torch.zeros(3), NEXT)
    with pytest.raises(ValueError, match="next_selector must be shaped"):
        q_target(torch.zeros(2), torch.zeros(2), NEXT, NEXT[:, :2])
    with pytest.raises(ValueError, match="target must be shaped"):
        td_error(NEXT, torch.tensor([0, 1]), torch.zeros(1))
    with pytest.raises(ValueError, match="weight must be shaped"):
        q_loss(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="delta"):
        q_loss(torch.zeros(2), delta=0.0)
