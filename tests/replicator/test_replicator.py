"""The replicator: initial parameters, refusals, notification of deaths, measurements."""

from __future__ import annotations

import functools

import pytest
import torch

from laws.nets import pixels
from laws.problems import OPTIMIZERS, Point, Problem, same
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.replicator import Replicator
from murmurate.replicator.user_loop import OwnLoop
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.elastic import Elastic
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.interface import Strategy
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.training.divergence import Probe
from strategies.scripted import Number, Script


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(outer_learning_rate=0.5), Hogwild(), GALA()])
@pytest.mark.parametrize("low", [False, True])
def test_all_start_from_the_lowest_living_ranks_parameters(strategy, low):
    problem = Problem(bfloat16=low)

    def member(fabric):
        replica = Replicator(strategy, fabric).replicate(
            "model", problem.net(seed=fabric.rank), sgd, **problem.options()
        )
        replica.check()
        return replica.params.detach().clone(), [p.detach().clone() for p in replica.own_parameters()]

    expected = Replica("model", problem.net(seed=0), sgd, **problem.options())
    for vector, parameters in SimulatedFabric(3, seed=2).run([member] * 3):
        assert torch.equal(vector, expected.params)
        assert same(parameters, [p.detach() for p in expected.own_parameters()])


def test_members_with_other_memory_layouts_are_other_models():
    """The vector is exchanged as it lies in memory, so all members must lay it out alike; these do."""

    def member(fabric):
        replica = Replicator(AllReduce(), fabric).replicate("net", pixels(True, seed=fabric.rank), sgd)
        return {name: values.clone() for name, values in replica.named_views()}

    one, other = SimulatedFabric(2, seed=0).run([member] * 2)
    assert same(one, other)
    assert torch.equal(one["first.weight"], pixels(seed=0).first.weight)


def test_two_replicas_learn_apart_each_with_its_own_channel_and_strategy():
    def member(fabric):
        replicator = Replicator(LocalSGD(period=2), fabric)
        actor = replicator.replicate("actor", Point(0.0), sgd)
        critic = replicator.replicate("critic", Point(10.0, 10.0), sgd)
        for _ in range(2):
            actor.follow(torch.tensor([1.0 + fabric.rank], dtype=torch.float64))
        critic.follow(torch.ones(2, dtype=torch.float64))
        return actor.params.tolist(), critic.params.tolist(), replicator.bound_replicas["critic"].last

    for result in SimulatedFabric(2, seed=0).run([member] * 2):
        assert result == ([-1.5], [9.5, 9.5], Exchange(0, 1, 1))


def test_a_name_is_given_once():
    def member(fabric):
        replicator = Replicator(AllReduce(), fabric)
        replicator.replicate("net", Point(0.0), sgd)
        replicator.replicate("net", Point(0.0), sgd)

    with pytest.raises(ValueError, match="already a replica called 'net'"):
        SimulatedFabric(1, seed=0).run([member])


def test_what_replicas_on_a_gpu_cannot_do_is_refused():
    """A fabric may offer what a replica's device does not: a vector on a GPU cannot be shared memory."""

    def member(fabric):
        OwnLoop(GALA(), fabric, devices=("cuda:0",))
        OwnLoop(Hogwild(), fabric, devices=("cuda:0",))

    with pytest.raises(Refusal, match=r"hogwild needs shared memory, which this fabric on a GPU does.*gala"):
        SimulatedFabric(1, seed=0).run([member])


class Diary(Strategy):
    """Writes down what it is told; updates, and says so with round and staleness as asked."""

    name = "diary"

    def attach(self, replica, fabric):
        self.told = []

    def step(self, replica, fabric):
        replica.update()
        self.told.append("step")
        return Exchange(replica.clock, 1, (3 * replica.clock) % 5)

    def on_member(self, event):
        self.told.append((event.kind, event.rank))


def test_a_strategy_is_told_of_deaths_and_of_who_joins_between_two_steps():
    script = Script(3)
    replicator = Replicator(Diary(), script.member(0))
    replica = replicator.replicate("x", Number(0.0), sgd)
    bound = replicator.bound_replicas["x"]
    gradient = torch.ones(1, dtype=torch.float64)
    replica.follow(gradient)
    script.dead = {1, 2}
    replica.follow(gradient)
    replica.follow(gradient)
    script.dead = {1}
    replica.follow(gradient)
    assert bound.strategy.told == ["step", ("died", 1), ("died", 2), "step", "step", ("joined", 2), "step"]
    assert bound.last == Exchange(4, 1, 2)
    assert bound.staleness_max == 4


def test_the_strategy_given_stays_as_it_was():
    given = LocalSGD(period=3, outer_learning_rate=1.0)

    def member(fabric):
        Problem().learn(given, 4, fabric)

    SimulatedFabric(2, seed=0).run([member] * 2)
    assert given == LocalSGD(period=3, outer_learning_rate=1.0)
    assert given.state() == {}


