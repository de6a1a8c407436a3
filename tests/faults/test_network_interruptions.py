"""A connection that is interrupted for longer than a silence: its members are neither dead nor replaced."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from fabric.networked import at_once, cabled
from murmurate.replicator.replicator import Replicator
from murmurate.replicator.user_loop import OwnLoop
from murmurate.strategies.interface import FINAL_DRAIN
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.strategies.push_sum import PushSum
from murmurate.strategies.synchronous_gossip import SynchronousGossip
from waiting import until

STILL = torch.zeros(2)


def replicated(strategy, fabrics, rate=0.0):
    """(replicator, replica) of each member."""

    def build(fabric):
        replicator = Replicator(strategy, fabric)
        made = replicator.replicate(
            "model", nn.Linear(2, 1, bias=False), lambda parameters: torch.optim.SGD(parameters, lr=rate)
        )
        replicator.publish()
        return replicator, made

    return at_once(*[lambda fabric=fabric: build(fabric) for fabric in fabrics])


def strategy_of(replicator):
    return replicator.bound_replicas["model"].strategy


def is_noticed(fabrics):
    return list(fabrics[0].living()) == [0] and list(fabrics[1].living()) == [1]


def is_mended(fabrics):
    return all(list(fabric.living()) == [0, 1] for fabric in fabrics)


def test_a_checkpoint_during_an_interruption_contains_what_is_in_flight():
    with cabled(shared_memory=False) as (fabrics, cable):
        (one, first), (two, second) = replicated(PushSum(topology="ring"), fabrics)
        for replica in (first, second):
            replica.follow(STILL)
        cable.cut()
        first.follow(STILL)  # its share does not arrive
        until(lambda: is_noticed(fabrics))
        threading.Timer(0.5, cable.mend).start()
        assert at_once(lambda: one.drain(1, 20.0), lambda: two.drain(1, 20.0)) == [True, True]
        weights = [strategy_of(replicator).state()["weight"] for replicator in (one, two)]
        assert sum(weights) == pytest.approx(2.0, abs=1e-12)


def test_a_member_that_has_ended_stays_so_after_a_reconnect():
    with cabled(shared_memory=False) as (fabrics, cable):
        (one, first), (two, second) = replicated(PushSum(topology="ring"), fabrics)
        for replica in (first, second, first):
            replica.follow(STILL)
        two.drain(FINAL_DRAIN, 0.1)
        two.publish()
        mail = strategy_of(one)._mail
        until(lambda: first.follow(STILL) and mail.has_ended(1))
        weight = strategy_of(one).state()["weight"]
        cable.cut()
        until(lambda: is_noticed(fabrics))
        first.follow(STILL)
        cable.mend()
        until(lambda: is_mended(fabrics))
        for _ in range(3):
            first.follow(STILL)
        assert mail.has_ended(1)
        assert strategy_of(one).state()["weight"] == weight, "no share is sent to a member that has ended"
        assert one.drain(FINAL_DRAIN, 5.0)


def test_a_round_of_gossip_waits_for_a_member_that_is_out_of_reach():
    with cabled(shared_memory=False) as (fabrics, cable):
        (_, first), (_, second) = replicated(SynchronousGossip(deadline_seconds=60.0), fabrics, rate=1.0)
        cable.cut()

        def mend():
            until(lambda: is_noticed(fabrics))
            time.sleep(0.3)  # both look several times for a message of a member that does not live
            cable.mend()

        *exchanges, _ = at_once(lambda: first.follow(STILL), lambda: second.follow(torch.ones(2)), mend)
        assert [exchange.heard for exchange in exchanges] == [2, 2]
        torch.testing.assert_close(first.params, second.params)


def test_a_centre_outlasts_an_interruption():
    def script(fabric):
        with OwnLoop(ParameterServer(deadline_seconds=1.0), fabric) as loop:
            replica = loop.replicate(
                "model", nn.Linear(2, 1, bias=False), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
            )
            replica.follow(torch.ones(2))  # the centre leaves here, once all have ended
            cable.cut()
            until(lambda: list(fabric.living()) == [0])
            threading.Timer(1.0, cable.mend).start()
            until(lambda: list(fabric.living()) == [0, 1])
            before = loop.bound_replicas["model"].last.round
            until(lambda: replica.follow(torch.ones(2)).round > before, "the centre answers again")

    with cabled(shared_memory=False) as (fabrics, cable):
        at_once(*[lambda fabric=fabric: script(fabric) for fabric in fabrics])
