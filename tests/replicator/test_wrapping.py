"""A wrapped optimizer against the plain script: alone bit for bit, replicated as on the joined batch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from murmurate.errors import Refusal
from murmurate.replica.vector import Exchange
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.local_sgd import LocalSGD
from replicator.plain_or_wrapped import OPTIMIZERS, plain, same_bits, script
from replicator.steps import alone, draw, loops, pairs, processes, simulated, tanh_net

STEPS = 8


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alone_it_is_the_plain_script_to_the_bit(optimizer, dtype):
    batches = pairs(STEPS, dtype=dtype)
    expected = script(optimizer, plain, batches, net=tanh_net(dtype))
    result = alone(
        lambda loop: script(optimizer, loop.wrap_optimizer, loop.inputs(batches), net=tanh_net(dtype))
    )
    same_bits(result, expected)


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_alone_with_groups_and_a_scheduler_too(optimizer):
    batches = pairs(STEPS)
    expected = script(optimizer, plain, batches, groups=True, scheduled=True)
    result = alone(lambda loop: script(optimizer, loop.wrap_optimizer, batches, groups=True, scheduled=True))
    same_bits(result, expected)


@pytest.mark.parametrize(  # an optimizer steps by the mean, whatever number of gradients it is of
    ("optimizer", "size"), [*((name, 3) for name in OPTIMIZERS), ("adam", 2), ("adam", 4)]
)
def test_all_reduced_it_is_one_process_on_the_joined_batch(optimizer, size):
    batches = pairs(STEPS)
    expected = script(optimizer, plain, batches, groups=True, scheduled=True)
    result = loops(
        size, lambda r: script(optimizer, r.wrap_optimizer, r.inputs(batches), groups=True, scheduled=True)
    )
    for one in result:
        same_bits(one, result[0])
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def on_processes(loop):
    return script("adam", loop.wrap_optimizer, loop.inputs(pairs(STEPS)))


def test_all_reduced_on_real_processes():
    expected = script("adam", plain, pairs(STEPS))
    for one in loops(2, on_processes, processes):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def sgd_alone(loop):
    return script("sgd", loop.wrap_optimizer, loop.inputs(pairs(4)))


def test_local_sgd_with_a_period_of_one_is_all_reduce_for_plain_sgd():
    one = loops(2, sgd_alone, simulated, LocalSGD(period=1))
    two = loops(2, sgd_alone, simulated, AllReduce())
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


# -- as scripts are ---------------------------------------------------------------------------------


def clear_by_module(net, optimizer):
    net.zero_grad()


def clear_in_place(net, optimizer):
    optimizer.zero_grad(set_to_none=False)


def clear_by_hand(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = None


@pytest.mark.parametrize("clear", [clear_by_module, clear_in_place, clear_by_hand])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_may_be_cleared_in_any_way_and_accumulated(clear, accumulate):
    def run(wrap):
        net = tanh_net()
        optimizer = wrap(torch.optim.Adam(net.parameters(), lr=0.02), net)
        for number, (x, y) in enumerate(pairs(6)):
            if number % accumulate == 0:
                clear(net, optimizer)
            F.mse_loss(net(x), y).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
        return [p.detach() for p in net.parameters()]

    same_bits(alone(lambda loop: run(loop.wrap_optimizer)), run(plain))


@pytest.mark.parametrize("clear", [clear_by_module, clear_in_place])
def test_an_embedding_may_have_sparse_gradients(clear):
    def run(wrap):
        net = nn.Embedding(5, 2, sparse=True)
        with torch.no_grad():
            net.weight.copy_(torch.arange(10.0).view(5, 2))
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for rows in ([0, 1], [1, 3], [4, 0]):
            clear(net, optimizer)
            net(torch.tensor(rows)).pow(2).sum().backward()
            optimizer.step()
        return net.weight.detach()

    torch.testing.assert_close(alone(lambda loop: run(loop.wrap_optimizer)), run(plain))


def test_a_closure_is_called_and_its_loss_returned():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        x, y = pairs(1)[0]

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)], optimizer.last

    losses, last = alone(script)
    assert losses[2] < losses[1] < losses[0]
    assert last == Exchange(3, 1, 0)


def test_after_zero_grad_the_views_are_in_place_and_zero():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        x, y = pairs(1)[0]
        F.mse_loss(net(x), y).backward()
        optimizer.zero_grad()
        optimizer.replica.check()
        return optimizer.replica.grad, [n for n, _ in optimizer.replica.named_views()]

    grad, names = alone(script)
    assert not grad.any()
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    "convert", [lambda net: net.float(), lambda net: net.half(), lambda net: net.to("meta")]
)
def test_a_module_converted_after_wrapping_is_refused_with_the_remedy(convert):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        convert(net)
        optimizer.zero_grad()

    with pytest.raises(
        Refusal, match=r"module of '0.weight' was moved or converted .*Do that first, then make"
    ):
        alone(script)


def convolutions(seed):
    torch.manual_seed(seed)
    body = [nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 7, 3, stride=2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(7 * 4 * 4, 3))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolutional_net_in_float32_alone_is_plain_to_the_bit(channels_last):
    def run(wrap):
        net = convolutions(0)
        if channels_last:
            net = net.to(memory_format=torch.channels_last)
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net)
        for k in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(draw(k, 6, 3, 12, 12).float()), torch.arange(6) % 3).backward()
            optimizer.step()
        return net.state_dict()

    same_bits(alone(lambda loop: run(loop.wrap_optimizer)), run(plain))


# -- several losses and optimizers ------------------------------------------------------------------


def adversaries(wrap, batches):
    """Generator and discriminator; the generator's loss leaves gradients in the discriminator, too."""
    generator, judge = tanh_net(seed=1), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for k, parameter in enumerate(judge.parameters()):
            parameter.copy_(draw(70 + k, *parameter.shape))
    d_optimizer = wrap(torch.optim.Adam(judge.parameters(), lr=0.01, betas=(0.0, 0.9)), judge)
    g_optimizer = wrap(torch.optim.RMSprop(generator.parameters(), lr=0.01), generator)
    for noise, real in batches:
        for _ in range(2):
            d_optimizer.zero_grad()
            fake = generator(noise).detach()
            (F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()).backward()
            d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-judge(generator(noise))).mean().backward()
        g_optimizer.step()
    return [p.detach().clone() for p in [*generator.parameters(), *judge.parameters()]]


def test_two_losses_and_two_optimizers_alone_and_replicated():
    expected = adversaries(plain, pairs(5))
    same_bits(alone(lambda loop: adversaries(loop.wrap_optimizer, pairs(5))), expected)
    for result in loops(3, lambda loop: adversaries(loop.wrap_optimizer, loop.inputs(pairs(5)))):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


# -- clipping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clear", [lambda net, optimizer: optimizer.zero_grad(), lambda net, _: net.zero_grad()]
)
def test_gradients_may_be_clipped_through_the_parameter_groups(clear):
    def script(loop, wrapped):
        net = tanh_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        if wrapped:
            optimizer = loop.wrap_optimizer(optimizer, net)
        for x, y in pairs(4):
            clear(net, optimizer)
            F.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    wrapped, plain = (alone(functools.partial(script, wrapped=w)) for w in (True, False))
    torch.testing.assert_close(wrapped, plain, rtol=1e-12, atol=1e-12)


def test_clipping_acts_on_the_averaged_gradient():
    def clipped():
        net = tanh_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for x, y in pairs(4):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.5), net, clip=0.05)
        for x, y in loop.inputs(pairs(4)):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for result in loops(3, script):
        torch.testing.assert_close(result, clipped(), rtol=1e-12, atol=1e-12)
