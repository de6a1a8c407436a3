"""Seconds that a strategy's step takes in addition to the update, in several processes of this host."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import nn

from murmurate.fabric.interface import Fabric
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.launch.together import run_together
from murmurate.mapping.lines import Line, fit
from murmurate.mapping.periods import period_of
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import Strategy

SIZES = (10_000, 300_000, 1_500_000)  # parameters
_LEAST_SHARE, _LEAST_SECONDS = 0.25, 1e-9  # of a window: relative to the median of its size, and at all
_WINDOWS, _CALLS, _WARM_UP_CALLS = 6, 100, 20  # calls: at least, for whole periods


class _Parameters(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))


def check(strategy: Strategy) -> None:
    """Raise Refusal for what the strategy refuses when it begins: a topology of another name, for example."""
    members = 1 + strategy.centre

    def begin(fabric: Fabric) -> None:
        Replicator(strategy, fabric).replicate("shared", _Parameters(1), _sgd)

    SimulatedFabric(members, seed=0, keep_log=False).run([begin] * members)


def measure(strategy: Strategy, replicas: int) -> Line:
    """Seconds that an update takes longer with ``strategy`` among ``replicas`` processes, as a line in the
    number of parameters.

    The processes do nothing but updates, so that none is early or late: the cost model adds the time that
    replicas wait for one another. A strategy's centre, if it has one, answers in a process of its own.
    """
    members = replicas + strategy.centre
    samples: list[tuple[int, float]] = []
    for size in SIZES:
        answers = run_together(members, _work, strategy, replicas, size)
        learners = [answer for answer in answers if answer is not None]
        windows = [statistics.fmean(window) for window in zip(*learners, strict=True)]
        # noise may make an exchange cost less than nothing, which would decide a fit of relative errors
        least = max(statistics.median(windows) * _LEAST_SHARE, _LEAST_SECONDS)
        samples += [(size, max(seconds, least)) for seconds in windows]
    return fit(samples)


def _work(fabric: Fabric, strategy: Strategy, replicas: int, size: int) -> list[float] | None:
    """The extra seconds of an update, in each window; None at the centre."""
    shared = Replicator(strategy, fabric)
    replica = shared.replicate("shared", _Parameters(size), _sgd)
    done = fabric.channel("done", torch.zeros(1, dtype=torch.int64))
    if fabric.rank >= replicas:
        shared.serve_until(lambda: all(done.version(rank) > 0 for rank in range(replicas)))
        return None
    alone = Replica("alone", _Parameters(size), _sgd)
    _seconds(lambda: replica.exchange(replica), _WARM_UP_CALLS)
    period, times = period_of(strategy), []
    calls = math.ceil(_CALLS / period) * period
    for _ in range(_WINDOWS):
        exchanging = _seconds(lambda: replica.exchange(replica), calls)
        times.append(exchanging - _seconds(alone.update, calls))
    done.publish(torch.ones(1, dtype=torch.int64))
    return times


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _seconds(function: Any, calls: int) -> float:
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(calls):
            function()
    return (time.perf_counter() - began) / calls
