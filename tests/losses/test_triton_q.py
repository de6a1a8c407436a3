"""Q-learning's kernel in Triton against its twin in torch, and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled import GPU, needs_triton
from murmurate.losses.q_learning import q_loss, q_target, td_error

pytestmark = needs_triton


def batch(count: int, actions: int, seed: int) -> list[Tensor]:
    """q_tm1, a_tm1, r_t, discount_t, weight, q_t and the selector."""
    generator = torch.Generator().manual_seed(seed)
    q_tm1, q_t, selector = torch.randn(3, count, actions, generator=generator)
    selector = selector.mul(2).round()  # with equal values, of which the first is chosen
    taken = torch.randint(actions, (count,), generator=generator)
    reward = 3 * torch.randn(count, generator=generator)
    discount = 0.99 * (torch.rand(count, generator=generator) > 0.2)
    return [q_tm1, taken, reward, discount, torch.rand(count, generator=generator), q_t, selector]


@pytest.mark.parametrize(("count", "actions"), [(1, 1), (1, 5), (32, 6), (70, 18), (33, 2)])
def test_one_kernel_gives_what_torch_gives(count: int, actions: int) -> None:
    from murmurate.losses._triton_q import FusedStep

    given = [x.to(GPU) for x in batch(count, actions, seed=count)]
    q_tm1, taken, reward, discount, weight, q_t, selector = given
    one, other = (q_tm1.clone().requires_grad_() for _ in range(2))
    loss, error = FusedStep.apply(one, *given[1:])
    wanted = td_error(other, taken, q_target(reward, discount, q_t, selector))
    assert torch.equal(error, wanted.detach())
    torch.testing.assert_close(loss, q_loss(wanted, weight), rtol=1e-5, atol=1e-7)
    (3 * loss).backward()
    (3 * q_loss(wanted, weight)).backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("wrong", ["action", "selector", "reward"])
def test_what_is_not_a_number_is_seen(wrong: str) -> None:
    from murmurate.losses._triton_q import FusedStep

    given = [x.to(GPU) for x in batch(8, 4, seed=0)]
    given[0].requires_grad_()
    if wrong == "action":
        given[1][3] = 4
    elif wrong == "selector":
        given[5][3, 2] = given[6][3, 2] = torch.nan
    else:
        given[2][3] = torch.nan
    loss, error = FusedStep.apply(*given)
    assert loss.isnan()
    assert error.isnan().nonzero().tolist() == [[3]]
    loss.backward()
    found = [] if wrong == "action" else [[3, int(given[1][3])]]  # no action has a gradient
    assert given[0].grad.isnan().nonzero().tolist() == found
