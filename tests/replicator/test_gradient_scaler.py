"""``torch.amp.GradScaler`` with a wrapped optimizer: steps that overflow are skipped, and replicas agree."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F

from murmurate.replicator.optimizer_wrapper import WrappedOptimizer
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.strategies.synchronous_gossip import SynchronousGossip
from replicator.steps import alone, loops, pairs, tanh_net

STEPS = 6


def scaled(net, optimizer, batches, *, overflows=(), clip=False):
    """Parameters after a loop whose loss is infinite in the steps ``overflows``; and the scaler's scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    for k, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(net(x), y) * (torch.inf if k in overflows else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in net.parameters()], scaler.get_scale()


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.05, weight_decay=0.1)


def replicated(loop, overflows_of, clip=False):
    net = tanh_net(torch.float32)
    optimizer = loop.wrap_optimizer(adam(net), net)
    assert isinstance(optimizer, WrappedOptimizer)
    # each replica's share are the same rows
    batches = [tuple(x.repeat(loop.size, 1) for x in pair) for pair in pairs(STEPS, dtype=torch.float32)]
    overflows = overflows_of.get(loop.rank, ())
    return scaled(net, optimizer, loop.inputs(batches), overflows=overflows, clip=clip)


@pytest.mark.parametrize("clip", [False, True])
def test_one_replica_makes_the_steps_of_plain_torch(clip):
    net = tanh_net(torch.float32)
    expected, scale = scaled(net, adam(net), pairs(STEPS, dtype=torch.float32), overflows={0, 3}, clip=clip)
    own, own_scale = alone(functools.partial(replicated, overflows_of={0: {0, 3}}, clip=clip))
    assert own_scale == scale
    for ours, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("clip", [False, True])
def test_under_all_reduce_all_skip_a_step_in_which_one_overflows(clip):
    """Both have the same batches, so that their mean is the gradient of one that overflows in both steps."""
    net = tanh_net(torch.float32)
    expected, _ = scaled(net, adam(net), pairs(STEPS, dtype=torch.float32), overflows={1, 4}, clip=clip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (first, _), (second, _) = loops(
            2, functools.partial(replicated, overflows_of={0: {1}, 1: {4}}, clip=clip), strategy=AllReduce()
        )
    for ours, peers, theirs in zip(first, second, expected, strict=True):
        assert torch.equal(ours, peers)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", [LocalSGD(period=2), SynchronousGossip(), GALA(), ParameterServer()], ids=lambda s: s.name
)
def test_elsewhere_the_replica_skips_its_own_update_and_all_go_on(strategy):
    def trained(overflows_of):
        members = loops(3, functools.partial(replicated, overflows_of=overflows_of), strategy=strategy)
        return [parameters for parameters, _ in filter(None, members)]  # a centre has none

    skipped, plain = trained({1: {0, 3}}), trained({})
    for parameters in skipped:
        assert all(bool(p.isfinite().all()) for p in parameters)
    assert any(not torch.equal(p, q) for p, q in zip(skipped[1], plain[1], strict=True))
