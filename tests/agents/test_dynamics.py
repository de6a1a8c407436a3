"""The ensemble of dynamics models: its gradient, its fit, its elites, and when a fit ends."""

import dataclasses
import itertools
import math

import pytest
import torch

from murmurate.agents._dynamics import DynamicsModel, EarlyStopping, ModelConfig
from murmurate.agents._ensemble_gradient import EnsembleGradient
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.losses.gaussian_nll import gaussian_nll, soft_bounds
from murmurate.nets.dynamics import DynamicsEnsemble
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.replicator.gather import TensorExchange
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import EnvSpec
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.interface import FINAL_DRAIN
from murmurate.strategies.push_sum import PushSum

SMALL = ModelConfig(members=3, elites=2, layers=2, hidden=24, batch=32, precision="float32")
SOON_ENDED = dataclasses.replace(SMALL, patience=1, improvement=0.9)  # fits of as few epochs as there can be
CONTEXT = Context(EnvSpec("small", (3,), torch.float32, 0, (2,)), Replica, seed=5)


def small_ensemble(members: int = 3) -> DynamicsEnsemble:
    generator = torch.Generator().manual_seed(0)
    return DynamicsEnsemble(4, 2, members=members, elites=2, layers=3, hidden=8, generator=generator)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- the gradient ------------------------------------------------------------------------------------------


def test_the_gradient_is_autograds():
    ensemble = small_ensemble().double()
    replica = Replica("model", ensemble, lambda p: torch.optim.SGD(p, lr=0.1))
    decay = [0.1, 0.2, 0.3, 0.4]
    x, y = drawn(3, 6, 4).double(), drawn(3, 6, 2, seed=2).double()
    found = EnsembleGradient(ensemble, replica, decay, batch=6)(x, y)
    mean, raw = ensemble.net(x).chunk(2, -1)
    loss = gaussian_nll(mean, soft_bounds(raw, ensemble.low, ensemble.high), y)
    penalty = sum(d * w.square().sum() / 2 for d, w in zip(decay, ensemble.net.weights, strict=True))
    whole = loss.sum() + penalty + 0.01 * (ensemble.high - ensemble.low).sum()
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    oracle = torch.autograd.grad(whole, replica.own_parameters())
    for (name, ours), theirs in zip(replica.named_views(replica.grad), oracle, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=name)


def ensemble_gradient(ensemble, x, y, precision: str = "float32") -> torch.Tensor:
    replica = Replica("model", ensemble, lambda p: torch.optim.SGD(p, lr=0.1))
    EnsembleGradient(ensemble, replica, [1e-4] * 4, 64, precision)(x, y)
    return replica.grad.clone()


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def test_in_bfloat16_it_is_nearly_that_of_float32():
    ensemble, x, y = small_ensemble(), drawn(3, 64, 4), drawn(3, 64, 2, seed=2)
    exact = ensemble_gradient(ensemble, x, y)
    assert 0 < relative_distance(ensemble_gradient(ensemble, x, y, "bfloat16"), exact) < 0.02


def test_in_bfloat16_inputs_keep_their_digits():
    """Differences of inputs below bfloat16's resolution near 1, 2^-7, decide the first layer's sums."""
    ensemble = small_ensemble()
    with torch.no_grad():
        ensemble.net.weights[0][:, :2] = 2048 * torch.tensor([[1.0], [-1.0]])
        ensemble.net.weights[0][:, 2:] = 0
    x, y = torch.ones(3, 64, 4), drawn(3, 64, 2, seed=2)
    x[..., 0] += drawn(3, 64).clamp(-1, 1) / 512
    exact = ensemble_gradient(ensemble, x, y)
    assert relative_distance(ensemble_gradient(ensemble, x, y, "bfloat16"), exact) < 0.02
    assert relative_distance(ensemble_gradient(ensemble, x.bfloat16().float(), y), exact) > 0.1


# -- fits --------------------------------------------------------------------------------------------------


