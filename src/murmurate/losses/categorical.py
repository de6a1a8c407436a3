"""Distributions of returns on a fixed support: the projected Bellman target, and its cross-entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape


class CrossEntropy(NamedTuple):
    """loss: scalar, differentiable in the logits. each: [B], the unweighted loss of every
    transition; a constant."""

    loss: Tensor
    each: Tensor


def support(v_min: float, v_max: float, atoms: int) -> Tensor:
    """z [K]: ``atoms`` returns from ``v_min`` to ``v_max`` at equal distances.

    Raises:
        ValueError: for fewer than two atoms, or where ``v_min`` is not below ``v_max``.
    """
    if atoms < 2:
        raise ValueError(f"atoms is {atoms}; a distribution needs at least two returns")
    if not v_min < v_max:
        raise ValueError(f"v_min is {v_min} and v_max is {v_max}; the first must be the smaller")
    return torch.linspace(v_min, v_max, atoms)


def expectation(p: Tensor, z: Tensor) -> Tensor:
    """``sum_i z_i p_i`` [B]: the mean of each distribution.

    Args:
        p: probabilities [B, K].
        z: support [K].
    """
    _check_support(z, p=p)
    return p @ z


def projected_target(r_t: Tensor, discount_t: Tensor, p_t: Tensor, z: Tensor) -> Tensor:
    """``Phi T Z``: the distribution of ``R + d Z'``, projected onto the support.

    ``(Phi T Z)_i = sum_j [1 - |[R + d z_j] - z_i| / dz]_0^1 p_j(s', a')``, where ``[.]`` clips a return to
    the range of the support and ``[.]_0^1`` clips a share to [0, 1]. Each atom's probability is divided
    between the two atoms next to its return; the nearer one takes more.

    Source: Bellemare et al. 2017, eq. 7; for returns of n steps Barth-Maron et al. 2018, Algorithm 1.

    Args:
        r_t: R [B], the return of the n steps.
        discount_t: d [B], gamma**n, and 0 where the episode was terminated.
        p_t: p(s', a') [B, K] of the target nets, each row a distribution.
        z: support [K], at equal distances.

    Returns:
        [B, K], without a gradient; each row has the same sum as that row of ``p_t``.
    """
    check_rank(1, r_t=r_t)
    check_shape(r_t.shape, "r_t", discount_t=discount_t)
    _check_support(z, p_t=p_t)
    check_shape(r_t.shape, "r_t", **{"p_t[:, 0]": p_t[:, 0]})
    with torch.no_grad():
        last = len(z) - 1
        # the position of each return on the support, in atoms from the first one
        position = (r_t[:, None] + discount_t[:, None] * z - z[0]).mul_(last / (z[-1] - z[0])).clamp_(0, last)
        below = position.floor().clamp_(max=last - 1)
        share = position.sub_(below)  # the part of the probability that goes to the upper neighbour
        index = below.long()
        upper = p_t * share
        target = torch.zeros_like(p_t).scatter_add_(1, index, p_t - upper)
        return target.scatter_add_(1, index.add_(1), upper)


def categorical_cross_entropy(logits_tm1: Tensor, target_tm1: Tensor, weight: Tensor) -> CrossEntropy:
    """``-w sum_i y_i log p_i(s, a)``, averaged over the batch.

    Source: Barth-Maron et al. 2018, Algorithm 1 and appendix A, where it is the critic's distance d.

    Args:
        logits_tm1: logits of p(s, a) [B, K].
        target_tm1: y [B, K]; constants.
        weight: w [B], importance weights; constants.
    """
    check_rank(2, logits_tm1=logits_tm1)
    check_rank(1, weight=weight)
    check_shape(logits_tm1.shape, "logits_tm1", target_tm1=target_tm1)
    check_shape(weight.shape, "weight", **{"logits_tm1[:, 0]": logits_tm1[:, 0]})
    each = -(target_tm1.detach() * logits_tm1.log_softmax(1)).sum(1)
    return CrossEntropy((weight.detach() * each).mean(), each.detach())


def _check_support(z: Tensor, **distributions: Tensor) -> None:
    check_rank(1, z=z)
    check_rank(2, **distributions)
    for name, p in distributions.items():
        check_shape(z.shape, "z", **{f"{name}[0]": p[0]})
