"""The flat vector: lost views are detected, non-finite numbers change nothing, memory can be replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from covering import pairwise
from laws.nets import drawn, picture_loss, pixels, sgd
from laws.problems import OPTIMIZERS, Problem, same, separate_last_layer
from murmurate.replica.vector import Exchange, NotFinite, Replica

# -- what can come loose ------------------------------------------------------------------------------


def loose_by_zero_grad(replica):
    replica.module.zero_grad(set_to_none=True)


def loose_by_dtype(replica):
    replica.module[1].to(torch.float64)


def loose_by_reassignment(replica):
    replica.module[1].weight = nn.Parameter(replica.module[1].weight.detach().clone())


def loose_by_data(replica):
    replica.module[1].weight.data = torch.zeros(1, 3)


def loose_by_assigned_load(replica):
    replica.module.load_state_dict(replica.module.state_dict(), assign=True)
    replica.module[0].weight = nn.Parameter(torch.zeros(3, 2))


def loose_by_gradient(replica):
    replica.module[1].weight.grad = torch.zeros(1, 3)


def in_two(net):
    return [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.2}]


@pytest.mark.parametrize(
    ("cause", "what"),
    [
        (loose_by_zero_grad, "gradient of parameter '0.weight'"),
        (loose_by_dtype, "values of parameter '1.weight'"),
        (loose_by_reassignment, "values of parameter '1.weight'"),
        (loose_by_data, "values of parameter '1.weight'"),
        (loose_by_assigned_load, "values of parameter '0.weight'"),
        (loose_by_gradient, "gradient of parameter '1.weight'"),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_check_finds_what_came_loose_and_names_it(cause, what, grouped):
    net = drawn(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    replica = Replica("net", net, sgd, groups=in_two if grouped else None)
    replica.descend(net(torch.ones(1, 2)).sum())
    replica.check()
    cause(replica)
    with pytest.raises(RuntimeError, match=what) as result:
        replica.check()
    assert "'net'" in str(result.value)
    assert "replica.descend" in str(result.value)


@pytest.mark.parametrize("grouped", [False, True])
def test_check_finds_an_optimizer_that_lost_its_gradient(grouped):
    net = drawn(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    replica = Replica("net", net, sgd, groups=separate_last_layer if grouped else None)
    replica.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="zero_grad"):
        replica.check()


@pytest.mark.parametrize(
    ("shape_aware", "clear", "words"),
    [
        (False, lambda r: r.optimizer.zero_grad(), "the optimizer of replica 'net' lost its gradient"),
        (True, lambda r: r.module.zero_grad(), "the gradient of parameter 'weight' is no longer a view"),
    ],
)
def test_gradients_that_were_cleared_between_two_steps_are_found(shape_aware, clear, words):
    """The optimizer would leave the parameters as they are."""
    net = drawn(nn.Linear(2, 1))
    replica = Replica("net", net, sgd, shape_aware=shape_aware)
    replica.descend(net(torch.ones(1, 2)).sum())
    clear(replica)
    with pytest.raises(RuntimeError, match=words):
        replica.descend(net(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("grouped", [False, True])
def test_check_finds_a_vector_that_was_exchanged_for_another(grouped):
    """What a strategy must not do: then the module no longer sees what it agreed on."""
    net = drawn(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    replica = Replica("net", net, sgd, groups=separate_last_layer if grouped else None)
    replica.params.data = replica.params.data.lerp(torch.zeros(13), 0.5)
    with pytest.raises(RuntimeError, match=r"in place.*rebind"):
        replica.check()


@pytest.mark.parametrize(
    "harmless",
    [
        lambda r: r.module.load_state_dict(r.module.state_dict()),
        lambda r: r.module.zero_grad(set_to_none=False),
        lambda r: r.module.to(torch.float32),
        lambda r: r.module.requires_grad_(True),
        lambda r: r.load(r.state()),
    ],
)
def test_check_is_content_with_what_keeps_the_views(harmless):
    net = drawn(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    replica = Replica("net", net, sgd)
    harmless(replica)
    replica.check()
    before = replica.params.detach().clone()
    replica.descend(net(torch.ones(1, 2)).sum())
    assert not torch.equal(before, replica.params)


# -- what is refused before anything changes ------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_stops_before_anything_changed(value):
    problem = Problem(optimizer="adam")
    replica = Replica("critic", problem.net(), OPTIMIZERS["adam"])
    problem._run(replica, 3, (0,))
    before, gradient = replica.state(), replica.grad.clone()
    loss = problem.loss(replica.module, [problem.batch(0, 3)])
    with pytest.raises(NotFinite, match=r"'critic'.*update 3"):
        replica.descend(loss * value)
    assert same(replica.state(), before)
    assert torch.equal(replica.grad, gradient)


def test_a_gradient_that_is_not_finite_stops_before_the_parameters_changed():
    """sqrt at 0 has a finite value and an infinite slope."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    replica = Replica("root", net, OPTIMIZERS["adam"], clip=1.0)
    with pytest.raises(NotFinite, match=r"'root'.*update 0"):
        replica.descend(net(torch.ones(1, 1)).sqrt().sum())
    assert net.weight.item() == 0.0
    assert replica.clock == 0


