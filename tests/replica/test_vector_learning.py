"""The flat vector: the same learning as torch's own per-tensor run."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from laws.nets import drawn, picture_loss, pixels, sgd
from laws.problems import OPTIMIZERS, Problem, halving, same, separate_last_layer
from murmurate.replica.vector import Replica


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("grouped", [False, True])
def test_equals_an_old_fashioned_run_tensor_by_tensor(optimizer, grouped):
    problem = Problem(optimizer=optimizer, grouped=grouped, clip=0.3, scheduled=True)
    ours = problem.alone(10)
    net = problem.net()
    theirs = OPTIMIZERS[optimizer](separate_last_layer(net) if grouped else list(net.parameters()))
    rates = torch.optim.lr_scheduler.LambdaLR(theirs, halving)
    for step in range(10):
        theirs.zero_grad()
        problem.loss(net, [problem.batch(0, step)]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        theirs.step()
        rates.step()
    for name, value in net.named_parameters():
        torch.testing.assert_close(ours.state["params"][name], value.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_and_recurrences_learn_as_without_us(channels_last):
    net, plain = pixels(channels_last), pixels(channels_last)
    replica = Replica("net", net, OPTIMIZERS["rmsprop"])
    theirs = OPTIMIZERS["rmsprop"](list(plain.parameters()))
    for step in range(5):
        replica.descend(picture_loss(net, step))
        theirs.zero_grad()
        picture_loss(plain, step).backward()
        theirs.step()
    replica.check()
    for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)
    for (name, a), b in zip(net.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)


def test_a_strategy_may_read_the_loss_of_its_gradient():
    net, losses = nn.Linear(2, 1), []
    replica = Replica("net", net, OPTIMIZERS["momentum"])
    alone = replica.exchange

    def step(replica):
        losses.append(replica.loss)
        return alone(replica)

    replica.exchange = step
    for factor in (1.0, 3.0):
        replica.descend(factor + net.weight.sum() * 0)
    replica.follow(torch.zeros(len(replica)))
    assert [loss.item() for loss in losses[:2]] == [1.0, 3.0]
    assert not any(loss.requires_grad for loss in losses[:2])  # or the graph would be kept
    assert losses[2] is None, "its gradient has no loss that is known"


def test_tied_weights_are_one_place_in_the_vector():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.down.weight = self.up.weight

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    net, plain = drawn(Tied()), drawn(Tied())
    replica = Replica("net", net, sgd)
    assert len(replica) == 9
    theirs = sgd(plain.parameters())
    for _ in range(3):
        replica.descend(net(torch.ones(1, 3)).square().sum())
        theirs.zero_grad()
        plain(torch.ones(1, 3)).square().sum().backward()
        theirs.step()
    torch.testing.assert_close(net.down.weight, plain.down.weight)
    assert net.down.weight is net.up.weight


def test_a_parameter_without_elements_is_no_lost_view():
    net = nn.ParameterDict({"none": torch.zeros(0, 3), "some": torch.ones(2)})
    replica = Replica("net", net, sgd)
    replica.descend(net["some"].square().sum() + net["none"].sum())
    assert not torch.equal(net["some"], torch.ones(2))


def test_a_recurrent_net_can_be_pickled():
    net = nn.Sequential(nn.LSTM(2, 3))
    Replica("net", net, sgd)
    assert same(pickle.loads(pickle.dumps(net)).state_dict(), net.state_dict())


def test_frozen_parameters_stay_outside_whatever_their_dtype():
    net = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 1).double())
    net[0].requires_grad_(False)
    before = copy.deepcopy(net[0].state_dict())
    replica = Replica("net", net, sgd)
    assert replica.params.dtype == torch.float64
    assert [name for name, _ in replica.named_views()] == ["1.weight", "1.bias"]
    replica.descend(net[1](torch.ones(1, 2, dtype=torch.float64)).sum())
    assert same(dict(net[0].state_dict()), dict(before))


def test_frozen_parameters_compute_in_the_low_precision_that_their_names_ask_for():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    net.register_parameter("count", nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False))
    replica = Replica("net", net, sgd, compute_dtype=torch.bfloat16, in_compute=lambda name: name[0] in "01c")
    kinds = [torch.bfloat16, torch.bfloat16, torch.float32]
    assert [layer.weight.dtype for layer in net[:3]] == kinds
    assert net.count.dtype == torch.int64
    loss = net[2](net[:2](torch.ones(1, 2, dtype=torch.bfloat16)).float()).sum()
    assert replica.descend(loss).round == 1


def test_a_state_has_frozen_parameters_as_it_has_buffers():
    def made():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        net[0].requires_grad_(False)
        return net, Replica("net", net, sgd)

    (net, replica), (other, loaded) = made(), made()
    state = replica.state()
    assert set(state["buffers"]) == {"0.weight", "0.bias"}
    loaded.load(state)
    assert same(dict(other.state_dict()), dict(net.state_dict()))
    before = copy.deepcopy(other[0].state_dict())
    loaded.load(state | {"buffers": {}})  # as saved by versions without them
    assert same(dict(other[0].state_dict()), dict(before))


def test_an_unused_parameter_has_gradient_zero_and_still_decays():
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    drawn(net)
    replica = Replica("net", net, lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1))
    before = net["idle"].weight.detach().clone()
    replica.follow(torch.ones(len(replica)))  # what an earlier loss may have left behind
    after_one = net["idle"].weight.detach().clone()
    torch.testing.assert_close(after_one, before - 0.5 * (1 + 0.1 * before))
    replica.descend(net["used"](torch.ones(1, 2)).sum())
    assert torch.equal(net["idle"].weight.grad, torch.zeros(1, 2))
    torch.testing.assert_close(net["idle"].weight.detach(), after_one * (1 - 0.05))


def test_a_plain_step_goes_the_way_of_each_group():
    net = nn.Linear(2, 1).double()
    groups = [{"params": [net.weight], "maximize": True}, {"params": [net.bias], "lr": 0.5}]
    replica = Replica("net", net, sgd, groups=lambda _: groups)
    replica.grad.fill_(1.0)
    before = replica.params.detach().clone()
    with torch.no_grad():
        replica.step_plainly()
    expected = torch.tensor([0.1, 0.1, -0.5], dtype=torch.float64)
    torch.testing.assert_close(replica.params.detach() - before, expected)


def test_gradients_do_not_pile_up_and_reach_own_parameters_only():
    net, other = drawn(nn.Linear(2, 1)), drawn(nn.Linear(1, 1))
    replica = Replica("net", net, sgd)
    for _ in range(2):
        replica.descend(other(net(torch.ones(1, 2))).sum())
        assert net.bias.grad.tolist() == other.weight.detach().flatten().tolist()
    assert other.weight.grad is None


def test_a_shape_aware_optimizer_gets_the_parameters_themselves():
    """Adafactor keeps one row and one column a matrix, which no flat vector has."""
    net, plain = drawn(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))), None
    plain = copy.deepcopy(net)
    make = functools.partial(torch.optim.Adafactor, lr=0.05)
    replica = Replica("net", net, make, shape_aware=True)
    theirs = make(plain.parameters())
    x = torch.ones(2, 4)
    for _ in range(5):
        replica.descend(net(x).square().sum())
        theirs.zero_grad()
        plain(x).square().sum().backward()
        theirs.step()
    replica.check()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    kept, twin = replica.state(), Replica("net", copy.deepcopy(plain), make, shape_aware=True)
    twin.load(kept)
    for one in (replica, twin):
        one.descend(one.module(x).square().sum())
    assert same(twin.state(), replica.state())
    with pytest.raises(ValueError, match="compute_dtype"):
        Replica("net", plain, make, shape_aware=True, compute_dtype=torch.bfloat16)
