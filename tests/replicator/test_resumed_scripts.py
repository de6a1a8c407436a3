"""A resume from states that do not fit, and parameters that changed after wrapping."""

from __future__ import annotations

import functools

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.elastic import Elastic, SynchronousElastic
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from replicator.steps import alone, loops, pairs, tanh_net, trained


def saved_states(loop, steps):
    net = tanh_net()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    states = []
    trained(loop, net, optimizer, loop.inputs(pairs(steps)), lambda: states.append(loop.state()))
    return states


def resume(loop, state, calls=True):
    net = tanh_net()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    if calls:
        loop.load(state)
        loop.resumed()
    return trained(loop, net, optimizer, loop.inputs(pairs(2)))


@pytest.mark.parametrize("strategy", [AllReduce(), SynchronousElastic(), DPSGD()], ids=lambda s: s.name)
def test_parameters_that_are_changed_after_wrapping_are_refused(strategy):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        net.load_state_dict({name: x + 1 for name, x in net.state_dict().items()})
        return trained(loop, net, optimizer, loop.inputs(pairs(2)))

    with pytest.raises(Refusal, match=f"changed .by load_state_dict.* when {strategy.name} had"):
        loops(2, script, strategy=strategy)
    alone(script)  # nothing is exchanged


@pytest.mark.parametrize("strategy", [Hogwild(), DPSGD()], ids=lambda s: s.name)
def test_a_replica_may_begin_after_others_that_share_its_memory(strategy):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        if loop.rank == 1:
            loop.fabric.channel("late", torch.zeros(1)).wait_newer([0], [0], 60.0)
        trained(loop, net, optimizer, loop.inputs(pairs(2)))
        if loop.rank == 0:
            loop.fabric.channel("late", torch.zeros(1)).publish(torch.ones(1))
        return net.state_dict()

    members = 2 + strategy.centre
    first, second = loops(members, script, strategy=strategy)[:2]
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_resume_under_another_strategy_or_number_of_replicas_is_refused():
    states = [of_one[-1] for of_one in loops(2, lambda loop: saved_states(loop, 2))]
    for size, strategy, words in (
        (2, LocalSGD(), "this run is local-sgd with 2"),
        (2, GALA(), "this run is gala with 2"),
        (3, AllReduce(), "this run is all-reduce with 3"),
    ):
        with pytest.raises(Refusal, match=f"saved under all-reduce with 2 replicas, and {words}"):
            loops(size, lambda loop: resume(loop, states[0]), strategy=strategy)
    for state, found in (({"net": states[0]["optimizer 0"]}, "'net'"), ({}, "nothing")):
        with pytest.raises(Refusal, match=f"the state has no replica 'optimizer 0', but {found}: load what"):
            loops(2, functools.partial(resume, state=state))
    earlier = [{"optimizer 0": {k: v for k, v in one["optimizer 0"].items() if k != "run"}} for one in states]
    for kept in (states, earlier):
        first, second = loops(2, lambda loop, kept=kept: resume(loop, kept[loop.rank]))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [Elastic(), DPSGD()], ids=lambda s: s.name)
def test_states_without_that_of_their_centre_are_refused(strategy):
    with pytest.raises(Refusal, match=f"under {strategy.name} the centre has a state of its own"):
        loops(2 + strategy.centre, lambda loop: saved_states(loop, 1), strategy=strategy)
    state = loops(1, lambda loop: saved_states(loop, 1))[0][-1]
    earlier = {"optimizer 0": {k: v for k, v in state["optimizer 0"].items() if k != "run"}}
    with pytest.raises(Refusal, match=r"Save agreed\(\), and load it into the model before wrapping"):
        loops(2 + strategy.centre, lambda loop: resume(loop, earlier), strategy=strategy)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2)])
def test_a_resume_from_different_steps_is_refused(strategy):
    states = loops(2, lambda loop: saved_states(loop, 4), strategy=strategy)
    with pytest.raises(Refusal, match="updates of 'optimizer 0' is 3 on replica 0 and 4 on replica 1"):
        loops(2, lambda loop: resume(loop, states[loop.rank][2 + loop.rank]), strategy=strategy)
    with pytest.raises(FabricError, match=r"Call resumed\(\) on all replicas or on none"):
        loops(2, lambda loop: resume(loop, states[0][2], loop.rank == 0), strategy=strategy)
