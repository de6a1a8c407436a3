"""The value loss: a table of literals, gradients and refusals."""

import pytest
import torch

from murmurate.losses.value import value_loss


@pytest.mark.parametrize(
    ("v", "target", "loss"),
    [([[3.0]], [[1.0]], 4.0), ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 5.0]], (0 + 4 + 9 + 1) / 4)],
)
def test_value_loss_table(v, target, loss):
    assert value_loss(torch.tensor(v), torch.tensor(target)).item() == loss


def test_gradients():
    v = torch.tensor([[-2.0, 0.0, 0.1, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, torch.zeros_like(v)), v)


def test_nothing_is_broadcast():
    with pytest.raises(ValueError, match="target"):
        value_loss(torch.zeros(5, 16), torch.zeros(5, 1))
    with pytest.raises(ValueError, match="v_t must have 2 dimensions"):
        value_loss(torch.zeros(5), torch.zeros(5))
