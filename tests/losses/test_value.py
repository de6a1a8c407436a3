"""Value losses: tables of literals, gradients, and the kink of Huber's."""

import pytest
import torch

from murmurate.losses.value import huber_value_loss, value_loss


@pytest.mark.parametrize(
    ("v", "target", "loss"),
    [([[3.0]], [[1.0]], 4.0), ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 5.0]], (0 + 4 + 9 + 1) / 4)],
)
def test_value_loss_table(v, target, loss):
    assert value_loss(torch.tensor(v), torch.tensor(target)).item() == loss


@pytest.mark.parametrize(
    ("error", "delta", "loss", "slope"),
    [
        (0.0, 1.0, 0.0, 0.0),
        (0.5, 1.0, 0.125, 0.5),
        (1.0, 1.0, 0.5, 1.0),
        (-3.0, 1.0, 2.5, -1.0),
        (3.0, 2.0, 4.0, 2.0),
        (-1.0, 2.0, 0.5, -1.0),
    ],
)
def test_huber_table(error, delta, loss, slope):
    v = torch.tensor([[5.0 + error]], requires_grad=True)
    result = huber_value_loss(v, torch.tensor([[5.0]]), delta=delta)
    result.backward()
    assert (result.item(), v.grad.item()) == (loss, slope)


def test_huber_is_a_mean():
    assert huber_value_loss(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2)).item() == (0.125 + 2.5) / 2


@pytest.mark.parametrize("delta", [1.0, 0.25])
def test_gradients_also_at_the_kink(delta):
    target = torch.zeros(1, 5, dtype=torch.float64)
    v = torch.tensor([[-2.0, -delta, 0.1, delta, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, target), v)
    assert torch.autograd.gradcheck(lambda v: huber_value_loss(v, target, delta=delta), v)


@pytest.mark.parametrize("loss", [value_loss, huber_value_loss])
def test_targets_are_constants(loss):
    v, target = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    loss(v, target).backward()
    assert target.grad is None
    assert (v.grad < 0).all()


@pytest.mark.parametrize("loss", [value_loss, huber_value_loss])
def test_nothing_is_broadcast(loss):
    with pytest.raises(ValueError, match="target"):
        loss(torch.zeros(5, 16), torch.zeros(5, 1))
    with pytest.raises(ValueError, match="v_t must have 2 dimensions"):
        loss(torch.zeros(5), torch.zeros(5))


def test_delta_must_be_positive():
    with pytest.raises(ValueError, match="delta"):
        huber_value_loss(torch.zeros(1, 1), torch.zeros(1, 1), delta=0.0)
