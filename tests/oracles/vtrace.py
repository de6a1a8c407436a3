"""A slow oracle of V-trace: eq. 1 of Espeholt et al. 2018 as the sum of products that it is printed as.

One sum for each step of each simulator, in Python floats, up to the end of its episode or of the rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracles.returns import Grid, last_step, value_after


def vtrace(
    rho: Grid,
    r: Grid,
    v: Grid,
    terminated: Grid,
    truncated: Grid,
    last_value: Sequence[float],
    truncated_value: Grid,
    gamma: float,
    *,
    lambda_: float,
    rho_bar: float,
    c_bar: float,
    policy_rho_bar: float,
) -> tuple[list[list[float]], list[list[float]]]:
    """v_s = V(x_s) + sum_{t=s}^{e} gamma^(t-s) (prod_{i=s}^{t-1} c_i) delta_t V, and the advantages
    min(policy_rho_bar, rho_s) (r_s + gamma [lambda v_{s+1} + (1 - lambda) V(x_{s+1})] - V(x_s))."""
    steps, batch = len(r), len(r[0])

    def following(t: int, b: int, e: int) -> float:
        """V(x_{t+1})"""
        return v[t + 1][b] if t < e else value_after(e, b, terminated, truncated, last_value, truncated_value)

    targets = [[0.0] * batch for _ in range(steps)]
    for s in range(steps):
        for b in range(batch):
            e = last_step(s, b, terminated, truncated)
            total = v[s][b]
            for t in range(s, e + 1):
                product = math.prod(lambda_ * min(c_bar, rho[i][b]) for i in range(s, t))
                delta = min(rho_bar, rho[t][b]) * (r[t][b] + gamma * following(t, b, e) - v[t][b])
                total += gamma ** (t - s) * product * delta
            targets[s][b] = total
    advantages = [[0.0] * batch for _ in range(steps)]
    for s in range(steps):
        for b in range(batch):
            e = last_step(s, b, terminated, truncated)
            target = targets[s + 1][b] if s < e else following(s, b, e)
            q = r[s][b] + gamma * (lambda_ * target + (1 - lambda_) * following(s, b, e))
            advantages[s][b] = min(policy_rho_bar, rho[s][b]) * (q - v[s][b])
    return targets, advantages
