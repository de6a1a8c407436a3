"""Keeps the ratio of samples to inserts between processes that insert and processes that draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RateLimiter:
    """Draws wait for inserts, and inserts for draws, as in Reverb (Cassirer et al. 2021, section 3.4).

    starts: env steps before the first draw. slack: env steps by which inserts may run ahead of the ratio.
    With n inserted and d drawn, always d <= samples_per_insert * (n - starts) and
    n <= starts + d / samples_per_insert + slack.

    Draws of ``count`` at a time are never blocked for ever if slack >= count / samples_per_insert + the
    largest insert (``least_slack``).
    """

    samples_per_insert: float
    starts: int
    slack: int
    inserted: int = 0
    drawn: int = 0

    def may_draw(self, count: int) -> bool:
        return self.drawn + count <= self.samples_per_insert * (self.inserted - self.starts)

    def may_insert(self, count: int) -> bool:
        return self.inserted + count <= self.starts + self.drawn / self.samples_per_insert + self.slack


def least_slack(samples_per_insert: float, draw: int, insert: int) -> float:
    """The least slack with which draws and inserts of these sizes never both wait."""
    return draw / samples_per_insert + insert
