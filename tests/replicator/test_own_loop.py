"""A script's own loop under every strategy: ranks, consensus, a replica over several devices."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laws.problems import same
from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError
from murmurate.replica.vector import NotFinite
from murmurate.strategies import strategies
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.elastic import Elastic, SynchronousElastic
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.parameter_server import ParameterServer
from replicator.steps import alone, draw, loops, pairs, processes, simulated, tanh_net

KNOWN = strategies()
STEPS = 400
# both nodes move all the way: half of the sum of their moves is the step
TUNED = {
    "dpsgd": DPSGD(global_learning_rate=0.5),
    "elastic": Elastic(period=2),
    "synchronous-elastic": SynchronousElastic(period=2),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def linear_problem(loop, count=STEPS):
    """Least squares with a known answer, of which each of three replicas sees its own column and the last.

    Whoever hears nothing of the others keeps the weights of their columns: off by 0.5 at the least.
    """
    net = nn.Linear(4, 1, bias=False).double()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    right = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=torch.float64)
    x = draw(loop.rank, 40, 4)
    x[:, [k for k in range(3) if k != loop.rank]] = 0.0
    steps = 0
    for _ in loop.inputs(range(count * loop.size), per="replica"):
        optimizer.zero_grad()
        F.mse_loss(net(x), x @ right.T).backward()
        optimizer.step()
        steps += 1
    ended = loop.finish(60.0)
    agreed = loop.agreed()["weight"]
    wrong = (agreed - right).abs().max().item()
    if count < STEPS:
        return steps, ended, agreed, loop.bytes_exchanged
    return steps, ended, wrong, loop.is_main, loop.bytes_exchanged


@pytest.mark.parametrize("name", [n for n in KNOWN if n != "solo"])
def test_a_loop_of_ones_own_learns_under_every_strategy(name):
    kind = KNOWN[name]
    result = loops(3 + kind.centre, linear_problem, simulated, TUNED.get(name, kind()))
    assert result[3:] == [None] * kind.centre  # a centre has nothing to say
    for steps, ended, wrong, _, exchanged in result[:3]:
        assert (steps, ended) == (STEPS, True)
        assert wrong < 0.1
        assert exchanged > 0 or name == "hogwild"
    assert [main for *_, main, _ in result[:3]] == [True, False, False]


def a_few_steps(loop):
    return linear_problem(loop, 12)


@pytest.mark.parametrize("name", ["parameter-server", "elastic", "dpsgd"])
def test_centres_serve_on_real_processes(name):
    one, two, nothing = loops(3, a_few_steps, processes, TUNED.get(name, KNOWN[name]()))
    assert nothing is None
    for steps, ended, agreed, exchanged in (one, two):
        assert (steps, ended) == (12, True)
        assert exchanged > 0
        assert torch.equal(agreed, one[2])  # what the centre showed last


@pytest.mark.parametrize("strategy", [ParameterServer(), Elastic()])
def test_a_centre_serves_whether_the_script_steps_or_not(strategy):
    """Without ``inputs`` the centre leaves the script at its first step, if there is one."""

    def script(loop):
        net = tanh_net()
        replica = loop.replicate("net", net, sgd)
        for x, y in pairs(5):
            replica.descend(F.mse_loss(net(x), y))
        return replica.clock

    assert loops(3, script, strategy=strategy) == [5, 5, None]
    result = loops(3, lambda loop: loop.replicate("net", tanh_net(), sgd).clock, strategy=strategy)
    assert result[:2] == [0, 0]


def test_a_centre_needs_a_member_of_its_own():
    with pytest.raises(Refusal, match="for its centre: add one"):
        loops(1, print, strategy=ParameterServer())


# -- who one is -------------------------------------------------------------------------------------


def test_rank_size_worker_and_seeds():
    def script(loop):
        own = loop.generator("noise"), loop.generator("noise"), loop.generator("other")
        drawn = [torch.rand(1, generator=g).item() for g in own]
        return loop.rank, loop.size, loop.worker, loop.workers, loop.is_main, loop.seed_for("x"), drawn

    result = loops(4, script, workers=2, seed=7)
    assert [one[:5] for one in result] == [(r, 4, r // 2, 2, r == 0) for r in range(4)]
    assert len({one[5] for one in result}) == 4
    for *_, (first, again, other) in result:
        assert first == again != other
    assert result[0][5] == loops(1, script, seed=7)[0][5] != loops(1, script, seed=8)[0][5]


def test_it_prints_once(capsys):
    loops(3, lambda loop: loop.print("loss", loop.rank, sep="="))
    assert capsys.readouterr().out == "loss=0\n"


# -- what stands for all ----------------------------------------------------------------------------


class WithStatistics(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(2, 2).double()
        self.norm = nn.BatchNorm1d(2).double()
        self.norm.running_mean.fill_(float(rank))
        self.norm.num_batches_tracked.fill_(rank + 5)

    def forward(self, x):
        return self.norm(self.layer(x))


def agreed_of(loop):
    net = WithStatistics(loop.rank)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, name="net")
    optimizer.replica.params.data.fill_(float(loop.rank))
    assert net.norm.running_mean.tolist() == [0.0, 0.0]  # all begin with those of rank 0
    net.norm.running_mean.fill_(float(loop.rank))
    loop.publish() if not loop.strategy.synchronous else None
    loop.finish(30.0)
    agreed = loop.agreed("net")
    WithStatistics(0).load_state_dict(agreed)  # strict: the script's own names, and all of them
    return agreed


def test_modules_with_the_same_names_both_agree():
    """As generator and discriminator, two nn.Sequential, have: neither replaces the other's tensors."""

    def script(loop):
        for name, value in (("generator", 1.0), ("discriminator", 2.0)):
            net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, name=name)
            optimizer.replica.params.data.fill_(value)
        loop.finish(30.0)
        return loop.agreed(), loop.agreed("generator")

    for agreed, generator in loops(2, script):
        assert len(agreed) == 2 * len(generator)
        assert torch.equal(agreed["generator.0.weight"], torch.ones(2, 2))
        assert torch.equal(agreed["discriminator.0.weight"], torch.full((2, 2), 2.0))
        assert torch.equal(generator["0.weight"], torch.ones(2, 2))


