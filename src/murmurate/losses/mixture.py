"""Bayesian Gaussian mixtures: posteriors from natural parameters, and expected sufficient statistics.

Bishop 2006, section 10.2; Mohamad et al., equations 38 to 47. The weights have a Dirichlet prior. Each
component's mean and precision have a Normal-Wishart prior (full covariance), or a Normal-Gamma prior for each
dimension, which is a Normal-Wishart of one dimension (diagonal covariance). The sufficient statistics of an
example x are 1, x and x x'. The sum of the first, a count, is added to alpha of the weights, to the precision
beta of the mean and to the degrees of freedom nu. So a row of the table of statistics is [count, sum of x,
sum of x x']: W = 1 + D + P numbers, with P = D (D + 1) / 2 (the lower triangle) or D. The prior's mean is
subtracted from x beforehand. All tensors are float64, because a scatter matrix is a small difference of large
numbers.
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

    concentration: alpha_0 of the weights. precision: beta_0 of the mean, in examples. freedom: nu_0; it must
    exceed D - 1 for a full covariance, 0 for a diagonal one. scatter: W_0^-1 [D, D], or [D] if diagonal.
    """

    concentration: float
    precision: float
    freedom: float
    scatter: Tensor

    @property
    def full(self) -> bool:
        return self.scatter.dim() == 2


class Posterior(NamedTuple):
    """The variational posterior of K components (Bishop, equations 10.57 and 10.59).

    alpha, beta, nu: [K]. mean: m [K, D]. scatter: W^-1 [K, D, D], or [K, D]. root: the Cholesky factor of
    scatter, or its square root.
    """

    alpha: Tensor
    beta: Tensor
    nu: Tensor
    mean: Tensor
    scatter: Tensor
    root: Tensor


def width_of(dimensions: int, full: bool) -> int:
    """W, how many numbers a row of the table of statistics has."""
    return 1 + dimensions + (dimensions * (dimensions + 1) // 2 if full else dimensions)


def posterior(table: Tensor, prior: Prior) -> Posterior:
    """The posterior given the expected sufficient statistics (Bishop, equations 10.58 and 10.60 to 10.63).

    A shared table may be read while another replica is writing to it. If this makes the scatter indefinite,
    negative eigenvalues of the data's part are set to 0.

    Args:
        table: the statistics [K, W] float64.

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
    square = _symmetric(table[:, 1 + d :], d) if prior.full else table[:, 1 + d :]
    if prior.full:
        spread = square - beta.view(-1, 1, 1) * mean[:, :, None] * mean[:, None]
        scatter, root = _scatter_and_root(prior.scatter, spread)
    else:
        spread = square - beta[:, None] * mean.square()
        scatter = prior.scatter + spread.clamp(min=0.0)
        root = scatter.sqrt()
    return Posterior(prior.concentration + count, beta, prior.freedom + count, mean, scatter, root)


def _scatter_and_root(prior_scatter: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    scatter = prior_scatter + spread
    root, failed = torch.linalg.cholesky_ex(scatter)
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(spread)
        scatter = prior_scatter + (vectors * values.clamp(min=0.0)[:, None]) @ vectors.mT
        root = torch.linalg.cholesky(scatter)
    return scatter, root


def log_joint(x: Tensor, q: Posterior) -> Tensor:
    """[G, K] E[log p(x, z = k)] (Bishop, equation 10.46); its softmax over k gives the responsibilities.

    Args:
        x: [G, D] float64.
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
    """[G, K] squared Mahalanobis distances (x - m)' W (x - m)."""
    difference = x[None] - q.mean[:, None]  # [K, G, D]
    if q.root.dim() == 3:
        scaled: Tensor = torch.linalg.solve_triangular(q.root, difference.mT, upper=False)
        return scaled.square().sum(1).T
    return (difference / q.root[:, None]).square().sum(2).T


def statistics(x: Tensor, share: Tensor, full: bool) -> Tensor:
    """[K, W] sum over examples of E[t] (equation 46), given the responsibilities ``share`` [G, K]."""
    if full:
        row, column = torch.tril_indices(x.shape[1], x.shape[1])
        products = x[:, row] * x[:, column]
    else:
        products = x.square()
    return torch.cat([share.sum(0)[:, None], share.T @ x, share.T @ products], 1)


def divergence(q: Posterior, prior: Prior) -> Tensor:
    """KL(q || p) of weights, means and precisions: their term of the evidence lower bound.

    Bishop, equations 10.73, 10.74, 10.76 and 10.77.
    """
    d, k = _dimensions(q), len(q.alpha)
    alpha_0, beta_0, nu_0 = prior.concentration, prior.precision, prior.freedom
    total = q.alpha.sum()
    prior_normaliser = math.lgamma(k * alpha_0) - k * math.lgamma(alpha_0)
    log_weight = torch.digamma(q.alpha) - torch.digamma(total)
    weights = torch.lgamma(total) - torch.lgamma(q.alpha).sum() - prior_normaliser
    weights = weights + ((q.alpha - alpha_0) * log_weight).sum()
    shift = q.nu * distances(torch.zeros_like(q.mean[:1]), q)[0]  # from the prior's mean, which is 0
    means = 0.5 * (d * (beta_0 / q.beta - 1 + torch.log(q.beta / beta_0)) + beta_0 * shift)
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
        log_density = (
            torch.lgamma((freedom + d) / 2) - torch.lgamma(freedom / 2)
            + 0.5 * (d * torch.log(shrunk) - _log_determinant(q) - d * _LOG_PI)
            - 0.5 * (freedom + d) * torch.log1p(shrunk * distances(x, q))
        )  # fmt: skip
        return torch.logsumexp(log_weight + log_density, 1)
    distance = (x[:, None] - q.mean).square() / q.scatter  # [G, K, D]
    normaliser = torch.lgamma((q.nu + 1) / 2) - torch.lgamma(q.nu / 2) + 0.5 * (torch.log(shrunk) - _LOG_PI)
    log_peak = normaliser[:, None] - 0.5 * torch.log(q.scatter)
    log_density = log_peak - 0.5 * (q.nu[:, None] + 1) * torch.log1p(shrunk[:, None] * distance)
    return torch.logsumexp(log_weight + log_density.sum(2), 1)


# -- Wishart distributions: one of D dimensions, or D of one dimension each ----------------------------------


def _dimensions(q: Posterior) -> int:
    return q.mean.shape[1]


def _halves(nu: Tensor, d: int, q: Posterior) -> Tensor:
    """[K, D] the arguments of a multivariate gamma function, or of D univariate gamma functions."""
    offset = torch.arange(d, dtype=nu.dtype) if q.root.dim() == 3 else torch.zeros(d, dtype=nu.dtype)
    return 0.5 * (nu[:, None] - offset)


def _digammas(nu: Tensor, d: int, q: Posterior) -> Tensor:
    """[K] derivatives of ``_log_gammas`` with respect to nu / 2."""
    return torch.digamma(_halves(nu, d, q)).sum(1)


def _log_gammas(nu: Tensor, d: int, q: Posterior) -> Tensor:
    """[K] log of the gamma functions at nu / 2, up to a constant that cancels in differences."""
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


def _symmetric(triangles: Tensor, d: int) -> Tensor:
    """[K, D, D] symmetric matrices from their lower triangles [K, P]."""
    row, column = torch.tril_indices(d, d)
    matrices = triangles.new_zeros(len(triangles), d, d)
    matrices[:, row, column] = triangles
    matrices[:, column, row] = triangles
    return matrices
