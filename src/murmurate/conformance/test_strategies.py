"""What every strategy must do, whichever it is, on every fabric.

Strategies are found by listing their folder and the entry points, so a new strategy is tested as soon as its
file exists or its package is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import pickle
import re
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from murmurate import fabric
from murmurate.conformance.problems import OPTIMIZERS, Problem, same
from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator, check_capabilities
from murmurate.strategies import strategies
from murmurate.strategies.interface import Strategy
from murmurate.training.run_folder import plain, restore

UPDATES = 6
MANY_UPDATES = 100  # enough for strategies that exchange every 10 updates
ALL = frozenset(Capability)
KNOWN = strategies()
PROBLEM = Problem(optimizer="momentum")


def fabrics():
    offered = {name: module.run_members for name, module in fabric.fabrics().items()}
    if importlib.util.find_spec("cryptography") is None:
        del offered["network"]  # it needs cryptography, which is an optional dependency
    return offered


@pytest.fixture(params=KNOWN)
def kind(request):
    return KNOWN[request.param]


def sizes(kind):
    """Numbers of members: 1, 2 and 3; only 1 for ``solo``, which refuses others."""
    return (1,) if kind.name == "solo" else (1, 2, 3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, torch.Tensor):
        return not value.requires_grad and value.grad_fn is None
    try:
        return json.loads(json.dumps(value)) == value
    except TypeError:
        return False


def members(kind, size, updates, make_optimizer=sgd):
    """The roles of ``size`` learners, followed by that of the centre if the strategy has one."""
    roles = [functools.partial(learner_role, kind, make_optimizer, updates)] * size
    return [*roles, functools.partial(centre_role, kind, make_optimizer)] if kind.centre else roles


def start(kind, make_optimizer, endpoint):
    replicator = Replicator(kind(), endpoint)
    replica = replicator.replicate("model", PROBLEM.net(endpoint.rank), make_optimizer, **PROBLEM.options())
    return replicator, replica, endpoint.channel("end", torch.zeros(1))


def centre_role(kind, make_optimizer, endpoint):
    """Run the centre until every living learner has reported that it is done."""
    replicator, replica, end = start(kind, make_optimizer, endpoint)
    bound, done = replicator.bound_replicas["model"], set()
    while not done >= set(end.living()) - {endpoint.rank}:
        with torch.no_grad():
            bound.strategy.serve(replica, bound.channel)
        while (message := end.receive("done")) is not None:
            done.add(message.sender)
    assert replicator.drain(1, 5.0)
    replicator.publish()
    bound.channel.gather(replica.params.detach())  # after this, reads on the channel see what was published
    return {
        "consensus": bound.strategy.consensus(replica, bound.channel),
        "params": replica.params.detach().clone(),
        "plain": is_plain(bound.strategy.state()),
        "folds": replica.clock,
    }


def learner_role(kind, make_optimizer, updates, endpoint):
    """Make a few updates and publish the parameters. Returns what this gave and, after all members have
    published theirs, the consensus and the strategy's state."""
    replicator, replica, end = start(kind, make_optimizer, endpoint)
    bound = replicator.bound_replicas["model"]
    result = PROBLEM._run(replica, updates, (endpoint.rank,))
    replica.check()
    assert replicator.drain(1, 5.0)
    replicator.publish()
    if kind.centre:
        end.send(endpoint.size - 1, "done", torch.zeros(1))
    bound.channel.gather(replica.params.detach())  # after this, reads on the channel see what was published
    before = replica.params.detach().clone()
    consensus = bound.strategy.consensus(replica, bound.channel)
    is_new = consensus.data_ptr() != replica.params.data_ptr()
    state = bound.strategy.state()
    return {
        "exchanges": result.exchanges,
        "params": before,
        "path": result.path,
        "params_are_unchanged": bool(torch.equal(before, replica.params)),
        "consensus": consensus.detach().clone(),
        "consensus_is_new": is_new and not consensus.requires_grad,
        "state": state,
        "plain": is_plain(state),
        "clock": replica.clock,
    }


# -- declarations -----------------------------------------------------------------------------------


def test_its_declarations_are_complete(kind):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind.name)
    assert kind.summary
    behaviour = kind.behaviour
    for field in ("on_death", "on_slow", "on_join", "bounded_by"):
        text = getattr(behaviour, field)
        assert text, f"its behaviour has no {field}"
        assert not text.endswith("."), f"{field} ends in a full stop"
    assert behaviour.carries in ("state", "deltas", "nothing")
    assert kind.paper or kind.name == "solo"
    assert isinstance(kind().needs, frozenset)
    assert kind().needs <= ALL
    assert isinstance(kind.synchronous, bool)
    assert kind.__doc__
    assert kind.__mro__.index(Strategy) == 1  # one level of inheritance


