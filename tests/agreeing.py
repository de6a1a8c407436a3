"""Exchanges of a replica that is alone, as under a strategy whose replicas agree now and then."""

from __future__ import annotations

from collections.abc import Callable

from murmurate.replica.vector import Exchange, Replica


def every(period: int, heard: int = 2) -> Callable[[Replica], Exchange]:
    """An ``exchange`` that updates, and ends a round with every ``period``-th update, as local SGD does."""

    def step(replica: Replica) -> Exchange:
        replica.update()
        return Exchange(replica.clock // period, heard, replica.clock % period)

    return step
