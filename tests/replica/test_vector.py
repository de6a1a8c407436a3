"""The flat vector: its layouts, its states, and low precision."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from laws.nets import drawn, picture_loss, pixels, sgd
from laws.problems import OPTIMIZERS, halving, same, separate_last_layer
from murmurate.replica.vector import Replica

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
