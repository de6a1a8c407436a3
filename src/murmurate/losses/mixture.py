"""Bayesian Gaussian mixtures: posteriors from natural parameters, and expected sufficient statistics.

Bishop 2006, section 10.2; Mohamad et al., equations 38 to 47. The weights have a Dirichlet prior, each
component's mean and precision a Normal-Wishart (full) or, for each dimension, a Normal-Gamma, which is a
Normal-Wishart of one dimension (diagonal). Sufficient statistics of an example of a component are 1, x and
x x'. The first is that of the weights, of the mean's precision beta and of the degrees of freedom nu alike,
so a table has it once: a row is [count, sum of x, sum of x x'], W = 1 + D + P numbers with P = D (D + 1) / 2
(the lower triangle) or D. Values of x are less the prior's mean. All is float64, for a scatter is a small
difference of large numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.losses.checks import check_rank

_LOG_2, _LOG_2_PI, _LOG_PI = math.log(2.0), math.log(2.0 * math.pi), math.log(math.pi)


class Prior(NamedTuple):
    """The prior, the same for all components, with mean 0.

    concentration: alpha_0 of the weights. precision: beta_0 of the mean, in examples. freedom: nu_0, above
    D - 1 (``full``) or 0. scatter: W_0^-1 [D, D], or [D] (``diagonal``).
    """

    concentration: float
    precision: float
    freedom: float
    scatter: Tensor

    @property
    def full(self) -> bool:
        return self.scatter.dim() == 2


class Posterior(NamedTuple):
    """alpha, beta, nu: [K]. mean: m [K, D]. scatter: W^-1 [K, D, D], or [K, D]; root: its Cholesky factor, or
    its square root."""

    alpha: Tensor
    beta: Tensor
    nu: Tensor
    mean: Tensor
    scatter: Tensor
    root: Tensor


def width_of(dimensions: int, full: bool) -> int:
    """W."""
    return 1 + dimensions + (dimensions * (dimensions + 1) // 2 if full else dimensions)


def posterior(table: Tensor, prior: Prior) -> Posterior:
    """Bishop, equations 10.58 and 10.60 to 10.63.

    A reader may see a partial update of a table that others write to. Negative eigenvalues that the
    scatter then has are set to 0.

    Args:
        table: x [K, W] float64.

    Raises:
        ValueError: on a wrong rank or width.
    """
    check_rank(2, table=table)
    d = len(prior.scatter)
    if table.shape[1] != width_of(d, prior.full):
        raise ValueError(f"a row has {width_of(d, prior.full)} numbers, not {table.shape[1]}")
    count = table[:, 0].clamp(min=0.0)
    beta = prior.precision + count
    mean = table[:, 1 : 1 + d] / beta[:, None]
    square = _unpacked(table[:, 1 + d :], d) if prior.full else table[:, 1 + d :]
    own = (
        square - beta.view(-1, 1, 1) * mean[:, :, None] * mean[:, None]
        if prior.full
        else (square - beta[:, None] * mean.square())
    )
    scatter, root = _rooted(prior.scatter, own) if prior.full else _rooted_diagonal(prior.scatter, own)
    return Posterior(prior.concentration + count, beta, prior.freedom + count, mean, scatter, root)


def _rooted(least: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    scatter = least + own
    root, failed = torch.linalg.cholesky_ex(scatter)
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(own)
        scatter = least + (vectors * values.clamp(min=0.0)[:, None]) @ vectors.mT
        root = torch.linalg.cholesky(scatter)
    return scatter, root


def _rooted_diagonal(least: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    scatter = least + own.clamp(min=0.0)
    return scatter, scatter.sqrt()


def log_joint(x: Tensor, q: Posterior) -> Tensor:
    """[G, K] E[log p(x, z = k)] (Bishop, equation 10.46); its softmax over k gives the responsibilities.

    Args:
        x: [G, D] float64.

    Raises:
        ValueError: on a wrong rank.
    """
    check_rank(2, x=x, mean=q.mean)
    d = x.shape[1]
    log_weight = torch.digamma(q.alpha) - torch.digamma(q.alpha.sum())
    half = 0.5 * (expected_log_precision(q) - d * _LOG_2_PI)
    return log_weight + half - 0.5 * (d / q.beta + q.nu * distances(x, q))


def expected_log_precision(q: Posterior) -> Tensor:
    """[K] E[log |Lambda|] (Bishop, equation 10.65)."""
    return _digammas(q.nu, _dimensions(q), q) + _dimensions(q) * _LOG_2 - _log_determinant(q)


def distances(x: Tensor, q: Posterior) -> Tensor:
    """[G, K] (x - m)' W (x - m)."""
    away = x[None] - q.mean[:, None]  # [K, G, D]
    if q.root.dim() == 3:
        scaled: Tensor = torch.linalg.solve_triangular(q.root, away.mT, upper=False)
        return scaled.square().sum(1).T
    return (away / q.root[:, None]).square().sum(2).T


