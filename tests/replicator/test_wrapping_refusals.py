"""What cannot be wrapped is refused with the remedy, and stays as it was."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from murmurate.errors import Refusal
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.strategies.solo import Solo
from replicator.plain_or_wrapped import same_bits
from replicator.steps import alone, loops, pairs, tanh_net


def stepped(net):
    optimizer = torch.optim.Adam(net.parameters())
    F.mse_loss(net(torch.ones(1, 4, dtype=torch.float64)), torch.ones(1, 3, dtype=torch.float64)).backward()
    optimizer.step()
    return optimizer


def mixed(net):
    return torch.optim.SGD([net[0].weight, nn.Parameter(torch.ones(2))], lr=0.1)


def frozen(net):
    net[0].weight.requires_grad_(False)
    return torch.optim.SGD(net.parameters(), lr=0.1)


class DecaysMatrices(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + p * (p.ndim > 1), alpha=-group["lr"])


class DecaysAll(DecaysMatrices):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + p, alpha=-group["lr"])


class TakesAnother(DecaysMatrices):
    def __init__(self, params, inner):
        super().__init__(params)
        self.inner = inner


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (stepped, "has stepped already. Wrap it first"),
        (lambda net: DecaysMatrices(net.parameters()), "DecaysMatrices does not step a flat vector"),
        (lambda net: TakesAnother(net.parameters(), None), "TakesAnother cannot be made again"),
        (
            lambda net: torch.optim.LBFGS(net.parameters()),
            "LBFGS computes the loss several times in one step",
        ),
        (lambda net: torch.optim.SparseAdam(net.parameters()), "Use Adam, whose step is dense"),
        (lambda net: torch.optim.Adafactor(net.parameters()), "shape_aware=True"),
        (mixed, "more than one dtype"),
        (frozen, "require no gradient"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_and_stays_as_it_was(make, words):
    net = tanh_net()
    optimizer = make(net)
    before = [id(p) for g in optimizer.param_groups for p in g["params"]]
    with pytest.raises(Refusal, match=words):
        alone(lambda loop: loop.wrap_optimizer(optimizer))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == before


@pytest.mark.parametrize("clip", [-1.0, 0, math.nan, "1"])
def test_a_clip_that_is_not_above_0_is_refused(clip):
    def script(loop):
        net = tanh_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        parameter = next(net.parameters())
        with pytest.raises(Refusal, match=r"clip is .+give the largest norm of the gradient"):
            loop.wrap_optimizer(optimizer, net, clip=clip)
        assert optimizer.param_groups[0]["params"][0] is parameter
        with pytest.raises(Refusal, match="clip is"):
            loop.replicate_over_devices("net", net, lambda p: torch.optim.SGD(p, lr=0.1), clip=clip)

    alone(script)


def test_an_optimizer_of_ones_own_that_steps_all_parameters_alike_is_wrapped():
    def script(loop, wrapped):
        net = tanh_net()
        optimizer = DecaysAll([{"params": []}, {"params": net.parameters()}])
        if wrapped:
            optimizer = loop.wrap_optimizer(optimizer, net)
        for x, y in pairs(3):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    torch.testing.assert_close(
        alone(lambda loop: script(loop, True)), alone(lambda loop: script(loop, False)), rtol=0, atol=0
    )


def refused(words, script, size=1):
    with pytest.raises(Refusal, match=words):
        loops(size, script, strategy=Solo() if size == 1 else AllReduce())


def test_an_optimizer_is_wrapped_once():
    def twice(loop):
        net = tanh_net()
        plain_one = torch.optim.SGD(net.parameters(), lr=0.1)
        wrapped = loop.wrap_optimizer(plain_one, net)
        for one in (plain_one, wrapped):
            with pytest.raises(Refusal, match="wrapped already: wrap each optimizer once"):
                loop.wrap_optimizer(one, net)
        loop.wrap_optimizer(torch.optim.Adam(net[0].parameters()), net)

    refused("Adam has parameters that another wrapped optimizer steps", twice)


def test_an_optimizer_without_parameters_is_refused():
    def script(loop):
        loop.wrap_optimizer(torch.optim.SGD([{"params": []}], lr=0.1), tanh_net())

    refused("SGD has no parameters: give it", script)


def test_an_optimizer_of_another_modules_parameters_is_refused():
    def script(loop):
        net, extra = tanh_net(), nn.Parameter(torch.ones(2, dtype=torch.float64))
        loop.wrap_optimizer(torch.optim.SGD([*net.parameters(), extra], lr=0.1), net)

    refused(
        r"1 of the 5 parameters of SGD are not parameters of the Sequential.*leave out the module", script
    )


@pytest.mark.parametrize("given", [lambda net: [net], lambda net: net.parameters(), lambda _: "generator"])
def test_what_is_no_module_is_refused_as_one(given):
    def script(loop):
        net = tanh_net()
        with pytest.raises(Refusal, match=r"is a (list|generator|str): give the module that has"):
            loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), given(net))

    alone(script)


def test_steps_and_groups_of_the_optimizer_inside_are_refused():
    def steps(loop):
        optimizer = torch.optim.SGD(tanh_net().parameters(), lr=0.1)
        loop.wrap_optimizer(optimizer)
        optimizer.step()

    def adds(loop):
        optimizer = torch.optim.SGD(tanh_net().parameters(), lr=0.1)
        wrapped = loop.wrap_optimizer(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        wrapped.step()

    refused(r"Keep what wrap_optimizer returns", steps, size=2)
    refused("a parameter group was added after wrapping", adds)


def test_a_wrapped_optimizer_is_not_copied_but_its_module_is():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for copier in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(Refusal, match=r"cannot be copied or pickled.*state_dict\(\)"):
                copier(optimizer)
        average = copy.deepcopy(net)
        before = [p.detach().clone() for p in average.parameters()]
        F.mse_loss(
            net(torch.ones(2, 4, dtype=torch.float64)), torch.ones(2, 3, dtype=torch.float64)
        ).backward()
        optimizer.step()
        return [p.detach() for p in average.parameters()], before, [p.detach() for p in net.parameters()]

    kept, before, stepped = alone(script)
    same_bits(kept, before)
    assert not torch.equal(stepped[0], before[0])


def test_no_group_is_added_to_a_wrapped_optimizer():
    def script(loop):
        optimizer = loop.wrap_optimizer(torch.optim.SGD(tanh_net().parameters(), lr=0.1))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    with pytest.raises(Refusal, match="add the group before wrapping"):
        alone(script)


def test_all_are_wrapped_before_the_first_step():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        optimizer.step()
        loop.wrap_optimizer(torch.optim.SGD(tanh_net().parameters(), lr=0.1))

    with pytest.raises(Refusal, match="comes after the first step"):
        loops(2, script)


def scheduled(loop, how):
    net = tanh_net()
    factor = (lambda clock: 0.5 ** (clock // 2)) if how == "schedule" else None
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, schedule=factor)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2) if how == "torch" else None
    for x, y in loop.inputs(pairs(6)):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    loop.finish(30.0)
    return loop.agreed()


def test_where_the_centre_steps_a_scheduler_must_be_a_schedule():
    with pytest.raises(Refusal, match="Give wrap_optimizer a schedule"):
        loops(3, lambda loop: scheduled(loop, "torch"), strategy=ParameterServer())
    result = loops(2, lambda loop: scheduled(loop, "schedule"), strategy=ParameterServer())
    net = tanh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for x, y in pairs(6):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    # one client that waits for each pull is the plain script
    torch.testing.assert_close(result[0], dict(net.state_dict()), rtol=1e-12, atol=1e-12)
