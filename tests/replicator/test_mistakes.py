"""Scripts with a mistake that would otherwise be silent: it is refused, or a warning names it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from murmurate.errors import Refusal
from murmurate.launch.script import run
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.elastic import Elastic
from murmurate.strategies.gala import GALA
from murmurate.strategies.local_sgd import LocalSGD
from replicator.steps import alone, draw, loops, pairs, tanh_net, trained


def warned(function, words):
    """What ``function`` returns, and the messages of its warnings that contain ``words``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(one.message) for one in caught if words in str(one.message)]


def test_a_module_in_place_of_the_optimizer_is_refused():
    with pytest.raises(Refusal, match=r"Sequential is no optimizer: call wrap_optimizer\(optimizer, mod"):
        loops(1, lambda loop: loop.wrap_optimizer(tanh_net(torch.float32)))


# -- frozen parameters, schedulers -------------------------------------------------------------------


def test_a_parameter_that_is_frozen_after_wrapping_is_refused_and_may_be_frozen_between_steps():
    def script(loop, again):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1), net)
        net[2].weight.requires_grad_(False)
        optimizer.zero_grad()
        net[2].weight.requires_grad_(again)
        F.mse_loss(net(draw(0, 2, 4)), draw(1, 2, 3)).backward()
        optimizer.step()

    with pytest.raises(Refusal, match=r"'2.weight' was frozen \(requires_grad_\(False\)\) after"):
        alone(lambda loop: script(loop, False))
    alone(lambda loop: script(loop, True))


def test_a_scheduler_made_before_wrapping_warns_of_nothing():
    def script(loop):
        net = tanh_net()
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = loop.wrap_optimizer(plain, net)
        trained(loop, net, optimizer, loop.inputs(pairs(2)), scheduler.step)
        return optimizer.param_groups[0]["lr"]

    rates, told = warned(lambda: loops(2, script), "lr_scheduler.step()")
    assert rates == [0.025, 0.025]
    assert told == []


@pytest.mark.parametrize("strategy", [DPSGD(threads=1), Elastic()])
def test_where_replicas_step_themselves_beside_a_centre_schedulers_work(strategy):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.0)
        trained(loop, net, optimizer, loop.inputs(pairs(1)), scheduler.step)
        before = optimizer.replica.values().clone()
        trained(loop, net, optimizer, pairs(2), scheduler.step)
        return bool(torch.equal(before, optimizer.replica.values()))

    assert loops(2, script, strategy=strategy)[0], "a rate of 0 moves nothing"


# -- nothing exchanged, and an early end ------------------------------------------------------------


def test_a_script_that_exchanges_nothing_is_warned_once():
    def plain(loop):
        net = tanh_net()
        return trained(loop, net, torch.optim.SGD(net.parameters(), lr=0.1), loop.inputs(pairs(2)))

    _, told = warned(lambda: loops(3, plain), "nothing was exchanged")
    assert len(told) == 1
    assert "replicator.wrap_optimizer(optimizer, model)" in told[0]
    for size, script in ((1, plain), (2, lambda loop: loop.sum(1)), (2, lambda loop: wrapped(loop))):
        assert warned(lambda n=size, s=script: loops(n, s), "nothing was exchanged")[1] == []


def wrapped(loop):
    net = tanh_net()
    loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)


def uneven(loop):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        trained(loop, net, optimizer, pairs(3 if loop.rank == 1 else 12))
        return [str(one.message) for one in caught if "returned from main" in str(one.message)]


def even(loop):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        trained(loop, net, optimizer, loop.inputs(pairs(12)))
        return [str(one.message) for one in caught if "returned from main" in str(one.message)]


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [(Elastic(period=5), "period"), (DPSGD(batch=2, local_updates=3), "local_updates or batch")],
)
@pytest.mark.parametrize("steps", [0, 4, 12])
def test_updates_that_never_reached_the_centre_are_told(strategy, fields, steps):
    def script(loop):
        net = tanh_net(torch.float32)
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        trained(loop, net, optimizer, loop.inputs(pairs(steps, dtype=torch.float32)))

    _, told = warned(lambda: run(script, replicas=2, strategy=strategy, launcher="inline"), "no update of")
    assert len(told) == (steps == 4)
    for message in told:
        assert message.endswith(f"Make more steps, or the strategy's {fields} smaller.")


