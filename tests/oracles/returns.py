"""Slow oracles of returns and advantages, as sums of products over one episode at a time.

Written from the definitions (Sutton & Barto 2018, eq. 7.1 for the return up to a horizon; Schulman et
al. 2016, eq. 16), not from a recursion: one sum for each step of each simulator, in Python floats.
"""

from __future__ import annotations

from collections.abc import Sequence

Grid = Sequence[Sequence[float]]


def last_step(t: int, b: int, terminated: Grid, truncated: Grid) -> int:
    """The step that ends the episode step t belongs to, or the last of the rollout."""
    for e in range(t, len(terminated)):
        if terminated[e][b] or truncated[e][b]:
            return e
    return len(terminated) - 1


def value_after(
    e: int, b: int, terminated: Grid, truncated: Grid, last_value: Sequence[float], truncated_value: Grid
) -> float:
    """What the rest is worth after step e, which ends its episode or the rollout."""
    if terminated[e][b]:
        return 0.0
    if truncated[e][b]:
        return truncated_value[e][b]
    return last_value[b]


def n_step_returns(
    r: Grid,
    terminated: Grid,
    truncated: Grid,
    last_value: Sequence[float],
    truncated_value: Grid,
    gamma: float,
) -> list[list[float]]:
    """G_t = sum_{k=t}^{e} gamma^(k-t) r_k + gamma^(e+1-t) V(after e), e the last step of t's episode."""
    steps, batch = len(r), len(r[0])
    out = [[0.0] * batch for _ in range(steps)]
    for t in range(steps):
        for b in range(batch):
            e = last_step(t, b, terminated, truncated)
            rewards = sum(gamma ** (k - t) * r[k][b] for k in range(t, e + 1))
            after = value_after(e, b, terminated, truncated, last_value, truncated_value)
            out[t][b] = rewards + gamma ** (e + 1 - t) * after
    return out


def generalized_advantages(
    r: Grid,
    v: Grid,
    terminated: Grid,
    truncated: Grid,
    last_value: Sequence[float],
    truncated_value: Grid,
    gamma: float,
    lambda_: float,
) -> list[list[float]]:
    """A_t = sum_{l=0}^{e-t} (gamma lambda)^l delta_{t+l}, delta_k = r_k + gamma V(s_{k+1}) - V(s_k)."""
    steps, batch = len(r), len(r[0])
    out = [[0.0] * batch for _ in range(steps)]
    for t in range(steps):
        for b in range(batch):
            e = last_step(t, b, terminated, truncated)
            for k in range(t, e + 1):
                if k < e:
                    following = v[k + 1][b]
                else:
                    following = value_after(e, b, terminated, truncated, last_value, truncated_value)
                delta = r[k][b] + gamma * following - v[k][b]
                out[t][b] += (gamma * lambda_) ** (k - t) * delta
    return out