def test_follow_wants_the_vectors_shape():
    replica = Replica("net", nn.Linear(2, 1), sgd)
    with pytest.raises(ValueError, match=r"\(2,\), the vector \(3,\)"):
        replica.follow(torch.ones(2))
    assert replica.clock == 0


# -- update -----------------------------------------------------------------------------------------


def test_follow_keeps_no_graph_of_the_gradient():
    """One by ``create_graph=True`` has a graph, with all activations in it."""
    replica = Replica("net", nn.Linear(1, 1), sgd)
    replica.follow(torch.ones(2, requires_grad=True) * 2)
    assert replica.grad.tolist() == [2.0, 2.0]
    assert not replica.grad.requires_grad


def test_clipping_uses_the_norm_of_the_whole_vector_as_torch_does():
    net = nn.Linear(2, 1)
    replica = Replica("net", net, lambda p: torch.optim.SGD(p, lr=1.0), clip=1.0)
    before = replica.params.detach().clone()
    replica.follow(torch.tensor([3.0, 0.0, 4.0]))
    assert replica.gradient_norm.item() == 5.0
    torch.testing.assert_close(before - replica.params.detach(), torch.tensor([0.6, 0.0, 0.8]))
    before = replica.params.detach().clone()
    replica.follow(torch.tensor([0.3, 0.0, 0.4]))  # short enough: not a bit of it is touched
    assert torch.equal(replica.params.detach(), before - torch.tensor([0.3, 0.0, 0.4]))


def test_a_schedule_scales_each_groups_own_rate_by_the_steps_taken():
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    replica = Replica(
        "net",
        net,
        lambda p: torch.optim.SGD(p, lr=1.0),
        groups=lambda m: [{"params": m[0].parameters()}, {"params": m[1].parameters(), "lr": 0.5}],
        schedule=lambda k: 1.0 / (1 + k),
    )
    for expected in ([1.0, 0.5], [0.5, 0.25], [1 / 3, 1 / 6]):
        replica.follow(torch.zeros(2))
        assert [g["lr"] for g in replica.optimizer.param_groups] == pytest.approx(expected)
    replica.count_steps_by(lambda: 9)
    replica.follow(torch.zeros(2))
    assert [g["lr"] for g in replica.optimizer.param_groups] == pytest.approx([0.1, 0.05])


def test_measuring_a_step_tells_how_far_it_went_and_along_what():
    replica = Replica("net", nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.5))
    replica.measure = True
    replica.follow(torch.tensor([3.0, 4.0]))
    assert replica.update_norm.item() == pytest.approx(2.5)
    assert replica.own_gradient.tolist() == [3.0, 4.0]
    replica.follow(torch.tensor([0.0, 1.0]))
    assert replica.update_norm.item() == pytest.approx(2.5)  # not asked again


def test_a_plain_step_is_measured_once_too():
    def exchange(replica):
        replica.step_plainly()
        return Exchange(0, 1, 1)

    replica = Replica("net", nn.Linear(1, 1), sgd)
    replica.exchange, replica.measure = exchange, True
    for gradient in ([3.0, 4.0], [0.0, 1.0]):
        replica.follow(torch.tensor(gradient))
    assert replica.own_gradient.tolist() == [3.0, 4.0]


