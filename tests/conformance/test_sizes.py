"""Collectives of several sizes beside one another: alike on every fabric, for channels and for scripts."""

from __future__ import annotations

import pytest
import torch

import murmurate
from murmurate import fabric
from murmurate.replicator.user_loop import OwnLoop
from murmurate.strategies.all_reduce import AllReduce


def refusals(fabric):
    """What a channel for 51 numbers says to other shapes, by each verb that takes a vector of its own."""
    channel, said = fabric.channel("model", torch.zeros(51)), []
    for shape in ((1,), (2,), (102,), (3, 17)):
        x = torch.ones(shape)
        for act in (channel.mean_, channel.gather, channel.publish, lambda x: channel.broadcast_(x, 0)):
            try:
                act(x)
            except ValueError as error:
                said.append(str(error))
    x = torch.full((51,), float(fabric.rank))
    channel.mean_(x)  # what was refused holds nobody up
    return said, float(x[0])


def beside(fabric):
    """A second channel of another size, in turns with the first."""
    big, small = (fabric.channel(name, torch.zeros(size)) for name, size in (("model", 51), ("norm", 1)))
    found = []
    for turn in range(3):
        x, y = torch.full((51,), float(fabric.rank + turn)), torch.tensor([10.0 * fabric.rank])
        found.append((big.mean_(x), small.mean_(y), float(x[50]), float(y), sorted(small.gather(y))))
    return found


SIZES = (0, 1, 51, 1 << 12, (1 << 18) + 3)  # the last is of several pieces


def collectives(loop):
    """Sums of what a script's collectives give, for vectors of all sizes one after the other."""
    net = torch.nn.Linear(2, 1)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    found = []
    for size in (*SIZES, *reversed(SIZES)):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        x = torch.arange(size, dtype=torch.float64) * (loop.rank + 1)
        mean, gathered, joined = loop.mean(x), loop.gather(x), loop.gather(x[: loop.rank], join=True)
        sent, largest = loop.broadcast(x, 1), loop.reduce(x.sum(), "max")
        sums = [float(mean.sum()), float(sent.sum()), float(largest)]
        found.append((sums, tuple(gathered.shape), len(joined)))
    return found


def in_a_loop(fabric):
    with OwnLoop(AllReduce(), fabric) as loop:
        return collectives(loop)


def expected():
    totals = {size: size * (size - 1) / 2 for size in SIZES}
    return [
        ([1.5 * totals[size], 2 * totals[size], 2 * totals[size]], (2, size), min(size, 1))
        for size in (*SIZES, *reversed(SIZES))
    ]


@pytest.fixture(params=sorted(fabric.fabrics()))
def members(request):
    module = fabric.fabrics()[request.param]
    return lambda function: module.run_members(2, [function] * 2)


def test_a_channel_refuses_other_shapes_and_says_what_to_do(members):
    for said, mean in members(refusals):
        assert len(said) == 16
        assert said[0].startswith("Channel 'model' is for [51], this is [1]. Make another channel for it")
        assert mean == 0.5


def test_a_second_channel_of_another_size_works_beside_the_first(members):
    expected = [(2, 2, turn + 0.5, 5.0, [0, 1]) for turn in range(3)]
    assert members(beside) == [expected] * 2


def test_a_scripts_collectives_take_any_size(members):
    assert members(in_a_loop) == [expected()] * 2


def test_they_do_so_in_a_script_of_murmurate_run():
    """Inline: the processes of the local launcher have the fabric of processes, as in the test above."""
    assert murmurate.run(collectives, replicas=2, launcher="inline") == [expected()] * 2