def test_a_replica_that_returns_early_is_told_by_one_of_the_others():
    (told,), silent = run(uneven, replicas=2, strategy="all-reduce")
    assert told.startswith("replica 1 after 3 steps returned from main")
    assert "replicator.inputs" in told
    assert silent == []
    assert run(even, replicas=2) == [[], []]


def one_batch_skipped(loop, skipping=1):
    net = tanh_net()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    batches = list(loop.inputs(pairs(6)))
    trained(loop, net, optimizer, batches[1:] if loop.rank == skipping else batches)


@pytest.mark.parametrize("skipping", [0, 1, 2, None])
def test_a_step_that_one_replica_leaves_out_is_told_at_the_end(skipping):
    def script(loop):
        one_batch_skipped(loop, skipping)

    _, told = warned(lambda: loops(3, script, strategy=LocalSGD(period=4)), "steps")
    assert (len(told) in (1, 2)) if skipping is not None else told == []
    assert all("5 steps" in one or "made 5" in one for one in told)
    assert warned(lambda: loops(3, script, strategy=GALA()), "steps")[1] == []


# -- optimizers that differ, gradients that are not finite ------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p, r: torch.optim.SGD(p, lr=0.1 + r),
            "lr of group 0 is 0.1 on replica 0 and 1.1 on",
        ),
        (lambda p, r: (torch.optim.SGD, torch.optim.Adam)[r](p, lr=0.1), "the class is SGD on.* and Adam on"),
        (lambda p, r: torch.optim.SGD([{"params": p, "momentum": 0.5 * r}], lr=0.1), "momentum of group 0"),
        (lambda p, r: torch.optim.SGD(p, lr=torch.tensor(0.5 + r)), "lr of group 0 is 0.5 on"),
    ],
)
def test_where_gradients_are_averaged_optimizers_that_differ_are_refused(make, words):
    def script(loop, wraps=True):
        net = tanh_net()
        if wraps:
            loop.wrap_optimizer(make(list(net.parameters()), loop.rank), net)
        else:
            loop.replicate("net", net, lambda parameters: make(parameters, loop.rank))

    with pytest.raises(Refusal, match=f"different optimizers for 'optimizer 0': {words}"):
        loops(2, script)
    with pytest.raises(Refusal, match=f"different optimizers for 'net': {words}"):
        loops(2, lambda loop: script(loop, False))
    for strategy in (LocalSGD(), GALA()):
        loops(2, script, strategy=strategy)


def test_optimizers_may_differ_in_what_chooses_an_implementation():
    def script(loop):
        net = tanh_net()
        loop.wrap_optimizer(torch.optim.Adam(net.parameters(), foreach=bool(loop.rank)), net)

    loops(2, script)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2)])
def test_the_replica_whose_gradient_is_not_finite_is_named_once(strategy):
    def script(loop, bad):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for step, (x, y) in enumerate(loop.inputs(pairs(6))):
            optimizer.zero_grad()
            factor = float("nan") if bad and (step, loop.rank) == (3, 1) else 1.0
            (factor * F.mse_loss(net(x), y)).backward()
            optimizer.step()

    (told,) = warned(lambda: loops(3, lambda loop: script(loop, True), strategy=strategy), "not finite")[1]
    assert told.startswith("the gradient of 'optimizer 0' on replica 1 is not finite")
    assert "at its update 3" in told
    assert warned(lambda: loops(3, lambda loop: script(loop, False), strategy=strategy), "finite")[1] == []


def test_a_replica_with_complex_parameters_learns_and_its_nan_is_named():
    def script(loop, factor):
        weight = nn.Parameter(torch.ones(3, dtype=torch.complex128))
        optimizer = loop.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
        (factor * (weight * (1 + loop.rank)).abs().pow(2).sum()).backward()
        optimizer.step()
        return weight.detach().clone()

    for one in loops(2, lambda loop: script(loop, 1.0)):
        torch.testing.assert_close(one, torch.full((3,), 0.5 + 0j, dtype=torch.complex128))
    assert warned(lambda: loops(2, lambda loop: script(loop, float("nan"))), "is not finite")[1]
