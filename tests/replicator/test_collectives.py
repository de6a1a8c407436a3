"""Collectives against an oracle that has all members' tensors, and what they refuse."""

from __future__ import annotations

import copy
import functools
from collections import namedtuple

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import Crashed, SimulatedFabric
from murmurate.launch.script import run
from murmurate.nets.batch_norm import BatchNorm
from murmurate.replicator.collectives import Group
from murmurate.replicator.gather import TensorExchange
from murmurate.replicator.user_loop import OwnLoop
from murmurate.strategies import strategies
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.local_sgd import LocalSGD
from replicator.steps import close, draw, live, loops, processes, second_smallest, simulated

Pair = namedtuple("Pair", "left right")
KNOWN = strategies()
ALONE_PACED = [name for name, kind in KNOWN.items() if kind().needs and not kind.synchronous]
SYNCHRONOUS = [name for name, kind in KNOWN.items() if kind.synchronous]


def handed_in(rank):
    """A nested structure with a scalar, a matrix, whole numbers and booleans."""
    return {
        "a": draw(rank, 2, 3),
        "b": [Pair(draw(50 + rank), torch.tensor([rank, 7 - rank])), (draw(90 + rank, 4) > 0,)],
        "c": draw(rank + 7, 5).bfloat16(),
    }


def square(x):
    return {"square": x * x, "row": torch.stack([x, 2 * x])}


def all_of_them(loop):
    x = handed_in(loop.rank)
    smooth = {"a": x["a"], "c": x["c"]}
    items = [draw(300 + k) for k in range(5)]
    return {
        "mean": loop.mean(smooth),
        "sum": loop.sum({"a": x["a"], "n": x["b"][0].right}),
        "min": loop.reduce(x, "min"),
        "max": loop.reduce(x["a"], "max"),
        "product": loop.reduce(x["a"], "product"),
        "second": loop.reduce(x["a"], second_smallest),
        "gather": loop.gather(x),
        "joined": loop.gather(draw(40 + loop.rank, 1 + loop.rank, 2), join=True),
        "broadcast": loop.broadcast(x, root=loop.size - 1),
        "mapped": loop.map_gather(square, items),
        "map-reduced": loop.map_reduce(square, items, "sum"),
        "number": loop.sum(loop.rank + 1),
    }


