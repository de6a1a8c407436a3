"""What a strategy's step costs in addition to the update: seconds, in processes of this host, and bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from murmurate.fabric.interface import Fabric
from murmurate.fabric.simulated.fabric import Member, SimulatedFabric
from murmurate.launch.together import run_together
from murmurate.mapping.lines import Line, fit
from murmurate.mapping.periods import period_of
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import Strategy

T = TypeVar("T")

SIZES = (10_000, 300_000, 1_500_000)  # parameters
_LEAST_SHARE, _LEAST_SECONDS = 0.25, 1e-9  # of a window: relative to the median of its size, and at all
_WINDOWS, _CALLS, _WARM_UP_CALLS = 6, 100, 20  # calls: at least, for whole periods
_COUNTED_SIZE, _COUNTED_CALLS, _COUNTED_SECONDS = 1_000, 20, 1e-3  # virtual seconds of an update


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
        answers = run_together(members, _at_replicas, strategy, replicas, size, _extra_seconds)
        learners = [answer for answer in answers if answer is not None]
        windows = [statistics.fmean(window) for window in zip(*learners, strict=True)]
        # noise may make an exchange cost less than nothing, which would decide a fit of relative errors
        least = max(statistics.median(windows) * _LEAST_SHARE, _LEAST_SECONDS)
        samples += [(size, max(seconds, least)) for seconds in windows]
    return fit(samples)


def bytes_for_each_parameter(strategy: Strategy, replicas: int) -> float:
    """Bytes that a replica reads from and writes to others in an update, for each parameter, in shared memory
    (the metric ``bytes_exchanged``): what the strategy's own code exchanges among simulated members that are
    equally fast, and whose messages arrive before the next update, on average over whole periods."""
    members = replicas + strategy.centre
    calls = _whole_periods(strategy, _COUNTED_CALLS)

    def member(fabric: Member) -> int | None:
        def count(shared: Replicator, replica: Replica) -> int:
            def update() -> None:
                fabric.compute(_COUNTED_SECONDS)
                replica.exchange(replica)

            _repeat(update, calls)  # the first period may be another one
            before = shared.bytes_exchanged
            _repeat(update, calls)
            return shared.bytes_exchanged - before

        return _at_replicas(fabric, strategy, replicas, _COUNTED_SIZE, count)

    counts: list[Any] = SimulatedFabric(members, seed=0, keep_log=False).run([member] * members)
    return float(sum(counts[:replicas])) / (replicas * calls * _COUNTED_SIZE)


def _at_replicas(
    fabric: Fabric, strategy: Strategy, replicas: int, size: int, measure: Callable[[Replicator, Replica], T]
) -> T | None:
    """What ``measure`` returns at a replica of ``size`` parameters; None at the centre, which answers until
    all have measured."""
    shared = Replicator(strategy, fabric)
    replica = shared.replicate("shared", _Parameters(size), _sgd)
    done = fabric.channel("done", torch.zeros(1, dtype=torch.int64))
    if fabric.rank >= replicas:
        shared.serve_until(lambda: all(done.version(rank) > 0 for rank in range(replicas)))
        return None
    found = measure(shared, replica)
    done.publish(torch.ones(1, dtype=torch.int64))
    return found


def _whole_periods(strategy: Strategy, calls: int) -> int:
    """At least ``calls`` updates, and a multiple of the strategy's period."""
    period = period_of(strategy)
    return period * math.ceil(calls / period)


def _extra_seconds(shared: Replicator, replica: Replica) -> list[float]:
    """The extra seconds of an update, in each window."""
    alone = Replica("alone", _Parameters(len(replica)), _sgd)
    _repeat(lambda: replica.exchange(replica), _WARM_UP_CALLS)
    calls, times = _whole_periods(shared.strategy, _CALLS), []
    for _ in range(max(2, _WINDOWS * _CALLS // calls)):  # fewer of long periods
        exchanging = _seconds(lambda: replica.exchange(replica), calls)
        times.append(exchanging - _seconds(alone.update, calls))
    return times


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _seconds(function: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    _repeat(function, calls)
    return (time.perf_counter() - began) / calls


def _repeat(function: Callable[[], Any], calls: int) -> None:
    with torch.no_grad():
        for _ in range(calls):
            function()