def test_state_has_replica_and_strategy_by_name_and_consensus_a_vector_each():
    def member(fabric):
        replicator = Replicator(LocalSGD(period=5), fabric)
        one = replicator.replicate("one", Point(0.0, 0.0), OPTIMIZERS["momentum"])
        replicator.replicate("two", Point(4.0), sgd)
        one.follow(torch.full((2,), 1.0 + fabric.rank, dtype=torch.float64))
        consensus = replicator.consensus()
        return replicator.state(), consensus, one.params.detach().clone()

    (state, consensus, mine), (_, _, theirs) = SimulatedFabric(2, seed=0).run([member] * 2)
    assert set(state) == {"one", "two"}
    assert set(state["one"]) == {"replica", "strategy"}
    assert torch.equal(consensus["one"], (mine + theirs) / 2)
    assert consensus["two"].tolist() == [4.0]


def test_publish_shows_the_parameters_as_they_are_now():
    script = Script(2)
    replicator = Replicator(GALA(), script.member(0))
    replica = replicator.replicate("x", Number(1.0), sgd)
    replica.params.data.fill_(5.0)
    replicator.publish()
    assert [x.item() for x in script.published[0]] == [5.0]


def test_traffic_is_summed_over_replicas():
    def member(fabric):
        replicator = Replicator(GALA(), fabric)
        for name in ("one", "two"):
            replicator.replicate(name, Point(0.0, 0.0, 0.0), sgd)
        before = replicator.bytes_exchanged
        for bound in replicator.bound_replicas.values():
            bound.replica.follow(torch.zeros(3, dtype=torch.float64))
        return replicator.bytes_exchanged - before

    published = 2 * 3 * 8  # three float64 of each
    assert all(
        count in range(published, 3 * published) for count in SimulatedFabric(2, seed=0).run([member] * 2)
    )
    assert SimulatedFabric(1, seed=0).run([member]) == [0]  # nobody reads what it publishes


# -- the probe ----------------------------------------------------------------------------------------

STARTS = [(3.0, 0.0), (0.0, 3.0), (-3.0, -3.0), (4.0, 4.0)]
SLOPES = [(1.0, 0.0), (0.0, 2.0), (1.0, 1.0), (-1.0, 0.0)]


def probed(synchronous, fabric):
    """Each at its own point with its own gradient, which a mean replaces; all show it before anybody
    compares."""

    def exchange(replica):
        replica.grad.fill_(1.0)
        return Exchange(0, 1, 1)

    replica = Replica("x", Point(*STARTS[fabric.rank]), sgd)
    probe = Probe(replica, fabric, synchronous, replicas=fabric.size)
    replica.measure = True
    replica.exchange = exchange
    replica.follow(torch.tensor(SLOPES[fabric.rank], dtype=torch.float64))
    if not synchronous:
        probe.measure()
        fabric.channel("barrier", torch.zeros(1)).gather(torch.zeros(1))
    return probe.measure()


@pytest.mark.parametrize("synchronous", [True, False])
def test_the_probe_compares_by_the_formulas(synchronous):
    """mean (1, 1); squared distances 5, 5, 32, 18: sqrt(60/4)/sqrt(2)."""
    result = SimulatedFabric(4, seed=1).run([functools.partial(probed, synchronous)] * 4)
    for rank, distance in enumerate((5, 5, 32, 18)):
        assert result[rank]["disagreement"] == pytest.approx((15 / 2) ** 0.5)
        assert result[rank]["distance_to_mean"] == pytest.approx(distance**0.5)
    half = 0.5**0.5
    assert result[0]["gradient_cosine"] == pytest.approx([1.0, 0.0, half, -1.0])
    assert result[2]["gradient_cosine"] == pytest.approx([half, half, 1.0, -half])


def test_the_probe_alone_has_nothing_to_compare():
    assert SimulatedFabric(1, seed=0).run([functools.partial(probed, True)]) == [{}]


@pytest.mark.parametrize("strategy", [ParameterServer(), Elastic(period=1)], ids=lambda s: s.name)
def test_a_centre_drains_all_replicas_while_one_waits_for_its_reply(strategy):
    """As at a checkpoint that is requested in the middle of a batch with updates of two replicas."""

    def member(fabric):
        replicator = Replicator(strategy, fabric)
        replicas = [replicator.replicate(name, Point(8.0), sgd) for name in ("first", "second")]
        if fabric.rank == 2:
            return replicator.drain(1, 5.0)
        for _ in range(2):
            for replica in replicas:
                replica.follow(torch.ones(1, dtype=torch.float64))
        return replicator.drain(1, 5.0)

    assert SimulatedFabric(3, seed=0).run([member] * 3) == [True, True, True]


def test_a_centre_that_is_busy_publishes_too():
    def script(loop):
        replica = loop.replicate("x", Point(8.0), sgd)
        seen = []
        for _ in range(80):
            replica.follow(torch.ones(1, dtype=torch.float64))
            seen.append(float(loop.consensus()["x"]))
        return seen, replica.params.item()

    def member(fabric):
        with OwnLoop(ParameterServer(), fabric) as loop:
            return script(loop)

    (seen, own), (others, _), _ = SimulatedFabric(3, seed=0, coroutines="threads").run([member] * 3)
    assert own < -60  # two replicas, 80 steps of 0.5 each
    for values in (seen, others):
        assert min(values) < -40