def expected(size):
    xs = [handed_in(rank) for rank in range(size)]
    a = torch.stack([x["a"] for x in xs])
    c = torch.stack([x["c"] for x in xs])
    left = torch.stack([x["b"][0].left for x in xs])
    right = torch.stack([x["b"][0].right for x in xs])
    truth = torch.stack([x["b"][1][0] for x in xs])
    items = torch.stack([draw(300 + k) for k in range(5)])
    mapped = {"square": items**2, "row": torch.stack([items, 2 * items], 1)}
    return {
        "mean": {"a": a.mean(0), "c": c.mean(0)},
        "sum": {"a": a.sum(0), "n": right.sum(0)},
        "min": {
            "a": a.amin(0),
            "b": [Pair(left.amin(0), right.amin(0)), (truth.all(0),)],
            "c": c.amin(0),
        },
        "max": a.amax(0),
        "product": a.prod(0),
        "second": second_smallest(a),
        "gather": {"a": a, "b": [Pair(left, right), (truth,)], "c": c},
        "joined": torch.cat([draw(40 + r, 1 + r, 2) for r in range(size)]),
        "broadcast": xs[-1],
        "mapped": mapped,
        "map-reduced": {k: v.sum(0) for k, v in mapped.items()},
        "number": torch.tensor(size * (size + 1) // 2),
    }


def check_all(result):
    for one in result:
        close(one, expected(len(result)))
        assert isinstance(one["gather"]["b"][0], Pair)
    for other in result[1:]:
        torch.testing.assert_close(other, result[0], rtol=0, atol=0)  # the same bits on all


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_is_its_oracle_on_stacked_tensors(size):
    check_all(loops(size, all_of_them))


def test_each_is_its_oracle_on_real_processes():
    check_all(loops(3, all_of_them, processes))


def lengths(loop):
    return [loop.gather(draw(loop.rank, n).float()) for n in (1, 500, 1100, 270_000)]


@pytest.mark.parametrize("fabric", [simulated, processes])
def test_messages_of_any_length_arrive_to_the_bit(fabric):
    """Below a short message, across its end, and over several long ones."""
    for result in loops(2, lengths, fabric):
        for x, n in zip(result, (1, 500, 1100, 270_000), strict=True):
            assert torch.equal(x, torch.stack([draw(r, n).float() for r in range(2)]))


# -- what goes wrong --------------------------------------------------------------------------------


def test_other_calls_are_an_error_that_says_which():
    def script(loop):
        return loop.mean(torch.ones(2)) if loop.rank else loop.sum(torch.ones(2))

    with pytest.raises(FabricError, match=r"calls (mean|sum) \(number 1\) of float32\[2\] where rank"):
        loops(2, script)


def test_other_shapes_are_an_error():
    with pytest.raises(FabricError, match="Make the same collective calls"):
        loops(2, lambda loop: loop.mean(torch.ones(2 + loop.rank)))


def test_who_does_not_come_is_named_at_the_deadline():
    def script(loop):
        return (
            loop.mean(torch.ones(2)) if loop.rank else loop.fabric.channel("x", torch.ones(1)).wait("x", 30.0)
        )

    fabric = SimulatedFabric(2, seed=0, collective_deadline_seconds=5.0, coroutines="threads")
    with pytest.raises(FabricError, match=r"ranks \[0\] did not call it"):
        fabric.run([functools.partial(live, script, AllReduce(), {})] * 2)


@pytest.mark.parametrize("call", range(2, 24))
def test_a_mean_is_over_the_living_whenever_one_dies(call):
    """Rank 1 dies at its k-th fabric call; the others agree to the bit, in forward and backward."""

    def script(loop):
        seen = []
        for step in range(6):
            x = draw(10 * step + loop.rank, 1500).requires_grad_()
            y = loop.mean(x)
            y.pow(2).sum().backward()
            roots = loop.map_gather(torch.sqrt, [torch.tensor(float(k)) for k in range(7)])
            seen.append((y.detach(), x.grad, roots))
        return seen

    fabric = SimulatedFabric(
        3, seed=call, crashes={1: call}, collective_deadline_seconds=60.0, coroutines="threads"
    )
    one, dead, two = fabric.run([functools.partial(live, script, AllReduce(), {})] * 3)
    assert isinstance(dead, Crashed)
    roots = torch.arange(7.0).sqrt()
    for step, ((y, slope, mapped), (z, other, _)) in enumerate(zip(one, two, strict=True)):
        assert torch.equal(y, z)
        assert torch.equal(slope, other)
        close(slope, 2 * y)  # the mean of equal gradients, however many there are
        close(mapped, roots)  # what the dead was to do was done by the others
        given = torch.stack([draw(10 * step + rank, 1500) for rank in range(3)])
        assert torch.allclose(y, given.mean(0)) or torch.allclose(y, given[[0, 2]].mean(0))
    assert torch.allclose(one[-1][0], torch.stack([draw(50, 1500), draw(52, 1500)]).mean(0))


def test_a_member_that_joins_late_counts_its_calls_as_the_others_do():
    def member(fabric):
        exchange = TensorExchange(fabric)
        group = Group(exchange)
        for _ in range(3):
            group.mean(1.0)
        if fabric.rank == 1:
            exchange = TensorExchange(fabric)  # as in a process that has taken a dead one's place
            group = Group(exchange)
        return [float(group.mean(float(fabric.rank))) for _ in range(2)], exchange._calls

    assert simulated(3, member) == [([1.0, 1.0], 5)] * 3


def test_what_cannot_be_handed_in():
    def script(loop, x, act):
        getattr(loop, act)(x)

    with pytest.raises(TypeError, match="not str"):
        loops(1, functools.partial(script, x={"a": "text"}, act="sum"))
    with pytest.raises(TypeError, match="floating-point"):
        loops(1, functools.partial(script, x=torch.tensor(3), act="mean"))
    with pytest.raises(ValueError, match="no reduction 'median'"):
        loops(1, lambda loop: loop.reduce(torch.ones(2), "median"))
    with pytest.raises(ValueError, match="no member 2 in a group of 1"):
        loops(1, lambda loop: loop.broadcast(torch.ones(2), root=2))
    with pytest.raises(ValueError, match="at least one item"):
        loops(1, lambda loop: loop.map_gather(torch.sqrt, []))


# -- strategies that cannot -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALONE_PACED)
def test_asynchronous_strategies_refuse_at_once(name):
    kind = KNOWN[name]
    assert "hogwild" in ALONE_PACED
    assert "gala" in ALONE_PACED
    size = 2 + kind.centre
    remedy = rf"{name} cannot give .*Use all-reduce or local-sgd"
    with pytest.raises(Refusal, match=remedy):  # in the process that starts, before there is any other
        run(print, replicas=2, strategy=name, collectives=True)
    with pytest.raises(Refusal, match=remedy):
        loops(size, print, strategy=kind(), collectives=True)
    for ask in (
        lambda loop: loop.mean(torch.ones(2)),
        lambda loop: loop.map_gather(torch.sqrt, [torch.ones(1)]),
        lambda loop: loop.within,
        lambda loop: loop.across,
    ):
        with pytest.raises(Refusal, match=remedy):
            loops(size, ask, strategy=kind())


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_strategies_give_collectives(name):
    result = loops(3, lambda loop: loop.sum(loop.rank).item(), strategy=KNOWN[name](), collectives=True)
    assert result == [3, 3, 3]


def test_local_sgd_meets_at_every_step_for_a_collective():
    def script(loop):
        net = torch.nn.Linear(1, 1, bias=False)
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            (net(torch.ones(1, 1)).sum() * (1 + loop.rank)).backward()
            optimizer.step()
            seen.append(loop.mean(net.weight.detach()).item())
        return seen

    one, two = loops(2, script, strategy=LocalSGD(period=3))
    assert one == two


def test_a_fabric_of_ones_own_is_enough():
    def member(fabric):
        return OwnLoop(AllReduce(), fabric).mean(float(fabric.rank)).item()

    assert simulated(3, member) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("sum_of", [lambda loop: loop.sum, lambda loop: loop.within.sum])
def test_a_module_that_makes_collectives_can_be_copied(sum_of):
    """As a moving average of its parameters is, by ``AveragedModel``."""

    def script(loop):
        norm = BatchNorm(2, sum_over=sum_of(loop))
        x = draw(loop.rank, 3, 2, 4, 4)
        return torch.equal(copy.deepcopy(norm)(x), norm(x))

    assert loops(2, script) == [True, True]
