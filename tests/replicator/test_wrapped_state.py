"""Moments and states of wrapped optimizers: shared, saved, and loaded into plain ones."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

from murmurate.strategies.hogwild import Hogwild
from replicator.plain_or_wrapped import OPTIMIZERS, plain, same_bits, script, two_groups
from replicator.steps import alone, loops, pairs, tanh_net


def test_under_hogwild_parameters_and_moments_are_one_storage():
    def script(loop):
        net = tanh_net(seed=loop.rank)
        optimizer = loop.wrap_optimizer(OPTIMIZERS["adamw"](two_groups(net)), net)
        moments = [m["exp_avg"].data_ptr() for m in optimizer.state.values()]
        return optimizer.replica.params.data_ptr(), moments

    one, two = loops(2, script, strategy=Hogwild())
    assert one == two
    assert len(one[1]) == 2


@pytest.mark.parametrize("optimizer", ["nesterov", "adam", "adamw", "rmsprop", "nadam"])
def test_state_travels_between_plain_and_wrapped(optimizer):
    """Four steps plain and four wrapped, and the other way, are eight plain."""
    batches = pairs(8)
    expected = script(optimizer, plain, batches, groups=True)[-1]

    def half(wrap, net, before, data):
        made = wrap(OPTIMIZERS[optimizer](two_groups(net)), net)
        if before is not None:
            made.load_state_dict(before)
        for x, y in data:
            made.zero_grad()
            F.mse_loss(net(x), y).backward()
            made.step()
        return copy.deepcopy(made.state_dict())

    def there(loop):
        net = tanh_net()
        before = half(plain, net, None, batches[:4])
        after = half(loop.wrap_optimizer, net, before, batches[4:])
        return [p.detach() for p in net.parameters()], after

    def back(wrap):
        net = tanh_net()
        before = half(wrap, net, None, batches[:4])
        fresh = tanh_net()
        fresh.load_state_dict(net.state_dict())
        half(plain, fresh, before, batches[4:])
        return [p.detach() for p in fresh.parameters()]

    result, after = alone(there)
    same_bits(result, expected)
    # loading costs torch itself some bits of NAdam's product of momenta
    same_bits(alone(lambda loop: back(loop.wrap_optimizer)), back(plain))
    assert set(after["state"]) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="another model"):
        alone(lambda r: r.wrap_optimizer(torch.optim.Adam(tanh_net().parameters())).load_state_dict(after))


@pytest.mark.parametrize("optimizer", ["adam", "nadam", "asgd"])
def test_state_of_numbers_is_told_from_counters(optimizer):
    """A parameter without a dimension, such as a temperature, has moments of the shape that counters have."""

    def stepped(wrap, reloads):
        torch.manual_seed(3)
        net = torch.nn.Module()
        net.weight = torch.nn.Parameter(torch.randn(4))
        net.log_scale, net.shift = (torch.nn.Parameter(torch.randn(())) for _ in range(2))
        made = wrap(OPTIMIZERS[optimizer](net.parameters()), net)
        for step in range(6):
            if reloads and step == 3:
                made.load_state_dict(copy.deepcopy(made.state_dict()))
            made.zero_grad()
            ((net.weight * net.log_scale.exp()).sum() - net.shift).square().backward()
            made.step()
        return [p.detach().clone() for p in net.parameters()]

    found = alone(lambda loop: stepped(loop.wrap_optimizer, reloads=True))
    torch.testing.assert_close(found, stepped(plain, reloads=False))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_parameters_without_state_begin_with_initial_moments(steps_before):
    """A plain Adam has no moments of parameters that never had a gradient, whatever the loading one has."""
    x, y = pairs(1)[0]

    def script(loop):
        trained = tanh_net()
        plain_optimizer = torch.optim.Adam(trained.parameters())
        first, *others = trained.parameters()
        first.grad = torch.ones_like(first)
        plain_optimizer.step()
        net = tanh_net()
        wrapped = loop.wrap_optimizer(torch.optim.Adam(net.parameters()), net)
        for _ in range(steps_before):
            wrapped.zero_grad()
            F.mse_loss(net(x), y).backward()
            wrapped.step()
        wrapped.load_state_dict(plain_optimizer.state_dict())
        assert others
        return wrapped.state_dict()["state"], plain_optimizer.state_dict()["state"]

    loaded, stored = alone(script)
    assert list(stored) == [0]
    assert torch.equal(loaded[0]["exp_avg"], stored[0]["exp_avg"])
    for index in range(1, 4):
        for key in ("exp_avg", "exp_avg_sq"):
            assert not loaded[index][key].any(), (index, key)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_a_scheduler_changes_beside_the_rate_is_saved(optimizer):
    """OneCycleLR also cycles the momentum, which its own state does not have."""

    def script(loop, saved=None, steps=8):
        net = tanh_net()
        made = functools.partial(torch.optim.SGD, momentum=0.9) if optimizer == "sgd" else torch.optim.Adam
        made = loop.wrap_optimizer(made(net.parameters(), lr=0.1), net)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=8)
        batches = list(pairs(8))[:steps]
        if saved is not None:
            loop.load(saved[0])
            loop.resumed()
            scheduler.load_state_dict(saved[1])
            batches = batches[4:]
        for x, y in batches:
            made.zero_grad()
            F.mse_loss(net(x), y).backward()
            made.step()
            scheduler.step()
        return copy.deepcopy((loop.state(), scheduler.state_dict())), net.state_dict()

    whole = alone(script)[1]
    half = alone(lambda loop: script(loop, steps=4))[0]
    same_bits(alone(lambda loop: script(loop, half))[1], whole)


def test_loading_an_optimizers_state_leaves_the_parameters_to_others():
    """Under hogwild another replica may step meanwhile."""

    def script(loop):
        optimizer = loop.wrap_optimizer(torch.optim.Adam(tanh_net().parameters()))
        saved, replica = optimizer.state_dict(), optimizer.replica
        before, read_state = replica.params.detach().clone(), replica.state

        def state_before_a_step():
            state = read_state()
            replica.params.detach().add_(1.0)
            return state

        replica.state = state_before_a_step
        optimizer.load_state_dict(saved)
        return replica.params.detach() - before

    assert bool((alone(script) > 0.5).all())


def test_a_rate_that_is_a_tensor_is_saved_by_its_value():
    """A scheduler writes into the tensor."""

    def script(loop):
        net = tanh_net()
        made = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5, dtype=torch.float64))
        made = loop.wrap_optimizer(made, net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        rates, saved, of_torch = [], loop.state(), copy.deepcopy(made.state_dict())
        for load in (lambda: loop.load(saved), lambda: made.load_state_dict(of_torch)):
            for _ in range(2):  # the second time after what was loaded has changed
                made.step()
                scheduler.step()
                load()
                rates.append(float(made.param_groups[0]["lr"]))
        return rates

    assert alone(script) == [0.5] * 4
