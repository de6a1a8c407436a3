"""Jin's model of asynchronous gossip (thesis, section 3.5): one tick, one random node, step then mix.

D = I + beta e_i (e_j - e_i)' is what a tick does; lambda is what it leaves of a disagreement's square, on
average over all draws of (i, j).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from laws.problems import Point
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.pull_gossip import PullGossip
from strategies.scripted import Script


def event(size: int, i: int, j: int, beta: float) -> np.ndarray:
    """D of eq. 3.34 [n, n]."""
    matrix = np.eye(size)
    matrix[i] += beta * (np.eye(size)[j] - np.eye(size)[i])
    return matrix


def left_over(matrix: np.ndarray) -> np.ndarray:
    """D'D - D'11'D/p [n, n] of eq. 3.52: the square of what ``matrix`` leaves of a disagreement."""
    away = matrix - matrix.mean(axis=0, keepdims=True)
    return away.T @ away


def draws(size: int, with_self: bool) -> list[tuple[int, int]]:
    return [(i, j) for i in range(size) for j in range(size) if with_self or i != j]


def lam(p: int, b: float, with_self: bool = True) -> float:
    """lambda as eq. 3.52-3.53 have it (eq. 3.8 and 3.31 print 2b^2/p for 2b^2/p^2)."""
    leaves = 2 * b * (1 - b) / p + 2 * b**2 / p**2
    return 1 - leaves * (1 if with_self else p / (p - 1))


def printed_lambda(p: int, b: float) -> float:
    return 1 - 2 * b * (1 - b) / p - 2 * b**2 / p


@dataclass(frozen=True)
class Bowl:
    """f(x) = x' diag(curvatures) x / 2 with Gaussian noise on its gradients; the optimum is 0.

    Many coordinates that share the draws: squares add up over coordinates, so one run is an average over
    as many noises.
    """

    size: int = 8
    beta: float = 0.5
    alpha: float = 0.05
    m: float = 0.5
    L: float = 1.5
    dimension: int = 200
    start: float = 0.0  # distance of all from the optimum, each coordinate
    spread: float = 0.0  # standard deviation of the starts around it

    @property
    def variance(self) -> float:
        """sigma^2, with noise of variance 1 in each coordinate."""
        return float(self.dimension)

    @property
    def curvatures(self) -> torch.Tensor:
        return torch.linspace(self.m, self.L, self.dimension, dtype=torch.float64)

    def ticks(self, seed: int, number: int, every: int = 1) -> Iterator[tuple[np.ndarray, float]]:
        """Before the first and after each tick, or each ``every``-th: (all vectors [n, d], the largest
        gradient so far)."""
        clock = np.random.default_rng([seed, 1])
        noise = torch.Generator().manual_seed(seed)
        replicas = self._members(seed, noise)
        largest = max(float((self.curvatures * r.params.detach()).norm()) for r in replicas)
        yield self._all(replicas), largest
        for tick in range(1, number + 1):
            one = replicas[clock.integers(self.size)]
            gradient = self.curvatures * one.params.detach()
            largest = max(largest, float(gradient.norm()))
            one.follow(gradient + torch.randn(self.dimension, generator=noise, dtype=torch.float64))
            if tick % every == 0:
                yield self._all(replicas), largest

    def _members(self, seed, noise):
        script = Script(self.size)
        strategy = PullGossip(mixing=self.beta, with_self=True, seed=seed)
        replicas = []
        for rank in range(self.size):
            replicator = Replicator(strategy, script.member(rank))
            replica = replicator.replicate(
                "x", Point(*[self.start] * self.dimension), lambda p: torch.optim.SGD(p, lr=self.alpha)
            )
            near = torch.randn(self.dimension, generator=noise, dtype=torch.float64)
            replica.params.data.add_(self.spread * near)
            replicator.publish()
            replicas.append(replica)
        return replicas

    @staticmethod
    def _all(replicas) -> np.ndarray:
        return torch.stack([r.params.detach() for r in replicas]).numpy()

    def apart_bound(self, t: np.ndarray, start: float, largest: float, factor: float) -> np.ndarray:
        """Eq. 3.7 at ticks ``t``; ``start`` is the first disagreement, ``factor`` lambda."""
        rate = factor * (1 - self.alpha * self.m / self.size)
        ball = factor * self.alpha**2 * (largest**2 + self.variance) / (1 - rate)
        return rate**t * start + ball

    def away_bound(self, t: np.ndarray, start: float) -> np.ndarray:
        """Eq. 3.6 at ticks ``t``; ``start`` is the first square of distances from the optimum."""
        kappa = self.m * self.L / (self.m + self.L)
        ball = self.size * self.alpha * self.variance / (2 * kappa)
        return (1 - 2 * self.alpha * kappa / self.size) ** t * start + ball

    def expected_apart(self, ticks: int) -> np.ndarray:
        """[ticks + 1]: E||x - mean||^2 exactly, from equal starts: what eq. 3.55 bounds.

        From equal starts E[x x'] = a I + b 11' in each coordinate, and a tick maps (a, b) linearly.
        """
        everyone = np.ones((self.size, self.size))
        basis = [np.eye(self.size), everyone]
        a = np.zeros(self.dimension)
        b = np.full(self.dimension, self.start**2)
        kept, fresh = [], np.zeros(2)
        for h in self.curvatures.tolist():
            columns = []
            for s in basis:
                moved = [self._tick(i, j, h) @ s @ self._tick(i, j, h).T for i, j in draws(self.size, True)]
                columns.append(as_two(np.mean(moved, axis=0)))
            kept.append(np.array(columns).T)
        for i, j in draws(self.size, True):
            e = event(self.size, i, j, self.beta)[:, i]
            fresh += as_two(self.alpha**2 * np.outer(e, e)) / self.size**2
        state, path = np.stack([a, b], axis=1), []
        for _ in range(ticks + 1):
            path.append((self.size - 1) * state[:, 0].sum())
            state = np.einsum("dij,dj->di", np.stack(kept), state) + fresh
        return np.array(path)

    def _tick(self, i: int, j: int, h: float) -> np.ndarray:
        step = np.eye(self.size)
        step[i, i] -= self.alpha * h
        return event(self.size, i, j, self.beta) @ step


def as_two(s: np.ndarray) -> np.ndarray:
    """(a, b) of the part of ``s`` [n, n] that no renaming of members changes: a I + b 11'."""
    n = len(s)
    b = (s.sum() - np.trace(s)) / (n * (n - 1))
    return np.array([np.trace(s) / n - b, b])
