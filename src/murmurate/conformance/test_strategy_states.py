"""What a strategy saves: with it, the strategy must go on as if nothing had happened."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from murmurate.conformance.problems import same
from murmurate.conformance.test_strategies import KNOWN, MANY_UPDATES, PROBLEM, UPDATES, sgd, start
from murmurate.fabric.simulated.fabric import SimulatedFabric

every_strategy = pytest.mark.parametrize("kind", KNOWN.values(), ids=KNOWN)


@every_strategy
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_its_state_is_all_that_must_survive_a_checkpoint(kind, seed):
    """Half-way each learner's strategy is reset to its fields after ``attach`` and loads its saved state: it
    must go on as if nothing had happened."""
    if not kind.synchronous or kind.centre:
        pytest.skip("what it does after a checkpoint depends on what peers have published meanwhile")
    size = 1 if kind.name == "solo" else 3
    uninterrupted, restored = (
        SimulatedFabric(size, seed=seed).run([functools.partial(saving_role, kind, restores)] * size)
        for restores in (False, True)
    )
    for one, other in zip(uninterrupted, restored, strict=True):
        assert one.exchanges == other.exchanges, "state() or load() leaves out something of exchanges"
        assert all(map(torch.equal, one.path, other.path)), "state() or load() leaves out something"


@every_strategy
@pytest.mark.parametrize("call", ["resumed", "joined", "rewritten"])
def test_with_a_saved_state_it_goes_on_after(kind, call):
    """In a resumed run, at a replica that joins with a peer's state and at its peers, and after parameters
    were overwritten: what was saved is loaded, and none of the calls raises."""
    if kind.centre:
        pytest.skip("what its members exchange after a checkpoint is a matter between them and the centre")
    size = 1 if kind.name == "solo" else 3
    saved = SimulatedFabric(size, seed=0).run([functools.partial(saved_role, kind)] * size)
    role = functools.partial(continuing_role, kind, saved, call)
    for loads_all, updates in SimulatedFabric(size, seed=1).run([role] * size):
        assert loads_all, "after load(saved) state() is not what was saved: load what state returns, and all"
        assert updates == UPDATES


def drain(replicator, end):
    """Wait until all members have made their updates, and have received each other's messages."""
    end.gather(torch.zeros(1))
    assert replicator.drain(1, 5.0)
    end.gather(torch.zeros(1))


def saved_role(kind, endpoint):
    """Make updates, and return the state of the replica and of the strategy, as a checkpoint has it."""
    replicator, replica, end = start(kind, sgd, endpoint)
    PROBLEM._run(replica, UPDATES, (endpoint.rank,))
    drain(replicator, end)
    return copy.deepcopy(replicator.state())


def continuing_role(kind, saved, call, endpoint):
    """Load a state, make the call, and make more updates. Returns whether the state of the strategy that was
    loaded is what was saved, and the number of these updates."""
    replicator, replica, end = start(kind, sgd, endpoint)
    state = saved[0 if call == "joined" else endpoint.rank]
    replicator.load(copy.deepcopy(state))
    loaded = replicator.bound_replicas["model"].strategy.state()
    end.gather(torch.zeros(1))  # members that share memory must not step before all have loaded
    joiner = endpoint.size - 1
    if call == "resumed":
        replicator.resumed()
    elif call == "rewritten":
        replica.rewritten()
    elif endpoint.rank == joiner:
        replicator.rejoined()
    else:
        replicator.joined(joiner)
    before = replica.clock
    PROBLEM._run(replica, UPDATES, (endpoint.rank,), UPDATES)
    return same(loaded, state["model"]["strategy"]), replica.clock - before


def saving_role(kind, restores, endpoint):
    """Make updates, save the strategy's state, restore it if asked to, and make more updates."""
    replicator, replica, end = start(kind, sgd, endpoint)
    strategy = replicator.bound_replicas["model"].strategy
    attached = {name: copied(value) for name, value in vars(strategy).items()}
    vectors = copied_vectors(strategy, replica)
    PROBLEM._run(replica, MANY_UPDATES // 4, (endpoint.rank,))
    drain(replicator, end)
    state = copy.deepcopy(strategy.state())
    if restores:
        vars(strategy).clear()
        vars(strategy).update(attached)
        for vector, content in vectors:
            vector.detach().copy_(content)
        strategy.load(state)
    return PROBLEM._run(replica, MANY_UPDATES // 4, (endpoint.rank,), MANY_UPDATES // 4)


def copied(value):
    """A copy of a strategy's field; the value itself for vectors (see ``copied_vectors``), and handles."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def copied_vectors(strategy, replica):
    """(vector, copy) of a strategy's vectors, but for those in the replica's memory: what is in the others
    after ``attach`` is written back to them, as an optimizer or a fabric may hold them, too."""
    kept = {x.untyped_storage().data_ptr() for x in (replica.params, replica.grad)}
    found = vectors_in(vars(strategy))
    return [(x, x.detach().clone()) for x in found if x.untyped_storage().data_ptr() not in kept]


def vectors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from vectors_in(inner)