@pytest.mark.parametrize("strategy", [LocalSGD(), GALA()])
def test_agreed_tensors_load_into_the_scripts_module(strategy):
    for rank, agreed in enumerate(loops(3, agreed_of, strategy=strategy)):
        assert torch.equal(agreed["layer.weight"], torch.ones(2, 2, dtype=torch.float64))
        mean = 1.0 if strategy.synchronous else float(rank)  # batch statistics: own ones if nobody meets
        assert agreed["norm.running_mean"].tolist() == [mean, mean]


def test_steps_outputs_are_merged_over_replicas():
    def script(loop):
        def step(batch):
            x = batch.double()
            numbers = {"count": len(x), "time": 1.7e9 + len(x), "single": np.float32(0.5)}
            return {"loss": x.mean(), "parts": [x.sum(), (2 * x).requires_grad_()]} | numbers

        return list(loop.run(step, [torch.arange(6), torch.arange(6) + 10]))

    for first, second in loops(3, script):
        assert first["loss"].tolist() == [0.5, 2.5, 4.5]
        assert first["parts"][1].tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
        assert not first["parts"][1].requires_grad
        assert second["parts"][0].tolist() == [21.0, 25.0, 29.0]
        assert first["count"].tolist() == [2, 2, 2]
        assert first["time"].tolist() == [1.7e9 + 2] * 3
        assert first["single"].tolist() == [0.5] * 3
    for rank, (first, _) in enumerate(loops(3, script, strategy=GALA())):
        assert first["loss"].tolist() == [0.5 + 2 * rank]
        assert first["time"].tolist() == [1.7e9 + 2]


# -- one replica over several devices ---------------------------------------------------------------


def test_devices_of_a_replica():
    loop = alone(lambda loop: loop, devices=("cpu", "meta"))
    assert loop.device() == loop.device(0) == torch.device("cpu")
    with loop.device(1):
        assert torch.empty(3).is_meta
    with pytest.raises(IndexError, match="a replica has 2 devices, there is no 2"):
        loop.device(2)


def deep(seed=3):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for k, parameter in enumerate(net.parameters()):
            parameter.copy_(0.5 * draw(seed + k, *parameter.shape))
    return net


def halves(name):
    """The last layer lives on the second device, and the first one's bias too: parameters may be anywhere."""
    return int(name.startswith("4") or name == "0.bias")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.03)


def over_devices(loop, clip=0.05, make=adam, placed=halves):
    net = deep()
    lockstep = loop.replicate_over_devices("net", net, make, placed=placed, clip=clip)
    norms, exchanges = [], []
    for x, y in loop.inputs(pairs(8)):
        exchanges.append(lockstep.descend(F.mse_loss(net(x), y)))
        norms.append(lockstep.gradient_norm)
    lengths = [len(shard) for shard in lockstep.shards]
    return [p.detach().clone() for p in net.parameters()], norms, exchanges, lengths


def on_one(loop, clip=0.05, make=adam):
    net = deep()
    replica = loop.replicate("net", net, make, clip=clip)
    norms, exchanges = [], []
    for x, y in loop.inputs(pairs(8)):
        exchanges.append(replica.descend(F.mse_loss(net(x), y)))
        norms.append(replica.gradient_norm)
    return [p.detach().clone() for p in net.parameters()], norms, exchanges


TWO = {"devices": ("cpu", "cpu")}


