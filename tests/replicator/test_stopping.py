"""``stopping``: a signal ends scripts between two steps, under common rounds all at the same one."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.replicator.replica_parts import OnePart
from murmurate.replicator.stopping import StopSignals
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.elastic import Elastic
from murmurate.strategies.gala import GALA
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.strategies.solo import Solo
from murmurate.strategies.synchronous_gossip import SynchronousGossip
from replicator.steps import alone, loops, processes

SIGNALLED_AT = 20


def stops(loop):
    """The step after which this replica is told to stop, where rank 1 gets SIGTERM twice after step 20."""
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    for step in range(1, 10**9):
        optimizer.step()
        if step == SIGNALLED_AT and loop.rank == min(1, loop.size - 1):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        if loop.stopping():
            assert loop.stopping(), "it stays so"
            return step


@pytest.mark.parametrize(
    ("strategy", "latest"),
    [
        (AllReduce(), SIGNALLED_AT + 16),
        (SynchronousGossip(), SIGNALLED_AT + 16),
        (LocalSGD(period=7), SIGNALLED_AT + 16 + 7),
    ],
    ids=["all-reduce", "synchronous-gossip", "local-sgd"],
)
def test_all_replicas_stop_at_the_same_step_though_the_signal_reaches_one(strategy, latest):
    steps = loops(3, stops, processes, strategy)
    assert len(set(steps)) == 1, steps
    assert SIGNALLED_AT <= steps[0] <= latest
    if isinstance(strategy, LocalSGD):
        assert steps[0] % 7 == 0, "directly after a round, when nobody need be waited for"


@pytest.mark.parametrize("strategy", [GALA(), Elastic()], ids=["gala", "elastic"])
def test_under_asynchronous_strategies_all_hear_of_it(strategy):
    one, other = loops(2 + strategy.centre, stops, processes, strategy)[:2]
    assert other == SIGNALLED_AT
    assert one >= 1


def asks_first(loop):
    """Ask before each step, so that a centre asks before it serves."""
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    while not loop.stopping():
        optimizer.step()
        os.kill(os.getpid(), signal.SIGTERM)
    return "stopped"


def test_a_loop_may_ask_before_its_first_step_under_a_strategy_with_a_centre():
    assert loops(3, asks_first, processes, ParameterServer()) == ["stopped", "stopped", None]


def test_a_replica_alone_stops_at_once():
    assert loops(1, stops, processes, Solo()) == [SIGNALLED_AT]


def test_earlier_handlers_come_back_and_a_second_ctrl_c_interrupts():
    heard = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        signals = StopSignals()
        assert signals.begin()
        signal.raise_signal(signal.SIGTERM)
        assert (signals.number, heard) == (signal.SIGTERM, [])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signals.end()
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore:nothing was exchanged")
def test_where_threads_are_replicas_it_is_false():
    assert loops(2, lambda loop: loop.stopping()) == [False, False]


def test_replicas_of_several_parts_are_refused(monkeypatch):
    monkeypatch.setattr(OnePart, "size", 2)
    with pytest.raises(Refusal, match="one part"):
        alone(lambda loop: loop.stopping())
