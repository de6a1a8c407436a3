"""DPSGD's step sizes: how they depend on p, B and M, and their limit where parameters must stay above 0."""

from __future__ import annotations

from murmurate.errors import Refusal
from murmurate.ranges import rounded_down


def scaled_rate(rate: float, p: int, B: int, M: int) -> float:
    """rate / (p B M)^(1/4) (Corollary 1), where ``rate`` is meant for p = B = M = 1.

    It holds for eta and for rho alike; a pushed gradient moves v by their product.
    """
    return float(rate * (1 / (p * B * M)) ** 0.25)


def refuse_shrinking(eta: float, rho: float, p: int, B: int, M: int) -> None:
    """Raise Refusal where parameters that must stay above 0 may fall below it.

    eta: the share of them that an update takes away. The p B updates of a push leave s = (1 - eta)^(pB) of v,
    so M pushes take rho M (1 - s) of it. (Late pushes contain more updates; the master itself limits those.)
    """
    kept_share = max(1 - eta, 0.0) ** (p * B)
    removed_share = rho * M * (1 - kept_share)
    if removed_share < 1 or rho * M <= 1:  # with rho M <= 1 the result is a mean of v and the nodes' vectors
        return
    max_rate = rounded_down(0.99 / (M * (1 - kept_share)), 2)
    raise Refusal(
        f"parameters that must stay above 0 may fall below it: with eta = {eta:.3g} the p B = {p} x "
        f"{B} updates before a push leave s = {kept_share:.3g} of v, and the master takes "
        f"rho sum(1 - s) = {rho:.3g} x {M} x {1 - kept_share:.3g} = {removed_share:.3g} of it away, which "
        f"must be below 1. Use a global_learning_rate of {max_rate:g} or less, or smaller steps."
    )
