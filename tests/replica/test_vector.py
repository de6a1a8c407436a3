"""The flat vector: the same learning as torch's own per-tensor run, in every layout and precision."""

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

# -- the same learning --------------------------------------------------------------------------------


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


# -- layout -------------------------------------------------------------------------------------------


def test_parameters_are_views_of_one_vector_in_their_order():
    net = drawn(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    replica = Replica("net", net, sgd)
    assert torch.equal(replica.params.detach(), expected)
    with torch.no_grad():
        replica.params.copy_(torch.arange(13.0))
    assert net[0].weight.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert net[1].bias.tolist() == [12.0]
    replica.grad.copy_(torch.arange(13.0))
    assert net[0].bias.grad.tolist() == [6.0, 7.0, 8.0]


def test_each_group_is_a_slice_with_its_own_settings():
    net = drawn(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    replica = Replica("net", net, sgd, groups=separate_last_layer)
    assert [name for name, _ in replica.named_views()] == ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert [len(g["params"]) for g in replica.optimizer.param_groups] == [1, 1]
    before = replica.params.detach().clone()
    replica.follow(torch.ones(13))
    expected = before.clone()
    expected[:4] -= 0.03
    expected[4:] -= 0.1 * (1 + 0.02 * before[4:])
    torch.testing.assert_close(replica.params.detach(), expected)


def test_channels_last_weights_keep_their_strides_and_their_names_their_order():
    plain, strided = Replica("net", pixels(), sgd), Replica("net", pixels(channels_last=True), sgd)
    net = strided.module
    assert net.first.weight.is_contiguous(memory_format=torch.channels_last)
    assert net.first.weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(plain.params, strided.params)
    for (name, a), (other, b) in zip(plain.named_views(), strided.named_views(), strict=True):
        assert name == other
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", ["momentum", "rmsprop", "adam", "amsgrad"])
@pytest.mark.parametrize("last_first", [False, True])
def test_state_goes_from_one_memory_layout_to_the_other(optimizer, last_first):
    """Saved contiguous and loaded channels-last, or back: the same learner, in logical order."""
    one = Replica("net", pixels(last_first), OPTIMIZERS[optimizer])
    for step in range(4):
        one.descend(picture_loss(one.module, step))
    kept = one.state()
    other = Replica("net", pixels(not last_first, seed=8), OPTIMIZERS[optimizer])
    other.load(kept)
    assert same(other.state(), kept)
    for replica in (one, other):
        replica.descend(picture_loss(replica.module, 4))
    for (name, a), (_, b) in zip(one.named_views(), other.named_views(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)


def test_state_holds_clones_with_names_buffers_and_clock():
    replica = Replica("net", pixels(), OPTIMIZERS["adam"])
    replica.descend(picture_loss(replica.module, 0))
    kept = replica.state()
    assert kept["clock"] == 1
    assert kept["params"]["first.weight"].shape == (4, 3, 3, 3)
    assert kept["buffers"]["norm.num_batches_tracked"].item() == 1
    assert kept["optimizer"]["0.exp_avg"]["lstm.weight_ih_l0"].shape == (20, 8)
    snapshot = copy.deepcopy(kept)
    replica.descend(picture_loss(replica.module, 1))
    assert same(kept, snapshot)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("optimizer", ["nesterov", "centered", "adamw"])
def test_every_kind_of_weight_resumes_to_the_bit(optimizer, channels_last):
    make = functools.partial(
        Replica,
        "net",
        make_optimizer=OPTIMIZERS[optimizer],
        clip=0.5,
        schedule=halving,
        groups=lambda m: [
            {"params": [*m.lstm.parameters(), *m.head.parameters()], "lr": 0.01},
            {"params": [*m.first.parameters(), *m.norm.parameters(), *m.second.parameters()]},
        ],
    )
    one = make(module=pixels(channels_last))
    for step in range(4):
        one.descend(picture_loss(one.module, step))
    kept = one.state()
    other = make(module=pixels(channels_last, seed=5))
    other.load(kept)
    for replica in (one, other):
        for step in range(4, 8):
            replica.descend(picture_loss(replica.module, step))
    assert same(other.state(), one.state())
    assert torch.equal(other.params, one.params)


def test_a_rate_that_is_a_tensor_keeps_its_schedule_in_a_resume():
    def make():
        return Replica(
            "net",
            drawn(nn.Linear(2, 1)),
            lambda p: torch.optim.SGD(p, lr=torch.tensor(0.5)),
            schedule=halving,
        )

    one, other = make(), make()
    for _ in range(3):
        one.follow(torch.ones(3))
    other.load(one.state())
    for replica in (one, other):
        replica.follow(torch.ones(3))
    assert torch.equal(other.params, one.params)


def test_settings_from_a_file_are_saved_again():
    """In a file the pair of betas is a list."""
    make = functools.partial(Replica, "net", make_optimizer=OPTIMIZERS["adamw"])
    kept = make(module=pixels(False)).state()
    kept["settings"][0]["betas"] = [0.8, 0.9]
    other = make(module=pixels(False))
    other.load(kept)
    assert other.state()["settings"][0]["betas"] == (0.8, 0.9)


def test_a_checkpoint_without_settings_leaves_the_optimizer_its_parameters():
    replica = Replica("net", drawn(nn.Linear(2, 1)), OPTIMIZERS["adamw"])
    kept = replica.state()
    replica.load({k: x for k, x in kept.items() if k != "settings"})
    assert replica.optimizer.param_groups[0]["params"] == [replica.params]
    assert replica.state()["settings"] == kept["settings"]


def test_the_implementation_of_an_optimizer_is_not_that_of_the_saved_one():
    """It may need a device that is not here."""
    replica = Replica("net", drawn(nn.Linear(2, 1)), torch.optim.Adam)
    kept = replica.state()
    kept["settings"][0] |= {"capturable": True, "eps": 1e-3}
    replica.load(kept)
    replica.follow(torch.ones(3))
    (group,) = replica.optimizer.param_groups
    assert (group["capturable"], group["eps"]) == (False, 1e-3)


def test_a_foreign_checkpoint_is_refused_by_the_parameters_name_and_changes_nothing():
    kept = Replica("net", nn.Sequential(nn.Linear(2, 3)), sgd).state()
    replica = Replica("net", drawn(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))), sgd)
    before = replica.params.detach().clone()
    with pytest.raises(ValueError, match=r"nothing for parameter '1.weight'"):
        replica.load(kept)
    other = Replica("net", nn.Sequential(nn.Linear(2, 4)), sgd).state()
    with pytest.raises(ValueError, match=r"shape \(4, 2\) for parameter '0.weight' of shape \(3, 2\)"):
        replica.load(other)
    assert torch.equal(replica.params, before)
    normed = Replica("net", drawn(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))), sgd)
    before = normed.params.detach().clone()
    with pytest.raises(ValueError, match=r"nothing for buffer '1.running_mean' of shape \(3,\)"):
        normed.load(kept)
    one = Replica("net", nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(1, affine=False)), sgd).state()
    with pytest.raises(ValueError, match=r"shape \(1,\) for buffer '1.running_mean'"):
        normed.load(one)
    assert torch.equal(normed.params, before)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda m: [{"params": [m.weight]}], "exactly one"),
        (lambda m: [{"params": [m.weight, m.bias]}, {"params": [m.bias]}], "exactly one"),
    ],
)
def test_groups_must_hold_each_parameter_once(groups, words):
    with pytest.raises(ValueError, match=words):
        Replica("net", nn.Linear(2, 1), sgd, groups=groups)


