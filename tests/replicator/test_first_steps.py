"""Batches that differ between replicas, and a script that forgets to share them out, are told."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from murmurate.errors import Refusal
from murmurate.replicator.first_steps import hash_of
from murmurate.strategies import strategies
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from replicator.steps import loops, pairs, processes, simulated, tanh_net

# with common rounds, without, with a centre, on one shared vector
STRATEGIES = ["all-reduce", "gala", "parameter-server", "hogwild"]


def shuffled(seed):
    """As a DataLoader that shuffles gives them: the same rows in another order."""
    rows = torch.arange(96.0, dtype=torch.float64).reshape(24, 4)
    source = TensorDataset(rows, rows[:, :3])
    return DataLoader(source, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def learn(loop, batches):
    net = tanh_net()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net)
    steps = 0
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        steps += 1
    return steps


def unseeded(loop):
    return learn(loop, loop.inputs(shuffled(loop.rank)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_shuffle_without_a_common_seed_is_refused_with_the_remedy(strategy):
    with pytest.raises(Refusal, match=r"different batches.*number 0.*DataLoader\(\.\.\., generator=torch"):
        loops(3, unseeded, strategy=strategies()[strategy]())


def test_it_is_refused_on_real_processes_too():
    with pytest.raises((Refusal, RuntimeError), match="different batches"):
        loops(2, unseeded, processes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_batches_pass_and_so_do_a_functions_and_those_not_compared(strategy):
    made = strategies()[strategy]()
    for read in (
        lambda loop: loop.inputs(shuffled(7)),
        lambda loop: loop.inputs(shuffled, per="replica"),
        lambda loop: loop.inputs(shuffled(loop.rank), compare=False),
    ):
        found = loops(2 + made.centre, lambda loop, read=read: learn(loop, read(loop)), strategy=made)
        assert found[:2] == [6, 6]


def test_a_difference_after_the_first_batch_is_told_too():
    def late(loop):
        batches = list(shuffled(1))
        if loop.rank:
            batches[2] = [part + 1e-12 for part in batches[2]]
        return learn(loop, loop.inputs(batches))

    with pytest.raises(Refusal, match="number 2 is not the same"):
        loops(2, late)


def warned(size, script, strategy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops(size, script, simulated, strategy)
    return [str(one.message) for one in caught if "train on the same batches" in str(one.message)]


@pytest.mark.parametrize("strategy", [AllReduce(), GALA()])
def test_a_loop_without_inputs_is_warned_of_once(strategy):
    (sentence,) = warned(3, lambda loop: learn(loop, pairs(8)), strategy)
    assert "all 3 replicas" in sentence
    assert "replicator.inputs(batches)" in sentence


@pytest.mark.parametrize(
    "batches",
    [
        lambda loop: loop.inputs(pairs(8)),
        lambda loop: pairs(8)[loop.rank :: loop.size],  # shared out by hand
        lambda loop: loop.inputs(lambda rank: pairs(4), per="replica"),
    ],
)
def test_one_that_shares_its_batches_out_is_not(batches):
    assert warned(2, lambda loop: learn(loop, batches(loop)), AllReduce()) == []
    assert warned(1, lambda loop: learn(loop, pairs(8)), strategies()["solo"]()) == []


def test_a_hash_depends_on_values_types_and_shapes_and_not_on_where_they_are():
    x = torch.arange(12.0)
    batches = [
        x, x.double(), x.view(3, 4), x + 1e-6, x.bfloat16(), (x, 1), (x, 2), (x, "a"), x.bool(), np.arange(3),
        np.arange(3.0), None, torch.empty(0),
    ]  # fmt: skip
    assert len({hash_of(batch) for batch in batches}) == len(batches)
    assert hash_of([x, object()]) == hash_of([x.clone(), object()]), "an address is no content"
    assert hash_of(x.view(3, 4).T) == hash_of(x.view(3, 4).T.contiguous())


def test_arrays_that_torch_cannot_hold_are_hashed_or_left_out():
    big = np.arange(3, dtype=">f4")
    assert hash_of(big) == hash_of(big.copy()) != hash_of((big + 1).astype(big.dtype))
    names = np.array(["a", "b"])
    assert hash_of(names) == hash_of(names.copy()) != hash_of(names[::-1])
    assert hash_of(np.zeros(3, np.longdouble)) == hash_of(np.ones(3, np.longdouble))
    read_only = np.arange(3.0)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hash_of(read_only) == hash_of(np.arange(3.0))