@pytest.mark.parametrize(
    "strategy", [AllReduce(), LocalSGD(period=2), LocalSGD(period=3, outer_learning_rate=0.7)]
)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_two_shards_in_lockstep_are_one_replica(strategy, clip):
    """The clipped norm is that of both shards' averaged gradients: one shard's own would differ at once."""
    split = loops(3, lambda loop: over_devices(loop, clip), strategy=strategy, **TWO)
    whole = loops(3, lambda loop: on_one(loop, clip), strategy=strategy)
    for (result, norms, exchanges, lengths), (expected, one_norms, one_exchanges) in zip(
        split, whole, strict=True
    ):
        assert lengths == [24 + 35, 18 + 6]
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norms, one_norms, rtol=1e-12, atol=1e-12)
        assert exchanges == one_exchanges


@pytest.mark.parametrize(
    "strategy", [GALA(), Hogwild(shared_moments=False), Elastic(period=2), DPSGD(threads=1)]
)
def test_lockstep_under_those_that_do_not_meet(strategy):
    for one in loops(3 if strategy.centre else 2, over_devices, strategy=strategy, **TWO)[:2]:
        params, norms, exchanges, _ = one
        assert len(exchanges) == 8
        assert all(n > 0.05 for n in norms)
        assert all(bool(p.isfinite().all()) for p in params)


def on_processes(loop):
    return over_devices(loop)


def test_lockstep_on_real_processes():
    one, two = loops(2, on_processes, processes, **TWO)
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=0)
    torch.testing.assert_close(one[0], loops(2, over_devices, **TWO)[0][0], rtol=1e-12, atol=1e-12)


def test_one_shard_is_clipped_too():
    everything = alone(lambda loop: over_devices(loop, placed=lambda _: 0), **TWO)
    expected, norms, _ = alone(on_one)
    torch.testing.assert_close(everything[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack(everything[1]), torch.stack(norms), rtol=1e-12, atol=1e-12)


def test_gradients_over_devices_may_be_cleared():
    """Also so that torch gives parameters new ones."""

    def script(loop, clears):
        net = deep()
        lockstep = loop.replicate_over_devices("net", net, adam, placed=halves)
        for x, y in pairs(3):
            lockstep.descend(F.mse_loss(net(x), y))
            if clears:
                net.zero_grad()
        return [p.detach().clone() for p in net.parameters()]

    cleared, expected = (alone(functools.partial(script, clears=c), **TWO) for c in (True, False))
    torch.testing.assert_close(cleared, expected, rtol=0, atol=0)


def test_a_step_that_fails_in_one_shard_changes_none_and_the_next_works():
    def script(loop):
        net = deep()
        lockstep = loop.replicate_over_devices("net", net, adam, placed=halves, clip=1.0)
        before = [p.detach().clone() for p in net.parameters()]
        bad = [torch.ones(len(shard), dtype=torch.float64) for shard in lockstep.shards]
        bad[1][0] = float("nan")
        with pytest.raises(NotFinite, match="gradient of replica 'net'"):
            lockstep.follow(bad)
        same = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        lockstep.follow([torch.ones(len(shard), dtype=torch.float64) for shard in lockstep.shards])
        return same, lockstep.clock, [shard.clock for shard in lockstep.shards]

    assert alone(script, **TWO) == (True, 1, [1, 1])


def test_what_a_fabric_raises_in_a_shards_step_comes_through():
    def script(loop):
        lockstep = loop.replicate_over_devices("net", deep(), sgd, placed=halves, clip=1.0)

        def broken(replica, fabric):
            raise FabricError("the link was cut")

        loop.bound_replicas["net.1"].strategy.step = broken
        lockstep.descend(
            F.mse_loss(torch.ones(1), lockstep.shards[0].own_parameters()[0].sum().float()[None])
        )

    with pytest.raises(FabricError, match="link was cut"):
        alone(script, **TWO)


def test_buffers_of_a_net_over_devices_are_saved_once_and_restored():
    """Batch statistics, whose layer may have its parameters on any of the devices."""

    def script(loop, saved=None):
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        lockstep = loop.replicate_over_devices("net", net, sgd, placed=lambda name: int(name[0] != "0"))
        if saved is not None:
            loop.load(saved)
        else:
            for x, y in loop.inputs(pairs(3)):
                lockstep.descend(F.mse_loss(net(x), y))
        return loop.state(), {name: buffer.clone() for name, buffer in net.named_buffers()}

    saved, buffers = alone(script, **TWO)
    assert buffers["1.num_batches_tracked"] == 3
    assert [list(shard["replica"]["buffers"]) for shard in saved.values()] == [list(buffers), []]
    _, restored = alone(lambda loop: script(loop, saved), **TWO)
    assert same(restored, buffers)


def test_a_parameter_must_be_where_it_is_said_to_be():
    with pytest.raises(Refusal, match=r"'0.weight' is not on device 1 \(meta\)"):
        alone(
            lambda r: r.replicate_over_devices("n", deep(), sgd, placed=lambda _: 1), devices=("cpu", "meta")
        )


def test_where_the_centre_steps_a_norm_over_devices_is_refused():
    with pytest.raises(Refusal, match="the centre clips, one device's gradient at a time"):
        loops(3, over_devices, strategy=ParameterServer(), **TWO)
