"""The steps of trust-region policy optimisation on a vector of parameters (Schulman et al. 2015).

Whatever needs data is passed as a function of a vector. The caller's function takes the mean over replicas,
so the arithmetic below is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape

Product = Callable[[Tensor], Tensor]


def fisher_product(kl: Callable[[Tensor], Tensor], theta: Tensor) -> Product:
    """The function ``v -> F v``, where F is the Hessian of ``kl`` at ``theta``.

    Source: Schulman et al. 2015, section 6 and appendix C.1: with ``kl(x)`` the mean divergence of x's policy
    from theta's policy, F is the Fisher matrix. Differs: the product is the derivative of
    ``grad kl(theta) . v`` (Pearlmutter 1994), so F is never formed; appendix C.1 multiplies by the
    Jacobian of the policy's outputs instead, with the same result.

    Args:
        kl: maps a vector [N] to a scalar, twice differentiable.
        theta: [N].

    Raises:
        ValueError: on a wrong rank; the returned function raises it for another shape than ``theta``'s.
    """
    check_rank(1, theta=theta)
    x = theta.detach().clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(kl(x), x, create_graph=True)

    def product(v: Tensor) -> Tensor:
        check_shape(x.shape, "theta", v=v)
        (result,) = torch.autograd.grad(gradient, x, v, retain_graph=True)
        return result

    return product


def conjugate_gradient(
    product: Product, b: Tensor, *, iterations: int = 10, tolerance: float = 1e-10
) -> Tensor:
    """An approximate solution x [N] of ``A x = b`` for a symmetric positive definite A, from x = 0.

    Source: Hestenes and Stiefel 1952, as in Schulman et al. 2015, appendix C. In exact arithmetic N
    iterations solve it.

    Args:
        product: v -> A v.
        b: [N].
        iterations: maximum number of iterations.
        tolerance: the iteration stops when ``|A x - b|^2`` is at most this share of ``|b|^2``.

    Raises:
        ValueError: on a wrong rank, or fewer than one iteration.
    """
    check_rank(1, b=b)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, but it is {iterations}")
    x, r, p = torch.zeros_like(b), b.clone(), b.clone()
    square = r @ r
    square_limit = tolerance * square
    for _ in range(iterations):
        if square <= square_limit:
            break
        product_p = product(p)
        step = square / (p @ product_p)
        x += step * p
        r -= step * product_p
        previous, square = square, r @ r
        p = r + (square / previous) * p
    return x


def natural_step(product: Product, gradient: Tensor, *, max_kl: float, iterations: int = 10) -> Tensor:
    """The step [N] along ``-A^-1 g`` whose quadratic model of the divergence, ``s^T A s / 2``, is ``max_kl``.

    Source: Schulman et al. 2015, appendix C: ``beta = sqrt(2 delta / s^T A s)``.

    Args:
        product: v -> A v with A the damped Fisher matrix, F + damping I.
        gradient: g [N], of the loss.
        max_kl: delta, above 0, in nats.
        iterations: maximum number of iterations of the conjugate gradient.

    Returns:
        The step; zeros if g is zero, if A is not positive along the solution, or if a value is not finite.

    Raises:
        ValueError: on a wrong rank, a ``max_kl`` that is not above 0, or fewer than one iteration.
    """
    _check_max_kl(max_kl)
    direction = conjugate_gradient(product, -gradient, iterations=iterations)
    curvature = float(direction @ product(direction))
    if not (curvature > 0.0 and math.isfinite(curvature)):
        return torch.zeros_like(gradient)
    return direction * math.sqrt(2.0 * max_kl / curvature)


class LineSearch(NamedTuple):
    """The result of ``line_search``.

    fraction: fraction of the full step that was accepted; 0 if none was. loss, kl: their values after the
    accepted step; if none was, those before it.
    """

    fraction: float
    loss: float
    kl: float


def line_search(
    evaluate: Callable[[float], tuple[float, float]],
    loss: float,
    *,
    max_kl: float,
    backtracks: int = 10,
    shrink: float = 0.8,
) -> LineSearch:
    """The largest of the fractions ``1, shrink, shrink^2, ...`` of a step that lowers the loss and keeps the
    divergence at or below ``max_kl``.

    Source: Schulman et al. 2015, appendix C ("shrink exponentially until the objective improves").
    Differs: the constraint is checked as well, as in the authors' code.

    Args:
        evaluate: maps a fraction of the step to (loss, KL) after it.
        loss: the loss before the step.
        max_kl: delta, in nats.
        backtracks: number of fractions that are tried, at least 1.
        shrink: in (0, 1).

    Raises:
        ValueError: for values outside these ranges.
    """
    _check_max_kl(max_kl)
    if backtracks < 1 or not 0.0 < shrink < 1.0:
        raise ValueError(
            f"backtracks must be at least 1 and shrink in (0, 1), but they are {backtracks} and {shrink}"
        )
    for k in range(backtracks):
        fraction = shrink**k
        new_loss, kl = evaluate(fraction)
        if new_loss < loss and kl <= max_kl:  # false for NaN as well
            return LineSearch(fraction, new_loss, kl)
    return LineSearch(0.0, loss, 0.0)


def _check_max_kl(max_kl: float) -> None:
    if not max_kl > 0.0:
        raise ValueError(f"max_kl must be above 0, but it is {max_kl}")