def test_one_vector_has_one_dtype_and_something_to_learn():
    with pytest.raises(ValueError, match="one dtype"):
        Replica("net", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), sgd)
    with pytest.raises(ValueError, match="requires a gradient"):
        Replica("net", nn.Linear(2, 2).requires_grad_(False), sgd)


# -- low precision --------------------------------------------------------------------------------------


class TestBfloat16:
    def replica(self, seed=0, **options):
        net = drawn(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), seed)
        return Replica(
            "net",
            net,
            OPTIMIZERS["adam"],
            compute_dtype=torch.bfloat16,
            in_compute=lambda name: name.startswith("0."),
            **options,
        )

    def loss(self, replica):
        net = replica.module
        return net[1](net[0](torch.ones(2, 3, dtype=torch.bfloat16)).float()).square().sum()

    def test_named_parameters_are_rounded_copies_and_the_vector_is_not(self):
        replica = self.replica()
        net = replica.module
        exact = drawn(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        assert (net[0].weight.dtype, net[1].weight.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(net[0].weight, exact[0].weight.bfloat16())
        assert torch.equal(dict(replica.named_views())["0.weight"], exact[0].weight)

    def test_the_copy_is_refreshed_after_every_step_and_the_gradient_collected(self):
        replica = self.replica()
        for _ in range(3):
            low = replica.module[0]
            (gradient,) = torch.autograd.grad(self.loss(replica), low.weight)
            replica.descend(self.loss(replica))
            views = dict(replica.named_views())
            assert torch.equal(low.weight, views["0.weight"].bfloat16())
            assert torch.equal(dict(replica.named_views(replica.grad))["0.weight"], gradient.float())
            assert torch.equal(replica.module[1].weight, views["1.weight"])
            replica.check()

    def test_small_steps_add_up_in_the_vector(self):
        """Steps below half a bfloat16 ulp of 1 would vanish one by one."""
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        replica = Replica("n", net, lambda p: torch.optim.SGD(p, lr=1.0), compute_dtype=torch.bfloat16)
        for _ in range(32):
            replica.follow(torch.tensor([-(2.0**-10)]))
        assert replica.params.item() == 1.03125
        assert net.weight.item() == 1.03125

    def test_resumes_to_the_bit_and_keeps_what_bfloat16_cannot_say(self):
        one, other = self.replica(), self.replica(seed=3)
        for _ in range(3):
            one.descend(self.loss(one))
        kept = one.state()
        assert kept["params"]["0.weight"].dtype == torch.float32
        other.load(kept)
        for replica in (one, other):
            replica.descend(self.loss(replica))
        assert same(other.state(), one.state())

    def test_check_watches_the_copy_too(self):
        replica = self.replica()
        replica.module[0].weight.data = replica.module[0].weight.data.clone()
        with pytest.raises(RuntimeError, match=r"values of parameter '0.weight'"):
            replica.check()