def test_it_is_a_dataclass_whose_fields_all_have_defaults(kind):
    assert "__dataclass_fields__" in vars(kind)
    strategy = kind()
    for field in dataclasses.fields(kind):
        if field.init:
            assert not field.name.startswith("_"), "what is remembered is no hyper-parameter"
    assert restore(strategy, json.loads(json.dumps(plain(strategy)))) == strategy, "run.json loses a value"
    assert kind(**{f.name: getattr(strategy, f.name) for f in dataclasses.fields(kind) if f.init}) == strategy


def test_pickling_keeps_its_hyper_parameters_alone(kind):
    """The pickler of processes cannot send a generator, and must not send any state of a strategy."""
    strategy = kind()
    unpickled = pickle.loads(ForkingPickler.dumps(strategy))
    assert unpickled == strategy
    assert vars(unpickled).keys() == vars(strategy).keys()


# -- on every fabric --------------------------------------------------------------------------------


def cases():
    """Every strategy on every fabric with each number of members, some of them marked slow.

    On the simulated fabric, which starts no processes and opens no connections, no case is slow. On each of
    the others one case of a strategy is not slow: that with 2 or 3 members, alternating over strategies and
    fabrics, or with 1 for ``solo``.
    """
    params = []
    for row, kind in enumerate(KNOWN.values()):
        for column, name in enumerate(fabrics()):
            for size in sizes(kind):
                fast = name == "simulated" or len(sizes(kind)) == 1 or size == 2 + (row + column) % 2
                marks = () if fast else pytest.mark.slow
                params.append(pytest.param(kind, name, size, marks=marks, id=f"{kind.name}-{name}-{size}"))
    return params


@pytest.mark.parametrize(("kind", "fabric", "size"), cases())
def test_it_learns_on_every_fabric(kind, fabric, size):
    roles = members(kind, size, UPDATES)
    if fabric == "network" and Capability.SHARED_MEMORY in kind().needs:
        pytest.skip(f"a run of {kind.name} on this fabric is refused, as another test shows")
    results = fabrics()[fabric](len(roles), roles)
    learners = results[:size]
    for centre in results[size:]:
        assert centre["plain"]
        assert torch.equal(centre["consensus"], centre["params"])
        torch.testing.assert_close(learners[0]["consensus"], centre["params"], rtol=0, atol=0)
    initial = PROBLEM.net().state_dict()
    for learner in learners:
        assert learner["clock"] == UPDATES, "each step must make one update: call replica.update() once"
        assert learner["plain"], "state() must be a dict of tensors and plain values, by names"
        assert learner["consensus_is_new"], "consensus must return a copy: replica.params.detach().clone()"
        assert learner["params_are_unchanged"], "consensus must not change the parameters"
        assert learner["consensus"].shape == learner["params"].shape
        assert bool(torch.isfinite(learner["consensus"]).all())
        assert not torch.equal(learner["params"][:24], initial["0.weight"].flatten())
        check_exchanges(learner["exchanges"], len(results))
        difference = float((learner["consensus"] - learners[0]["consensus"]).abs().max())
        assert difference <= 1e-12, (
            "the consensus is not the same on all members after their last update. Where replicas differ "
            "between exchanges, return mean_of_published(replica, channel), or the mean by channel.mean_"
        )
        if kind.synchronous:
            assert torch.equal(learner["consensus"], learners[0]["consensus"])
    assert kind.centre or represents(learners[0]["consensus"], learners), (
        "the consensus is neither a mean of the members' parameters nor a vector that state() saves"
    )


def represents(consensus, learners):
    """Whether a vector lies between the members' parameters, or is one that they save."""
    params = torch.stack([learner["params"] for learner in learners])
    saved = [x for x in learners[0]["state"].values() if isinstance(x, torch.Tensor)]
    between = (params.amin(0) - 1e-12 <= consensus) & (consensus <= params.amax(0) + 1e-12)
    return bool(between.all()) or any(same(consensus, x) for x in saved)


def check_exchanges(exchanges, size):
    assert len(exchanges) == UPDATES
    for clock, (earlier, now) in enumerate(zip([None, *exchanges], exchanges, strict=False), start=1):
        assert all(type(value) is int for value in now), f"{now} must have whole numbers (int)"
        assert 0 <= now.round - (earlier.round if earlier else 0) <= 1
        assert 0 <= now.round <= clock
        assert 1 <= now.heard <= size
        assert now.staleness >= 0


