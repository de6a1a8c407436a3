"""Kinds of DPSGD under which its laws are tested."""

from __future__ import annotations

from murmurate.strategies.dpsgd import DPSGD

PLAIN = DPSGD(global_learning_rate=1.0, threads=1, local_updates=1, wait=True)
KINDS = [
    DPSGD(global_learning_rate=1.0, threads=1, local_updates=2, wait=True),
    DPSGD(global_learning_rate=1.0, threads=2, local_updates=1),
    DPSGD(global_learning_rate=1.0, threads=3, local_updates=2, batch=3, wait=True),
    DPSGD(global_learning_rate=1.0, threads=2, local_updates=1, delay_bound=1),
]
NAMES = ["p 1", "p 2", "p 3, M 3", "bounded"]