def linear_system(size: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = A x + b + s(x) e: inputs, targets, and the true means and standard deviations."""
    x = drawn(size, 3, seed=seed) * torch.tensor([1.0, 10.0, 0.1]) + torch.tensor([0.0, 50.0, 0.0])
    matrix = torch.tensor([[0.5, -0.3], [0.02, 0.05], [2.0, 1.0]])
    mean = x @ matrix - torch.tensor([1.0, 2.0])
    std = torch.stack((torch.full((size,), 0.2), torch.exp(x[:, 0] / 2 - 1.5)), 1)
    return x, mean + std * drawn(size, 2, seed=seed + 1), mean, std


def test_mean_and_variance_of_a_linear_system_are_recovered():
    model = DynamicsModel(dataclasses.replace(SMALL, batch=64, learning_rate=5e-3), CONTEXT, 3, 2)
    inputs, targets, _, _ = linear_system(3_000)
    assert model.fit(inputs, targets)
    x, _, mean, std = linear_system(500, seed=9)
    draws = torch.stack([model.predict(x) for _ in range(200)])
    assert (draws.mean(0) - mean).square().mean().sqrt() < 0.05
    ratio = draws.std(0) / std
    assert (ratio.log().abs().mean(0) < 0.2).all()
    noise = std.square().mean()
    assert model.error == pytest.approx(noise.item(), rel=0.25)
    assert (model.ensemble.input_mean - inputs.mean(0)).abs().max() < 0.5


def test_a_fit_ends_after_epochs_without_improvement_and_restores_the_best():
    ensemble = small_ensemble()
    stopping = EarlyStopping(ensemble, dataclasses.replace(SMALL, patience=2, improvement=0.01))
    weight = ensemble.net.weights[0].data
    schedule = [  # errors of three members, and whether the fit ends
        ([1.0, 1.0, 1.0], False),
        ([0.995, 2.0, 0.5], False),  # the first fell by less than 1%: that does not count
        ([0.994, 2.0, 0.6], False),
        ([2.0, 0.98, 0.6], False),  # one member suffices
        ([2.0, 2.0, 2.0], False),
        ([2.0, 2.0, 2.0], True),
    ]
    for epoch, (errors, ends) in enumerate(schedule):
        weight.fill_(float(epoch))
        assert stopping.after_epoch(torch.tensor(errors), steps=20) is ends
    stopping.restore()
    assert weight[:, 0, 0].tolist() == [0.0, 3.0, 1.0]
    assert stopping.least.tolist() == pytest.approx([1.0, 0.98, 0.5])


def test_the_patience_of_short_epochs_is_that_of_twenty_steps_each():
    stopping = EarlyStopping(small_ensemble(), dataclasses.replace(SMALL, patience=2, improvement=0.01))
    ends = [stopping.after_epoch(torch.ones(3), steps=8) for _ in range(7)]
    assert ends == [False] * 6 + [True], "the first improves on nothing, then two times three epochs follow"


@pytest.mark.parametrize("interrupt_at", [None, 2])
def test_a_strategy_with_a_vector_of_its_own_follows_restored_parameters(interrupt_at):
    def fit(member):
        replicator = Replicator(PushSum(), member)
        context = dataclasses.replace(CONTEXT, replicate=replicator.replicate)
        model = DynamicsModel(SOON_ENDED, context, 3, 2)
        calls = itertools.count()
        model.fit(*linear_system(300)[:2], lambda: interrupt_at is not None and next(calls) >= interrupt_at)
        restored = model.replica.params.detach().clone()
        replicator.bound_replicas["model"].drain(FINAL_DRAIN, 1.0)  # takes the parameters from push-sum's sum
        return restored, model.replica.params.detach()

    ((restored, drained),) = SimulatedFabric(1, seed=0).run([fit])
    torch.testing.assert_close(drained, restored)


def test_elites_are_the_members_with_the_least_held_out_error():
    model = DynamicsModel(dataclasses.replace(SOON_ENDED, members=5, elites=3), CONTEXT, 3, 2)
    model._held_out_errors = lambda *_: torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0])
    model.fit(*linear_system(400)[:2])
    assert model.ensemble.elite.tolist() == [1, 2, 0]
    assert model.error == 2.0


def test_a_prediction_is_that_of_one_elite_for_each_row():
    ensemble = small_ensemble(4)
    ensemble.elite.copy_(torch.tensor([3, 1]))
    x = drawn(7, 4)
    mean, _ = ensemble.predict(x, torch.Generator().manual_seed(0))
    of_all = ensemble(x)[..., :2].detach()
    by = [
        next(e for e in range(4) if torch.allclose(mean[b], of_all[e, b], rtol=1e-5, atol=1e-6))
        for b in range(7)
    ]
    assert sorted(by.count(e) for e in range(4)) == [0, 0, 3, 4]
    assert set(by) == {1, 3}


def test_elites_predict_equally_many_rows_or_one_more():
    generator = torch.Generator().manual_seed(0)
    ensemble = DynamicsEnsemble(4, 2, members=5, elites=5, layers=2, hidden=8, generator=generator)
    with torch.no_grad():
        for number, bias in enumerate(ensemble.net.biases[-1]):
            bias.fill_(100.0 * number)  # far more than what the inputs make of it

    def elites_of(rows):
        mean, _ = ensemble.predict(drawn(rows, 4), generator)
        return (mean[:, 0] / 100).round().int().tolist()

    for rows in (6, 8, 11):
        chosen = elites_of(rows)
        counts = [chosen.count(elite) for elite in range(5)]
        assert max(counts) - min(counts) <= 1, counts
    assert {elites_of(1)[0] for _ in range(50)} == set(range(5)), "each elite may get the only row"


def test_an_interrupted_fit_leaves_everything_as_it_was():
    inputs, targets, _, _ = linear_system(300)
    one, other = (DynamicsModel(SOON_ENDED, CONTEXT, 3, 2) for _ in range(2))
    countdown = iter([False] * 2 + [True])
    assert not one.fit(inputs, targets, lambda: next(countdown))
    assert math.isnan(one.error)
    for model in (one, other):
        assert model.fit(inputs, targets)
    assert torch.equal(one.replica.params, other.replica.params)


def test_members_of_a_group_fit_to_the_end_when_one_is_interrupted():
    """Otherwise the others would wait for it in the next mean."""

    def fit(member):
        replicator = Replicator(AllReduce(), member)
        group = Group(TensorExchange(member, range(2)))
        context = dataclasses.replace(CONTEXT, replicate=replicator.replicate, open_group=lambda: group)
        model = DynamicsModel(SOON_ENDED, context, 3, 2)
        data = linear_system(300, seed=3 + member.rank)[:2]  # of the same both would be equal anyway
        return model.fit(*data, lambda: member.rank == 0), model.replica.params.detach()

    (ended, params), (other_ended, other_params) = SimulatedFabric(2, seed=0).run([fit, fit])
    assert ended
    assert other_ended
    assert torch.equal(params, other_params)


def test_an_interrupted_fit_sets_no_clock_back_that_peers_have_seen():
    """Staleness would be negative, as asynchronous strategies count from their last exchange."""
    inputs, targets, _, _ = linear_system(300)
    model = DynamicsModel(SMALL, CONTEXT, 3, 2)
    model.replica.common_rounds = False
    countdown = iter([False] * 5 + [True])
    assert not model.fit(inputs, targets, lambda: next(countdown))
    assert model.replica.clock > 0


def test_saved_and_loaded_fits_equal_uninterrupted_ones():
    inputs, targets, _, _ = linear_system(300)
    one, other = (DynamicsModel(SOON_ENDED, CONTEXT, 3, 2) for _ in range(2))
    one.fit(inputs, targets)
    other.replica.load(one.replica.state())
    other.load(one.state())
    for model in (one, other):
        model.fit(inputs, targets)
    assert torch.equal(one.replica.params, other.replica.params)
    assert one.metrics() == other.metrics()
    assert torch.equal(one.predict(inputs), other.predict(inputs))


def test_who_takes_over_a_peers_state_draws_other_numbers():
    inputs, targets, _, _ = linear_system(300)
    peer = DynamicsModel(SOON_ENDED, CONTEXT, 3, 2)
    peer.fit(inputs, targets)
    drawn_by = {}
    for rank in (0, 1, 2):
        joiner = DynamicsModel(SOON_ENDED, dataclasses.replace(CONTEXT, rank=rank), 3, 2)
        joiner.replica.load(peer.replica.state())
        joiner.load(peer.state())
        drawn_by[rank] = joiner.predict(inputs)
    assert torch.equal(drawn_by[0], peer.predict(inputs))
    assert not torch.equal(drawn_by[1], drawn_by[0])
    assert not torch.equal(drawn_by[2], drawn_by[1])


def test_a_state_of_another_kind_of_device_is_loaded():
    inputs, _, _, _ = linear_system(20)
    drawn_from = []
    for seed in (1, 1, 2):
        model = DynamicsModel(SMALL, CONTEXT, 3, 2)
        state = model.state()
        state["generator"]["state"] = torch.tensor(
            [seed] + [0] * 15, dtype=torch.uint8
        )  # of a CUDA generator
        model.load(state)
        drawn_from.append(model.predict(inputs))
    assert torch.equal(drawn_from[0], drawn_from[1])
    assert not torch.equal(drawn_from[0], drawn_from[2])


def test_decay_grows_with_the_layers():
    assert ModelConfig().decay() == pytest.approx([2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4])
    assert len(dataclasses.replace(SMALL, layers=1).decay()) == 2


def test_more_elites_than_members_are_refused():
    with pytest.raises(ValueError, match="elites"):
        DynamicsModel(dataclasses.replace(SMALL, elites=4), CONTEXT, 3, 2)


def test_small_examples_of_torchs_adam():
    """The optimizer of the model is torch's Adam: one step of it from the gradient."""
    ensemble, twin = small_ensemble(), small_ensemble()
    replica = Replica("model", ensemble, lambda p: Adam(p, lr=1e-2))
    gradient = EnsembleGradient(ensemble, replica, [1e-4] * 4, batch=5)
    gradient(drawn(3, 5, 4), drawn(3, 5, 2, seed=2))
    for parameter, (_, place) in zip(twin.parameters(), replica.named_views(replica.grad), strict=True):
        parameter.grad = place.clone()
    replica.follow(replica.grad)
    torch.optim.Adam(twin.parameters(), lr=1e-2).step()
    for ours, theirs in zip(ensemble.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