def test_alone_a_replica_agrees_with_itself_at_every_step():
    replica = Replica("net", nn.Linear(1, 1), sgd)
    assert replica.follow(torch.zeros(2)) == Exchange(1, 1, 0)
    assert replica.follow(torch.zeros(2)) == Exchange(2, 1, 0)
    assert replica.clock == 2


def test_a_strategy_may_leave_the_update_out():
    replica = Replica("net", nn.Linear(1, 1), OPTIMIZERS["adam"])
    replica.exchange = lambda r: Exchange(0, 1, 1)
    before = replica.state()
    assert replica.follow(torch.ones(2)) == Exchange(0, 1, 1)
    assert same(replica.state(), before)


def test_the_vector_never_moves():
    replica = Replica("net", pixels(), OPTIMIZERS["adam"])

    def places():
        tensors = [replica.params, replica.grad, *replica.own_parameters()]
        return [x.data_ptr() for x in tensors]

    before = places()
    for step in range(3):
        replica.descend(picture_loss(replica.module, step))
    replica.load(replica.state())
    assert places() == before


# -- rebind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "moment", "variant"),
    pairwise(
        [name for name in OPTIMIZERS if name != "dampened"],
        ["before", "after"],
        [{}, {"grouped": True}, {"bfloat16": True}],
    ),
)
def test_rebound_to_other_memory_it_goes_on_as_if_nothing_had_happened(optimizer, moment, variant):
    problem = Problem(optimizer=optimizer, clip=0.3, scheduled=True, **variant)
    expected = problem.alone(8)
    replica = Replica("model", problem.net(), OPTIMIZERS[optimizer], **problem.options())
    done = 3 if moment == "after" else 0
    problem._run(replica, done, (0,))
    storage, moments = replica.params.detach().clone(), {}

    def elsewhere(key, value):
        moments[key] = value.clone()
        return moments[key]

    replica.rebind(storage, elsewhere)
    replica.check()
    assert replica.params.data_ptr() == storage.data_ptr()
    result = problem._run(replica, 8 - done, (0,), done)
    assert same(result.state, expected.state)
    assert torch.equal(storage, result.params)
    for index, group in enumerate(replica.optimizer.param_groups):
        for key, value in replica.optimizer.state[group["params"][0]].items():
            assert value.data_ptr() == moments[f"{index}.{key}"].data_ptr()


def test_rebinding_takes_the_contents_of_the_new_memory():
    net = drawn(nn.Linear(2, 1))
    replica = Replica("net", net, sgd)
    shared = torch.tensor([1.0, 2.0, 3.0])
    replica.rebind(shared)
    assert net.weight.tolist() == [[1.0, 2.0]]
    replica.follow(torch.ones(3))
    torch.testing.assert_close(shared, torch.tensor([0.9, 1.9, 2.9]))
    shared.fill_(7.0)
    assert net.bias.item() == 7.0


@pytest.mark.parametrize("storage", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)])
def test_rebinding_to_what_does_not_fit_is_an_error_and_changes_nothing(storage):
    replica = Replica("net", drawn(nn.Linear(2, 1)), sgd)
    before, place = replica.params.detach().clone(), replica.params.data_ptr()
    with pytest.raises(ValueError, match="'net' has 3 parameters"):
        replica.rebind(storage)
    assert replica.params.data_ptr() == place
    assert torch.equal(replica.params, before)
    replica.check()


def test_sparse_gradients_are_taken_and_late_hooks_refused() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    replica = Replica("model", net, lambda p: torch.optim.SGD(p, lr=1.0))
    before = net.weight.detach().clone()
    replica.descend(net(torch.tensor([1, 3, 3])).sum())
    expected = before - torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])[:, None]
    torch.testing.assert_close(net.weight.detach(), expected)

    heard: list[int] = []
    net = nn.Embedding(5, 2)
    replica = Replica("model", net, lambda p: torch.optim.SGD(p, lr=1.0))
    net.weight.register_hook(lambda gradient: heard.append(len(gradient)))
    replica.descend(net(torch.tensor([1])).sum())
    assert heard == [5]
    replica = Replica("model", nn.Embedding(5, 2), lambda p: torch.optim.SGD(p, lr=1.0))
    replica.module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(RuntimeError, match="register_hook"):
        replica.descend(replica.module(torch.tensor([1])).sum())