def test_rounds_of_a_synchronous_strategy_also_end_with_batches_of_several_updates(kind):
    if not kind.synchronous:
        pytest.skip(f"{kind.name} has no common rounds")
    size = sizes(kind)[min(1, len(sizes(kind)) - 1)]
    learner, *_ = SimulatedFabric(size, seed=0).run(members(kind, size, MANY_UPDATES))
    ends = [clock for clock, now in enumerate(learner["exchanges"], start=1) if now.staleness == 0]
    longest = max((end - begin for begin, end in itertools.pairwise([0, *ends])), default=MANY_UPDATES)
    assert longest <= kind().updates_per_round, (
        f"a round has {longest} updates, and updates_per_round is {kind().updates_per_round}: a member that "
        "has not yet ended its round would be killed when the run stops"
    )
    if ends and ends == list(range(ends[0], MANY_UPDATES + 1, ends[0])):
        return  # every multiple of a period, of which some are multiples of any number
    for updates in (1, 2, 3, 16):
        assert any(clock % updates == 0 for clock in ends), (
            f"with {updates} updates a batch, a run would neither stop nor save: it does so at the end of a "
            "batch where the staleness of the last exchange is 0. Exchange with every period-th update"
        )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_under_any_schedule_members_stay_closer_than_separate_learners(kind, seed):
    """Separate learners drift apart, as each has its own noise; exchanging must keep members closer."""
    if kind.name == "solo":
        pytest.skip("solo has one member")
    size = 3
    roles = members(kind, size, MANY_UPDATES, OPTIMIZERS["sgd"])
    learners = SimulatedFabric(len(roles), seed=seed, latency=(0.0, 5e-6)).run(roles)[:size]
    separate = [separate_path(rank) for rank in range(size)]

    apart, separately = spread([learner["path"] for learner in learners]), spread(separate)
    assert apart < 0.9 * separately, (
        f"members are {apart:.3g} from their mean, and learners that exchange nothing {separately:.3g}: does "
        "step change replica.params or replica.grad in place, by what others sent?"
    )


def spread(paths):
    """How far members are from their mean, over the last half of their updates."""
    vectors = torch.stack([torch.stack(path[len(path) // 2 :]) for path in paths])
    return float((vectors - vectors.mean(0)).norm())


@functools.cache
def separate_path(rank):
    return Problem(optimizer="sgd").alone(MANY_UPDATES, (rank,)).path


# -- refusals and deaths ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offered", [frozenset(), *(ALL - {c} for c in Capability), *({c} for c in Capability)]
)
def test_a_missing_capability_is_refused_and_a_usable_strategy_advised(kind, offered):
    fabric = SimulatedFabric(1 + kind.centre, seed=0, capabilities=offered)

    def member(endpoint):
        Replicator(kind(), endpoint).replicate("model", PROBLEM.net(), sgd)

    if kind().needs <= offered:
        check_capabilities(kind(), offered, "this fabric")
        fabric.run([member] * fabric.size)
        return
    with pytest.raises(Refusal) as refused:
        check_capabilities(kind(), offered, "this fabric")
    message = str(refused.value)
    assert message.startswith(kind.name)
    for missing in kind().needs - offered:
        assert missing.value in message
    advised = KNOWN[re.search(r"--strategy ([a-z-]+)", message)[1]]
    assert advised is not kind
    assert advised().needs <= offered


@pytest.mark.parametrize("call", [4, 7, 9, 11, 14])
def test_nobody_hangs_when_another_dies(kind, call):
    """The simulated fabric raises on a deadlock, so members do not hang if the run ends."""
    if kind.name == "solo":
        pytest.skip("solo has one member, so none is left that could hang")
    roles = members(kind, 3, 20)
    fabric = SimulatedFabric(len(roles), seed=call, crashes={1: call}, collective_deadline_seconds=1e6)
    one, dead, two = fabric.run(roles)[:3]
    assert isinstance(dead, BaseException)
    for survivor in (one, two):
        assert survivor["clock"] == 20
        # the dead member had no part in the last exchange
        assert survivor["exchanges"][-1].heard <= len(roles) - 1
        assert bool(torch.isfinite(survivor["consensus"]).all())
    assert fabric.virtual_seconds < 5.0


def test_one_strategy_object_serves_many_replicas_without_sharing_state(kind):
    """The replicator copies the strategy: two replicas of a run must not share its state."""
    shared = kind()

    def member(updates, endpoint):
        """Make updates of one replica; returns the state of the other's strategy, as text."""
        replicator = Replicator(shared, endpoint)
        for name in ("actor", "critic"):
            replicator.replicate(name, PROBLEM.net(), sgd)
        actor, critic = (replicator.bound_replicas[name] for name in ("actor", "critic"))
        if endpoint.rank == 0:
            PROBLEM._run(actor.replica, updates, (0,))
            actor.channel.send(endpoint.size - 1, "done", actor.replica.params)
        while kind.centre and endpoint.rank and actor.channel.receive("done") is None:
            with torch.no_grad():
                actor.strategy.serve(actor.replica, actor.channel)
        return str(critic.strategy.state())

    size = 1 + kind.centre
    unused, beside_one_in_use = (
        SimulatedFabric(size, seed=0).run([functools.partial(member, updates)] * size)[0]
        for updates in (0, 3)
    )
    assert beside_one_in_use == unused, "a replica's updates change the state of another replica's strategy"
    assert shared == kind()