def statistics(x: Tensor, share: Tensor, full: bool) -> Tensor:
    """[K, W] sum over examples of E[t] (equation 46), with ``share`` [G, K] the expected z of each."""
    sums = share.T @ x
    if not full:
        return torch.cat([share.sum(0)[:, None], sums, share.T @ x.square()], 1)
    low = torch.tril_indices(x.shape[1], x.shape[1])
    return torch.cat([share.sum(0)[:, None], sums, share.T @ (x[:, low[0]] * x[:, low[1]])], 1)


def divergence(q: Posterior, prior: Prior) -> Tensor:
    """KL(q || p) of weights, means and precisions: their term of the evidence lower bound.

    Bishop, equations 10.73, 10.74, 10.76 and 10.77.
    """
    d, k = _dimensions(q), len(q.alpha)
    alpha_0, beta_0, nu_0 = prior.concentration, prior.precision, prior.freedom
    total = q.alpha.sum()
    given = math.lgamma(k * alpha_0) - k * math.lgamma(alpha_0)
    log_weight = torch.digamma(q.alpha) - torch.digamma(total)
    weights = torch.lgamma(total) - torch.lgamma(q.alpha).sum() - given
    weights = weights + ((q.alpha - alpha_0) * log_weight).sum()
    moved = q.nu * distances(torch.zeros_like(q.mean[:1]), q)[0]  # the prior's mean is 0
    means = 0.5 * (d * (beta_0 / q.beta - 1 + torch.log(q.beta / beta_0)) + beta_0 * moved)
    ratio = _log_determinant(q) - _log_determinant_of(prior)
    nu_prior = torch.full_like(q.nu, nu_0)
    precisions = (
        0.5 * nu_0 * ratio
        + 0.5 * q.nu * (_trace(q, prior) - d)
        + _log_gammas(nu_prior, d, q)
        - _log_gammas(q.nu, d, q)
        + 0.5 * (q.nu - nu_0) * _digammas(q.nu, d, q)
    )
    return weights + means.sum() + precisions.sum()


def log_predictive(x: Tensor, q: Posterior) -> Tensor:
    """[G] log p(x | data): a mixture of Student's t (Bishop, equation 10.81)."""
    d = _dimensions(q)
    shrunk = q.beta / (1 + q.beta)
    log_weight = torch.log(q.alpha / q.alpha.sum())
    if q.root.dim() == 3:
        freedom = q.nu + 1 - d
        each = (
            torch.lgamma((freedom + d) / 2) - torch.lgamma(freedom / 2)
            + 0.5 * (d * torch.log(shrunk) - _log_determinant(q) - d * _LOG_PI)
            - 0.5 * (freedom + d) * torch.log1p(shrunk * distances(x, q))
        )  # fmt: skip
        return torch.logsumexp(log_weight + each, 1)
    apart = (x[:, None] - q.mean).square() / q.scatter  # [G, K, D]
    one = (torch.lgamma((q.nu + 1) / 2) - torch.lgamma(q.nu / 2) + 0.5 * (torch.log(shrunk) - _LOG_PI))[
        :, None
    ] - 0.5 * torch.log(q.scatter)
    each = (one - 0.5 * (q.nu[:, None] + 1) * torch.log1p(shrunk[:, None] * apart)).sum(2)
    return torch.logsumexp(log_weight + each, 1)


# -- Wishart distributions: of D dimensions, or D of one dimension each --------------------------------------


def _dimensions(q: Posterior) -> int:
    return q.mean.shape[1]


def _halves(nu: Tensor, d: int, q: Posterior) -> Tensor:
    """[K, D] the arguments of a multivariate gamma function, or of D univariate ones."""
    down = torch.arange(d, dtype=nu.dtype) if q.root.dim() == 3 else torch.zeros(d, dtype=nu.dtype)
    return 0.5 * (nu[:, None] - down)


def _digammas(nu: Tensor, d: int, q: Posterior) -> Tensor:
    return torch.digamma(_halves(nu, d, q)).sum(1)


def _log_gammas(nu: Tensor, d: int, q: Posterior) -> Tensor:
    """Up to a constant, which cancels in differences."""
    return torch.lgamma(_halves(nu, d, q)).sum(1)


def _log_determinant(q: Posterior) -> Tensor:
    """[K] log |W^-1|."""
    diagonal = q.root.diagonal(dim1=1, dim2=2) if q.root.dim() == 3 else q.root
    return 2 * torch.log(diagonal).sum(1)


def _log_determinant_of(prior: Prior) -> Tensor:
    return torch.logdet(prior.scatter) if prior.full else torch.log(prior.scatter).sum()


def _trace(q: Posterior, prior: Prior) -> Tensor:
    """[K] tr(W_0^-1 W)."""
    if not prior.full:
        return (prior.scatter / q.scatter).sum(1)
    inverse = torch.cholesky_inverse(q.root)
    return (inverse * prior.scatter).sum((1, 2))


def _unpacked(low: Tensor, d: int) -> Tensor:
    """[K, D, D] of lower triangles [K, P]."""
    row, column = torch.tril_indices(d, d)
    whole = low.new_zeros(len(low), d, d)
    whole[:, row, column] = low
    whole[:, column, row] = low
    return whole
