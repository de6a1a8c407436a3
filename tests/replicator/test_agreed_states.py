"""What no optimizer steps: frozen parameters and buffers, which replicas agree on all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.elastic import Elastic
from murmurate.strategies.gala import GALA
from replicator.steps import draw, loops


def half_frozen(seed):
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    net[3].weight = nn.Parameter(net[3].weight.detach().clone())
    net[0].requires_grad_(False)
    with torch.no_grad():
        for k, tensor in enumerate(net.state_dict().values()):
            tensor.copy_(draw(100 * seed + k, *tensor.shape)) if tensor.is_floating_point() else None
    return net


@pytest.mark.parametrize("strategy", [AllReduce(), GALA(), Elastic()])
def test_frozen_parameters_and_buffers_begin_as_those_of_the_lowest_rank(strategy):
    def script(loop, by_wrapping):
        net = half_frozen(loop.rank)
        stepped = [p for p in net.parameters() if p.requires_grad]
        if by_wrapping:
            loop.wrap_optimizer(torch.optim.SGD(stepped, lr=0.1), net)
        else:
            loop.replicate("net", net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        return {k: v.clone() for k, v in net.state_dict().items()}

    expected = half_frozen(0).state_dict()
    for by_wrapping in (True, False):
        found = loops(3, lambda loop, by=by_wrapping: script(loop, by), strategy=strategy)
        for result in found[: 3 - strategy.centre]:
            torch.testing.assert_close(result, dict(expected), rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.body = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head, self.frozen.weight.requires_grad = nn.Linear(3, 3), False
        self.head.weight = self.body.weight
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_what_is_agreed_loads_into_a_module_with_frozen_and_tied_parameters():
    def script(loop):
        torch.manual_seed(loop.rank)
        net = Tied()
        loop.wrap_optimizer(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), net)
        loop.finish(30.0)
        fresh = Tied()
        fresh.load_state_dict(loop.agreed())
        return {k: v.clone() for k, v in fresh.state_dict().items()}, dict(net.state_dict())

    for loaded, own in loops(2, script):
        torch.testing.assert_close(loaded, own, rtol=0, atol=0)


class Averaging(nn.Module):
    """Assigns a new tensor to its buffer in every pass, and has a part under two names."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.both = nn.Sequential(self.layer, self.norm)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x):
        self.average = 0.5 * self.average + 0.5 * x.mean(0)
        return self.both(x)


def test_buffers_that_a_module_assigns_anew_are_saved_and_agreed_under_all_names():
    def script(loop):
        net = Averaging()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        net(torch.full((4, 3), float(loop.rank + 1)))
        state, seen = loop.state(), net.average.clone()
        agreed = loop.agreed()
        net(torch.ones(4, 3))
        loop.load(state)
        return seen, net.average.clone(), agreed, optimizer.replica.clock

    for rank, (seen, loaded, agreed, _) in enumerate(loops(2, script)):
        assert seen.tolist() == loaded.tolist() == [0.5 * (rank + 1)] * 3
        assert torch.equal(agreed["norm.running_mean"], agreed["both.1.running_mean"])
        assert agreed["average"].tolist() == [0.75] * 3


def test_two_optimizers_of_one_module_agree_on_all_of_it():
    def script(loop):
        net = nn.Linear(3, 3)
        first = loop.wrap_optimizer(torch.optim.SGD([net.weight], lr=0.1), net)
        second = loop.wrap_optimizer(torch.optim.SGD([net.bias], lr=0.1), net, name="bias")
        for optimizer, value in ((first, 1.0), (second, 2.0)):
            optimizer.replica.params.data.fill_(value)
        loop.finish(30.0)
        return loop.agreed()

    for agreed in loops(2, script):
        assert torch.equal(agreed["weight"], torch.ones(3, 3))
        assert torch.equal(agreed["bias"], torch.full((3,), 2.0))
