"""Gradients flow into what a loss differentiates, and not into what it calls a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from murmurate.losses.categorical import categorical_cross_entropy, projected_target, support
from murmurate.losses.gaussian_nll import gaussian_nll
from murmurate.losses.policy import policy_gradient
from murmurate.losses.q_learning import q_loss, q_target, td_error
from murmurate.losses.regret import cumulative_target, importance_weights, regret_matching, sequence_returns
from murmurate.losses.returns import generalized_advantages
from murmurate.losses.surrogate import clipped_surrogate, clipped_value_loss, surrogate
from murmurate.losses.value import value_loss
from murmurate.losses.vtrace import vtrace

ROWS, FLAGS = (2, 3), torch.zeros(2, 3, dtype=torch.bool)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Numbers from 1/2 to 3/2."""
    generator = torch.Generator().manual_seed(0)
    return [(0.5 + torch.rand(shape, generator=generator)).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("loss", "shapes", "differentiated"),
    [
        (policy_gradient, [ROWS] * 2, 1),
        (value_loss, [ROWS] * 2, 1),
        (surrogate, [ROWS] * 3, 1),
        (lambda *x: clipped_surrogate(*x, clip=2.0), [ROWS] * 3, 1),
        (lambda *x: clipped_value_loss(*x, clip=2.0), [ROWS] * 3, 1),
        (lambda *x: clipped_value_loss(*x, clip=1e-3), [ROWS] * 3, 1),
        (lambda q, y: td_error(q, torch.tensor([0, 2]), y), [ROWS, (2,)], 1),
        (q_loss, [(3,)] * 2, 1),
        (lambda *x: categorical_cross_entropy(*x).loss, [ROWS, ROWS, (2,)], 1),
        (gaussian_nll, [ROWS] * 3, 2),
    ],
)
def test_a_loss_has_gradients_for_what_it_differentiates_alone(
    loss: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], differentiated: int
) -> None:
    arguments = drawn(*shapes)
    loss(*arguments).sum().backward()
    assert all(x.grad is not None and bool(x.grad.any()) for x in arguments[:differentiated])
    assert all(x.grad is None for x in arguments[differentiated:])


@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        (q_target, [(2,), (2,), ROWS, ROWS]),
        (lambda *x: projected_target(*x, support(0.0, 1.0, 3)), [(2,), (2,), ROWS]),
        (
            lambda r, v, last: generalized_advantages(r, v, FLAGS, FLAGS, last, discount=0.9, lambda_=0.8),
            [ROWS, ROWS, (3,)],
        ),
        (
            lambda rho, r, v, last: torch.stack(vtrace(rho, r, v, FLAGS, FLAGS, last, discount=0.9)),
            [ROWS, ROWS, ROWS, (3,)],
        ),
        (regret_matching, [ROWS]),
        (lambda *x: importance_weights(*x, clip=2.0), [ROWS] * 2),
        (
            lambda r, v, w: sequence_returns(r, torch.tensor([2] * 3), FLAGS[0], v, w, discount=0.9),
            [ROWS, (3,), ROWS],
        ),
        (cumulative_target, [(2,)] * 2),
        (cumulative_target, [(2,)] * 4),
    ],
)
def test_a_target_has_none(target: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    assert not target(*drawn(*shapes)).requires_grad
