"""Q-learning by hand: tables of two or three transitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from murmurate.losses import q_learning
from murmurate.losses.q_learning import q_loss, q_step, q_target, td_error

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
    q_loss(error, torch.ones(1)).backward()
    assert following.grad is None
    assert value.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize(
    ("error", "expected", "slope"), [(0.5, 0.125, 0.5), (3.0, 2.5, 1.0), (-3.0, 2.5, -1.0)]
)
def test_the_loss_is_hubers(error, expected, slope):
    x = torch.tensor([error], requires_grad=True)
    loss = q_loss(x, torch.ones(1))
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert x.grad.item() == pytest.approx(slope)


def test_weights_weigh_and_the_mean_is_over_the_batch():
    error, weight = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, 0.5, 0.0])
    assert q_loss(error, weight).item() == pytest.approx((0.5 + 0.5 * 1.5 + 0.0) / 3)


def test_shapes_are_not_broadcast():
    with pytest.raises(ValueError, match="discount_t must be shaped"):
        q_target(torch.zeros(2), torch.zeros(1), NEXT)
    with pytest.raises(ValueError, match="q_t"):
        q_target(torch.zeros(3), torch.zeros(3), NEXT)
    with pytest.raises(ValueError, match="q_t_selector must be shaped"):
        q_target(torch.zeros(2), torch.zeros(2), NEXT, NEXT[:, :2])
    with pytest.raises(ValueError, match="target_tm1 must be shaped"):
        td_error(NEXT, torch.tensor([0, 1]), torch.zeros(1))
    with pytest.raises(ValueError, match="weight must be shaped"):
        q_loss(torch.zeros(2), torch.zeros(1))


def rows(seed: int, batch: int = 5, actions: int = 3):
    generator = torch.Generator().manual_seed(seed)

    def table(scale: float = 1.0):
        return scale * torch.randn(batch, actions, generator=generator)

    action = torch.randint(actions, (batch,), generator=generator)
    reward, discount = torch.randn(batch, generator=generator), torch.rand(batch, generator=generator)
    return table(2.0), action, reward, discount, torch.rand(batch, generator=generator), table(), table()


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 7), st.booleans())
def test_a_step_is_the_loss_and_its_gradient(seed: int, batch: int, actions: int, double: bool) -> None:
    value, action, reward, discount, weight, following, selector = rows(seed, batch, actions)
    chooser = selector if double else None
    leaf = value.clone().requires_grad_()
    error = td_error(leaf, action, q_target(reward, discount, following, chooser))
    loss = q_loss(error, weight)
    loss.backward()
    step = q_step(value.requires_grad_(), action, reward, discount, weight, following, chooser)
    torch.testing.assert_close(step.loss, loss)
    torch.testing.assert_close(step.error, error.detach())
    assert not step.error.requires_grad
    (3 * step.loss).backward()
    torch.testing.assert_close(value.grad, 3 * leaf.grad)


def test_a_step_where_numbers_are_not_at_hand_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: torch records it."""
    written = q_step(*rows(0))
    monkeypatch.setattr(q_learning, "_closed_form", None)
    with pytest.raises(TypeError):
        q_step(*rows(0))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for one, other in zip(written, q_step(*rows(0)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_with_a_value_that_is_not_finite_says_so() -> None:
    value, *rest = rows(0)
    value[2] = float("nan")
    step = q_step(value.requires_grad_(), *rest)
    assert step.loss.isnan()
    step.loss.backward()
    assert value.grad[2].isnan().any()


def test_shapes_of_a_step_are_not_broadcast() -> None:
    value, action, reward, discount, weight, following, selector = rows(0)
    with pytest.raises(ValueError, match="discount_t must be shaped"):
        q_step(value, action, reward, discount[:1], weight, following, selector)
    with pytest.raises(ValueError, match="weight must be shaped"):
        q_step(value, action, reward, discount, weight[:1], following, selector)
    with pytest.raises(ValueError, match="q_t_selector must be shaped"):
        q_step(value, action, reward, discount, weight, following, selector[:, :2])
    with pytest.raises(ValueError, match="q_tm1"):
        q_step(value[:, 0], action, reward, discount, weight, following, selector)
    with pytest.raises(ValueError, match="q_tm1"):
        q_step(value[0, 0], action, reward, discount, weight, following, selector)


def test_a_step_refuses_actions_that_are_none_and_calls_an_empty_batch_not_finite() -> None:
    value, action, *rest = rows(0)
    with pytest.raises(IndexError, match="no action -"):
        q_step(value, action - action.max() - 1, *rest)
    assert q_step(*(x[:0] for x in rows(0))).loss.isnan()


def test_a_step_keeps_the_dtype_that_it_is_given() -> None:
    value, action, *rest = rows(0)
    step = q_step(value.double(), action, *(x.double() for x in rest))
    assert step.error.dtype == step.loss.dtype == torch.float64
